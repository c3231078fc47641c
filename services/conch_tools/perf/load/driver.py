"""Decides when the next request is sent, and runs the loop of one load process.

One thread: it waits for sockets and for the next time of the schedule, hands what has come to the clients
and sends what is due. A closed loop has slots: the end of a call sends the next one of its slot. An open loop
sends at its times, whatever is outstanding, up to a limit; what is beyond is shed. With sequences a call of
an open loop waits for a sequence without an outstanding call; in a closed loop each slot is a sequence.

Connections are opened on threads; calls wait for theirs, and in an open loop are late then. After one that
could not be opened no other one is tried for `_RETRY_NS`.
"""

from __future__ import annotations

import select
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from time import monotonic_ns

from conch_tools.perf.load.calls import Client, LoadCall
from conch_tools.perf.load.connecting import Connector
from conch_tools.perf.load.ready_requests import ReadyRequest
from conch_tools.perf.load.recorder import Recorder
from conch_tools.perf.load.sequences import Sequences

_LONGEST_WAIT_NS = 100_000_000
_RETRY_NS = 100_000_000
_FINE_NS = 5_000_000
_MOST_TEXT = 300
_COARSE_NS = 2_000_000


class Driver:
    """The load of one process.

    Args:
        connect: Opens a connection whose calls end here, on any thread. Raises OSError.
        connections: Most connections.
        next_request: The next request of a slot; of -1 in an open loop.
        recorder: Counts.
        stops: Returns True to stop; called now and then.
        calls: Number of calls; the load ends with the last one.
        keeps: True if calls keep their responses.

    Attributes:
        stream_limit: Calls that the server allows on a connection, if others had to wait for them; else 0.
        texts: The server's text of the first error, by status.
    """

    def __init__(
        self,
        connect: Callable[[Driver], Client],
        connections: int,
        next_request: Callable[[int], ReadyRequest],
        recorder: Recorder,
        stops: Callable[[], bool],
        calls: int = sys.maxsize,
        keeps: bool = False,
    ) -> None:
        self._connector = Connector(lambda: connect(self))
        self._most = connections
        self._next_request = next_request
        self._recorder = recorder
        self._stops = stops
        self._left = calls
        self._keeps = keeps
        self._poll = select.epoll()
        self._poll.register(self._connector.fileno(), select.EPOLLIN)
        self._places: list[Client | None] = [None] * connections
        self._clients: dict[int, tuple[int, Client]] = {}
        self._dirty: dict[int, Client] = {}
        self._writing: set[int] = set()
        self._waiting: deque[int] = deque()  # times of an open loop: calls that are not sent yet
        self._parked: list[int] = []  # slots that wait for a connection
        self._retry_ns = 0
        self.stream_limit = 0
        self.texts: dict[str, str] = {}
        self._outstanding = 0
        self._closed_loop = False
        self._over = False

    def run_closed(self, slots: int, end_ns: int) -> None:
        """Keeps a call in flight for each slot until a time, then waits for none."""
        self._closed_loop = True
        self._parked = list(range(slots))
        while (now := monotonic_ns()) < end_ns and not self._stops() and (self._left or self._outstanding):
            if self._parked:
                parked, self._parked = self._parked, []
                for slot in parked:
                    self._begin(slot, now)
            wait_ns = min(end_ns - now, _LONGEST_WAIT_NS)
            if self._parked and self._retry_ns > now:
                wait_ns = min(wait_ns, self._retry_ns - now)
            self._round(wait_ns)
        self._finish()

    def run_open(self, times: Iterator[int], end_ns: int, most: int) -> None:
        """Sends at times (monotonic ns) until one, with at most so many outstanding."""
        times = islice(times, self._left)
        due_ns = next(times, end_ns)
        while (now := monotonic_ns()) < end_ns and not self._stops():
            if due_ns >= end_ns and not self._outstanding:
                break
            while due_ns <= now and due_ns < end_ns:
                if self._outstanding >= most:
                    self._recorder.shed(now)
                else:
                    self._outstanding += 1
                    self._waiting.append(due_ns)
                due_ns = next(times, end_ns)
            if self._waiting:
                self._send_waiting(now)
            wait_ns = min(due_ns, end_ns) - monotonic_ns()
            if self._waiting and self._retry_ns > now:
                wait_ns = min(wait_ns, self._retry_ns - now)
            self._round(max(min(wait_ns, _LONGEST_WAIT_NS), 0))
        self._finish()

    def close(self) -> None:
        """Closes the connections; calls without an end are forgotten."""
        for _, client in list(self._clients.values()):
            self._drop(client)
        self._poll.close()
        self._connector.close()

    # --- see `Ended` ---------------------------------------------------------------------------------------

    def explained(self, error: str, text: str) -> None:
        """Keeps what the server says of the first error of a status."""
        self.texts.setdefault(error, text[:_MOST_TEXT])

    def responded(self, call: LoadCall, now_ns: int) -> None:
        """Counts a response of a stream."""
        self._recorder.responded(call, now_ns)

    def call_ended(self, call: LoadCall, error: str, now_ns: int) -> None:
        """Counts an end; in a closed loop the slot goes on."""
        self._recorder.ended(call, error, now_ns)
        self._outstanding -= 1
        if self._closed_loop and not self._over:
            self._begin(call.slot, now_ns)

    # --- sending -------------------------------------------------------------------------------------------

    def _begin(self, slot: int, now_ns: int) -> None:
        if not self._left:
            return
        client = self._places[slot % self._most]
        if client is None or not client.takes(slot):
            client = self._slot_client(slot, now_ns)
            if client is None:
                self._parked.append(slot)
                return
        self._outstanding += 1
        self._left -= 1
        self._send(client, LoadCall(self._next_request(slot), now_ns, slot, self._keeps), now_ns, now_ns)

    def _send_waiting(self, now_ns: int) -> None:
        while self._waiting:
            client = self._free(now_ns)
            if client is None:
                return
            due_ns = self._waiting.popleft()
            self._send(client, LoadCall(self._next_request(-1), due_ns, keeps=self._keeps), due_ns, now_ns)

    def _send(self, client: Client, call: LoadCall, ready_ns: int, now_ns: int) -> None:
        client.send(call, now_ns)
        self._recorder.sent(ready_ns, now_ns)
        self._dirty[client.fileno()] = client

    def _slot_client(self, slot: int, now_ns: int) -> Client | None:
        """The connection for a slot, its own one if that takes a call. None if there is none."""
        client = self._client(slot % self._most, now_ns)
        if client is None or client.takes(slot):
            return client
        return self._free(now_ns)

    def _free(self, now_ns: int) -> Client | None:
        """A connection that takes a call, the one with the fewest; if there may be more, one is opened."""
        usable = [each for each in self._places if each is not None and each.takes(-1)]
        idle = min(usable, key=lambda each: each.in_flight, default=None)
        if idle is not None and (not idle.in_flight or len(usable) >= self._most):
            return idle
        for place, known in enumerate(self._places):
            if known is None or known.lost:
                self._client(place, now_ns)
                return idle
        if idle is None:
            full = [each.full_at for each in self._places if each is not None]
            self.stream_limit = max([self.stream_limit, *full])
        return idle

    def _client(self, place: int, now_ns: int) -> Client | None:
        """The connection of a place. None if there is none yet; it is being opened."""
        client = self._places[place]
        if client is not None and not client.lost:
            return client
        if client is not None:
            self._drop(client)
        if now_ns >= self._retry_ns:
            self._connector.begin(place)
        return None

    def _take_opened(self) -> None:
        for place, client in self._connector.take():
            if isinstance(client, OSError):
                now = monotonic_ns()
                self._retry_ns = now + _RETRY_NS
                self._recorder.failed(f"can't connect: {client.strerror or client}", now)
                continue
            self._places[place] = client
            self._clients[client.fileno()] = place, client
            self._poll.register(client.fileno(), select.EPOLLIN)

    def _drop(self, client: Client) -> None:
        place, _ = self._clients.pop(client.fileno())
        self._places[place] = None
        self._dirty.pop(client.fileno(), None)
        self._writing.discard(client.fileno())
        self._poll.unregister(client.fileno())
        client.close()

    # --- the loop ------------------------------------------------------------------------------------------

    def _round(self, wait_ns: int) -> None:
        """Handles what has come, and sends what is queued."""
        self._flush()
        if wait_ns >= _FINE_NS:  # epoll waits for whole milliseconds, up
            wait_ns -= _COARSE_NS
        elif wait_ns > 0:
            select.select((self._poll,), (), (), wait_ns / 1e9)
            wait_ns = 0
        for descriptor, events in self._poll.poll(wait_ns / 1e9):
            found = self._clients.get(descriptor)
            if found is None:
                if descriptor == self._connector.fileno():
                    self._take_opened()
                continue
            _, client = found
            now = monotonic_ns()
            if events & ~select.EPOLLOUT:
                client.read(now)
            if not client.lost:  # of a lost one the descriptor may already be its successor's
                self._dirty[descriptor] = client
        self._flush()
        for _, client in [each for each in self._clients.values() if each[1].lost and not each[1].in_flight]:
            self._drop(client)

    def _flush(self) -> None:
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
            for descriptor, client in dirty.items():
                if client.lost:
                    continue
                client.flush(monotonic_ns())
                if client.wants_write is not (descriptor in self._writing) and not client.lost:
                    events = select.EPOLLIN | select.EPOLLOUT if client.wants_write else select.EPOLLIN
                    self._poll.modify(descriptor, events)
                    (self._writing.add if client.wants_write else self._writing.discard)(descriptor)

    def _finish(self) -> None:
        self._over = True
        self._recorder.finish()


