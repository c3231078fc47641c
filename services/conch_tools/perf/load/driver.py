"""Decides when the next request is sent, and runs the loop of one load process.

One thread: it waits for sockets and for the next time of the schedule, hands what has come to the clients
and sends what is due. A closed loop has slots: the end of a call sends the next one of its slot. An open loop
sends at its times, whatever is outstanding, up to a limit; what is beyond is shed.

Without a connection a call fails at once, and no other one is sent for `_RETRY_NS`; in an open loop those are
late then.
"""

from __future__ import annotations

import select
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from time import monotonic_ns

from conch_tools.perf.load.calls import Call, Client
from conch_tools.perf.load.ready_requests import ReadyRequest
from conch_tools.perf.load.recorder import Recorder

_LONGEST_WAIT_NS = 100_000_000
_RETRY_NS = 100_000_000
_FINE_NS = 5_000_000
_PARKED_NS = 1_000_000  # between looks at connections that take no call


class Driver:
    """The load of one process.

    Args:
        connect: Opens a connection whose calls end here. Raises OSError.
        connections: Most connections.
        next_request: The next request of a slot; of -1 in an open loop.
        recorder: Counts.
        stops: Whether to stop; called now and then.
        calls: How many calls are made; the load ends with the last one.
        keeps: Whether calls keep their responses.
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
        self._connect = connect
        self._most = connections
        self._next_request = next_request
        self._recorder = recorder
        self._stops = stops
        self._left = calls
        self._keeps = keeps
        self._poll = select.epoll()
        self._places: list[Client | None] = []
        self._clients: dict[int, tuple[int, Client]] = {}
        self._dirty: dict[int, Client] = {}
        self._writing: set[int] = set()
        self._waiting: deque[Call] = deque()  # of an open loop: no connection takes them yet
        self._parked: list[int] = []  # slots that wait for a connection
        self._retry_ns = 0
        self._outstanding = 0
        self._closed_loop = False
        self._over = False

    def run_closed(self, slots: Sequence[int], end_ns: int) -> None:
        """Keeps a call in flight for each slot until a time, then waits for none."""
        self._closed_loop = True
        self._parked = list(slots)
        while (now := monotonic_ns()) < end_ns and not self._stops() and (self._left or self._outstanding):
            if self._parked and now >= self._retry_ns:
                parked, self._parked = self._parked, []
                for slot in parked:
                    self._begin(slot, now)
            wait_ns = min(end_ns - now, _LONGEST_WAIT_NS)
            if self._parked:
                wait_ns = min(wait_ns, max(self._retry_ns - now, _PARKED_NS))
            self._round(wait_ns)
        self._close()

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
                    self._waiting.append(Call(self._next_request(-1), due_ns, keeps=self._keeps))
                due_ns = next(times, end_ns)
            if self._waiting and now >= self._retry_ns:
                self._send_waiting(now)
            wait_ns = min(due_ns, end_ns) - monotonic_ns()
            if self._waiting:
                wait_ns = min(wait_ns, max(self._retry_ns - now, 1_000_000))
            self._round(max(min(wait_ns, _LONGEST_WAIT_NS), 0))
        self._close()

    # --- see `Ended` ---------------------------------------------------------------------------------------

    def responded(self, call: Call, now_ns: int) -> None:
        """Counts a response of a stream."""
        self._recorder.responded(call, now_ns)

    def call_ended(self, call: Call, error: str, now_ns: int) -> None:
        """Counts an end; in a closed loop the slot goes on."""
        self._recorder.ended(call, error, now_ns)
        self._outstanding -= 1
        if self._closed_loop and not self._over:
            if error and now_ns < self._retry_ns:
                self._parked.append(call.slot)
            else:
                self._begin(call.slot, now_ns)

    # --- sending -------------------------------------------------------------------------------------------

    def _begin(self, slot: int, now_ns: int) -> None:
        if not self._left:
            return
        client = self._client(slot % self._most, now_ns)
        if client is not None and not client.can_send:
            client = self._free(now_ns)
        if client is None or not client.can_send:
            self._parked.append(slot)
            return
        self._outstanding += 1
        self._left -= 1
        self._send(client, Call(self._next_request(slot), now_ns, slot, self._keeps), now_ns)

    def _send_waiting(self, now_ns: int) -> None:
        while self._waiting:
            client = self._free(now_ns)
            if client is None:
                return
            self._send(client, self._waiting.popleft(), now_ns)

    def _send(self, client: Client, call: Call, now_ns: int) -> None:
        client.send(call, now_ns)
        self._recorder.sent(call, now_ns)
        self._dirty[client.fileno()] = client

    def _free(self, now_ns: int) -> Client | None:
        """A connection that takes a call, the one with the fewest; opened if there may be another."""
        usable = [each for each in self._places if each is not None and each.can_send]
        idle = min(usable, key=lambda each: each.in_flight, default=None)
        if idle is not None and (not idle.in_flight or len(usable) >= self._most):
            return idle
        for place in range(self._most):
            known = self._places[place] if place < len(self._places) else None
            if known is None or known.lost:
                return self._client(place, now_ns)
        return idle

    def _client(self, place: int, now_ns: int) -> Client | None:
        """The connection of a place; opened if there is none. None if that failed."""
        while len(self._places) <= place:
            self._places.append(None)
        client = self._places[place]
        if client is not None and not client.lost:
            return client
        if client is not None:
            self._drop(client)
        if now_ns < self._retry_ns:
            return None
        try:
            client = self._connect(self)
        except OSError as error:
            self._retry_ns = now_ns + _RETRY_NS
            self._recorder.failed(f"can't connect: {error.strerror or error}", now_ns)
            return None
        self._places[place] = client
        self._clients[client.fileno()] = place, client
        self._poll.register(client.fileno(), select.EPOLLIN)
        return client

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
        if 0 < wait_ns < _FINE_NS:  # epoll waits for whole milliseconds
            select.select((self._poll,), (), (), wait_ns / 1e9)
            wait_ns = 0
        for descriptor, events in self._poll.poll(wait_ns / 1e9):
            found = self._clients.get(descriptor)
            if found is None:
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

    def _close(self) -> None:
        self._over = True
        for _, client in list(self._clients.values()):
            self._drop(client)
        self._poll.close()
        self._recorder.finish()