class SequenceDriver(Driver):
    """The load of one process with sequences.

    Args:
        connect, connections, recorder, stops, calls, keeps: As of `Driver`.
        sequences: One for each slot.
        slots: Number of slots.
    """

    def __init__(
        self,
        connect: Callable[[Driver], Client],
        connections: int,
        sequences: Sequences,
        slots: int,
        recorder: Recorder,
        stops: Callable[[], bool],
        calls: int = sys.maxsize,
        keeps: bool = False,
    ) -> None:
        super().__init__(connect, connections, sequences.next_request, recorder, stops, calls, keeps)
        self._sequences = sequences
        self._idle = deque(range(slots))  # of an open loop: sequences without an outstanding call
        self._idle_since_ns = 0

    def call_ended(self, call: LoadCall, error: str, now_ns: int) -> None:
        """Counts an end; the sequence goes on, or the slot begins another one."""
        if self._sequences.ended(call.slot, error):
            self._recorder.sequence_ended(now_ns)
        if not self._closed_loop:
            if not self._idle:
                self._idle_since_ns = now_ns
            self._idle.append(call.slot)
        super().call_ended(call, error, now_ns)

    def end_sequences(self, until_ns: int) -> None:
        """Sends an uncounted last request of each live sequence, so that the server need not keep it.

        A request that is still on its way is waited for until a time, as is the last one.
        """
        tried: set[int] = set()
        while (now := monotonic_ns()) < until_ns:
            for slot in self._sequences.unfinished():
                client = None if slot in tried else self._slot_client(slot, now)
                if client is not None:
                    tried.add(slot)
                    self._send(client, LoadCall(self._sequences.last_request(slot), now, slot), now, now)
            if not any(client.in_flight for _, client in self._clients.values()):
                break
            self._round(min(until_ns - now, _LONGEST_WAIT_NS))

    def _send_waiting(self, now_ns: int) -> None:
        while self._waiting and self._idle:
            client = self._slot_client(self._idle[0], now_ns)
            if client is None:
                return
            slot, due_ns = self._idle.popleft(), self._waiting.popleft()
            call = LoadCall(self._next_request(slot), due_ns, slot, self._keeps)
            # The generator is not late where all sequences wait for answers.
            self._send(client, call, max(due_ns, self._idle_since_ns), now_ns)
