"""HTTP ports with fronts: the core accepts, gives each connection to a front, and handles its exchanges.

`FrontListener` is a listener as `http_loop.HttpListener` is, so a port and its handlers are the same with and
without fronts. `HttpLink` is the core's end of one front. Supervision of the processes is `FrontServer`'s.

Threads and locks: the event loop that HTTP ports share; what differs says so.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from conch.core.errors import ConchError
from conch.core.tensor import Tensor
from conch.frontends.connections.listener import Listener
from conch.frontends.http.http_connection import Handler
from conch.frontends.http.http_exchange import HttpExchange
from conch.frontends.http.http_loop import (
    ABORT_S,
    HttpLoop,
    bound_sockets,
    end_tasks,
    ended_in_time,
    in_time,
    refuse_crowded,
)
from conch.frontends.http.http_options import HttpTls
from conch.frontends.http.infer.infer_response import failure
from conch.fronts.connection_passing import ConnectionSender
from conch.fronts.decoded_requests import RequestReader
from conch.fronts.http_messages import (
    MOST_HEADS,
    OPENED,
    READ_STEP,
    HttpRecord,
    PortSettings,
    Record,
    RecordSender,
    decode_head,
    decode_records,
    encode_port,
    whole_response,
)
from conch.fronts.packed_responses import PackedResponse, ResponseSender
from conch.fronts.remote_exchanges import ReceivedHead, RemoteExchange
from conch.ipc import codec
from conch.ipc.channel import ChannelClosedError, Kind, PacketChannel, WireError
from conch.ipc.spec_json import record_to_json
from conch.ipc.tensors import MessageStream, Payload, ReceivedMessage

log = logging.getLogger(__name__)

_READS = 8
"""Messages handled before others have their turn."""
_TRY_S = 0.05
"""Time after which connections that no front has taken are offered again."""
_TIDY_S = 10.0


class HttpFronts:
    """The HTTP ports of a server with fronts.

    Args:
        thread: The event loop.
        count: Number of fronts.
        find_links: Finds the fronts that take connections, the one with the fewest open calls first.

    Attributes:
        requests: Reads decoded requests; all fronts have the same, so that equal requests stay known.
        open: Number of ports that are not closed.
        tasks: Tasks of handlers, and the ports of their exchanges.
    """

    def __init__(self, thread: HttpLoop, count: int, find_links: Callable[[], Sequence[HttpLink]]) -> None:
        self.thread = thread
        self._count = count
        self._find_links = find_links
        self._links: set[HttpLink] = set()
        self._ports: dict[int, tuple[PortSettings, Handler]] = {}
        self._taking: set[int] = set()  # ports that are not being closed
        self._numbers = 0
        self._waiting: deque[tuple[int, socket.socket]] = deque()  # connections that no front takes
        self._on_change: dict[int, Callable[[], None]] = {}
        self._connected = False
        self.requests = RequestReader()
        self.open = 0
        self.tasks: dict[asyncio.Task[None], int] = {}

    # From any thread.

    def listen(
        self,
        handler: Handler,
        host: str,
        port: int,
        tls: HttpTls | None,
        reuse_port: bool,
        idle_s: float,
        most_connections: int,
        infer_bytes: int | None,
    ) -> FrontListener:
        """Serves HTTP on an address; see `HttpLoop.listen` and `PortSettings`.

        Raises:
            UnavailableError: The address or TLS can't be used.
        """
        if tls is not None:
            tls.context()
        bound = bound_sockets(host, port, reuse_port)
        self.thread.start()
        with ExitStack() as undo:
            for each in bound:
                undo.callback(each.close)
            settings = PortSettings(tls, idle_s, -(-most_connections // self._count), infer_bytes)
            listener = FrontListener(self, handler, bound, settings)
            self.thread.run(listener.start()).result()
            undo.pop_all()
        return listener

    def connect(
        self, packets: socket.socket, connections: ConnectionSender[int], on_lost: Callable[[str], None]
    ) -> HttpLink:
        """Begins the conversation with a front."""
        self.thread.start()
        self._connected = True
        link = HttpLink(self, packets, connections, on_lost)
        self.thread.loop.call_soon_threadsafe(self._start, link)
        return link

    def take_back(self, link: HttpLink) -> None:
        """Gives connections that a front had not taken to others; its process has ended."""
        self.thread.loop.call_soon_threadsafe(self._take_back, link)

    def close(self) -> None:
        """Ends the conversations with all fronts; blocks."""
        if self._connected:
            self.thread.run(self._lose_links()).result()

    # On the loop.

    async def _lose_links(self) -> None:
        for link in list(self._links):
            link.lose("the server stops")

    def _take_back(self, link: HttpLink) -> None:
        link.lose("its process has ended")
        for accepted, number in link.take_back():
            if number in self._taking:
                self.give(number, accepted)
            else:
                accepted.close()

    def _start(self, link: HttpLink) -> None:
        self._links.add(link)
        link.start()
        for number, (settings, _) in self._ports.items():
            link.listen(number, settings)

    def add_port(self, settings: PortSettings, handler: Handler, on_change: Callable[[], None]) -> int:
        """Adds a port to all fronts; returns its number. `on_change`: connections have ended."""
        self._numbers += 1
        number = self._numbers
        self._ports[number] = settings, handler
        self._taking.add(number)
        self._on_change[number] = on_change
        for link in list(self._links):
            link.listen(number, settings)
        return number

    def close_port(self, number: int, grace_s: float) -> None:
        """Has all fronts end the connections of a port, to which no more are given."""
        self._taking.discard(number)
        for each in [each for each in self._waiting if each[0] == number]:
            self._waiting.remove(each)
            each[1].close()
        for link in list(self._links):
            link.send(HttpRecord(Record.CLOSE, number, amount=int(grace_s * 1000)))

    def remove_port(self, number: int) -> None:
        """Forgets a port without connections."""
        self._ports.pop(number, None)
        self._on_change.pop(number, None)

    def handler(self, number: int) -> Handler:
        """The handler of a port, also of one that has just been closed."""
        return self._ports[number][1] if number in self._ports else HttpExchange.abort

    def give(self, number: int, accepted: socket.socket) -> None:
        """Gives a connection to a front, at once or when one takes it."""
        if self._waiting or not self._give(number, accepted):
            if not self._waiting:
                self.thread.loop.call_later(_TRY_S, self._give_waiting)
            self._waiting.append((number, accepted))

    def _give(self, number: int, accepted: socket.socket) -> bool:
        most = self._ports[number][0].most_connections  # of a front: idle ones would give way there
        links = sorted(self._find_links(), key=lambda link: link.connections_of(number) >= most)
        return any(link.give(number, accepted) for link in links)

    def _give_waiting(self) -> None:
        while self._waiting and self._give(*self._waiting[0]):
            self._waiting.popleft()
        if self._waiting:
            self.thread.loop.call_later(_TRY_S, self._give_waiting)

    def waiting(self, number: int) -> int:
        """The connections of a port that wait for a front."""
        return sum(each[0] == number for each in self._waiting)

    def connections(self, number: int) -> int:
        """The open connections of a port, and those that wait for a front."""
        return self.waiting(number) + sum(link.connections_of(number) for link in self._links)

    def exchanges(self, numbers: Sequence[int]) -> list[RemoteExchange]:
        """The exchanges of ports that have not ended."""
        return [each for link in self._links for each in link.exchanges.values() if each.port in numbers]

    def changed(self, number: int) -> None:
        """Notes that connections of a port have ended."""
        on_change = self._on_change.get(number)
        if on_change is not None:
            on_change()

    def lost(self, link: HttpLink) -> None:
        """Notes that a front is gone, and with it its connections."""
        self._links.discard(link)
        for number in list(self._ports):
            self.changed(number)

    def run(self, exchange: HttpExchange, port: int, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine of an exchange as a task."""
        task = self.thread.loop.create_task(work)
        self.tasks[task] = port
        task.add_done_callback(partial(self._task_ended, exchange))

    def _task_ended(self, exchange: HttpExchange, task: asyncio.Task[None]) -> None:
        del self.tasks[task]
        if not task.cancelled() and task.exception() is not None:
            log.error(
                "%s %s could not be answered", exchange.method, exchange.path, exc_info=task.exception()
            )
        if not exchange.done:
            exchange.abort()


class FrontListener:
    """A listening port whose connections are its fronts'; see `http_loop.HttpListener`."""

    def __init__(
        self, fronts: HttpFronts, handler: Handler, bound: Sequence[socket.socket], settings: PortSettings
    ) -> None:
        self._fronts = fronts
        self._handler = handler
        self._settings = settings
        self._numbers: list[int] = []  # the last is that of new connections
        self.port: int = bound[0].getsockname()[1]
        self._acceptors = [Listener(each, self._take, f"port {self.port}") for each in bound]

    async def start(self) -> None:
        """Starts accepting connections; runs on the loop."""
        self._none = asyncio.Event()
        self._add_port(self._handler)
        for each in self._acceptors:
            each.listen(self._fronts.thread.loop.io)
        self._fronts.open += 1

    def _add_port(self, handler: Handler) -> None:
        self._numbers.append(self._fronts.add_port(self._settings, handler, self._check_none))

    def _take(self, accepted: socket.socket, address: object) -> None:
        if self._fronts.waiting(self._numbers[-1]) >= self._settings.most_connections:
            refuse_crowded(accepted, self._settings.tls is not None)
        else:
            self._fronts.give(self._numbers[-1], accepted)

    def _connections(self) -> int:
        return sum(map(self._fronts.connections, self._numbers))

    def _check_none(self) -> None:
        if not self._connections():
            self._none.set()

    def finish_begun(self, handler: Handler, grace_s: float) -> bool:
        """See `HttpListener.finish_begun`."""
        return self._fronts.thread.run(self._finish_begun(handler, grace_s)).result()

    async def _finish_begun(self, handler: Handler, grace_s: float) -> bool:
        begun = [each for each in self._fronts.exchanges(self._numbers) if each.complete]
        self._add_port(handler)
        return await ended_in_time(begun, grace_s)

    def close(self, grace_s: float) -> bool:
        """See `HttpListener.close`."""
        return self._fronts.thread.run(self._close(grace_s)).result()

    async def _close(self, grace_s: float) -> bool:
        fronts = self._fronts
        fronts.open -= 1
        for each in self._acceptors:
            each.close()
        self._none.clear()
        for number in self._numbers:
            fronts.close_port(number, grace_s)
        self._check_none()
        ended = await in_time(self._none.wait(), grace_s)
        if not ended:
            await in_time(self._none.wait(), ABORT_S)  # the fronts abort them
            for exchange in fronts.exchanges(self._numbers):
                exchange.abort()
        await end_tasks([task for task, port in fronts.tasks.items() if port in self._numbers])
        for number in self._numbers:
            fronts.remove_port(number)
        return ended


class HttpLink:
    """The core's end of one front, for HTTP.

    Args:
        fronts: The ports.
        packets: The socket of its messages.
        connections: Passes its connections on, each with the number of its port.
        on_lost: Called once with the reason when it is gone.

    Attributes:
        exchanges: Its exchanges that have not ended, by number.
        serving: True if it takes connections.
        connections: Number of its connections; also read by other threads.
    """

    def __init__(
        self,
        fronts: HttpFronts,
        packets: socket.socket,
        connections: ConnectionSender[int],
        on_lost: Callable[[str], None],
    ) -> None:
        self.exchanges: dict[int, RemoteExchange] = {}
        self.serving = False
        self.connections = 0
        self._fronts = fronts
        self._loop = fronts.thread.loop
        self._on_lost = on_lost
        self._lost = False
        self._connections = connections
        self._given: Counter[int] = Counter()
        self._ended: Counter[int] = Counter()
        self._unread: Counter[int] = Counter()  # bytes of bodies that were read since the last READ
        channel = PacketChannel(packets, blocking=False)
        self._stream = MessageStream(channel, in_worker=False, trusted=True, passes_blocks=True)
        self._file = self._stream.channel.fileno()
        self._sender = RecordSender(self._stream, self._loop.call_soon, self._fail)
        self._responses = ResponseSender(self._stream)
        self._heads: list[ReceivedHead] = []
        self._handle: dict[Record, Callable[[HttpRecord], None]] = {
            Record.SERVING: self._served,
            Record.CONNS: self._count,
            Record.HEAD: self._add_head,
            Record.OPEN: self._open,
            Record.BODY: self._body,
            Record.GONE: self._gone,
            Record.READ: self._read,
        }

    def connections_of(self, port: int) -> int:
        """Number of its connections of a port."""
        return self._given[port] - self._ended[port]

    def start(self) -> None:
        """Begins to read."""
        self._loop.add_reader(self._file, self._on_ready)
        self._tidy()

    def listen(self, number: int, settings: PortSettings) -> None:
        """Adds a port to the front."""
        self.send(HttpRecord(Record.LISTEN, number, text=codec.encode_json(record_to_json(settings))))

    def give(self, port: int, accepted: socket.socket) -> bool:
        """Gives a connection to the front; False if it does not take any now."""
        if not self._connections.send(accepted, encode_port(port), port):
            return False
        self._given[port] += 1
        self.connections += 1
        return True

    def take_back(self) -> list[tuple[socket.socket, int]]:
        """The connections that a lost front has not taken, with the numbers of their ports."""
        return self._connections.take_back()

    def send(self, record: HttpRecord) -> None:
        """Sends a record with the round."""
        if not self._lost:
            self._sender.add(record)

    def run(self, exchange: HttpExchange, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine of an exchange as a task."""
        assert isinstance(exchange, RemoteExchange), "exchanges of this link are its own"
        self._fronts.run(exchange, exchange.port, work)

    def pack(self, outputs: Sequence[Tensor]) -> Payload:
        """See `ExchangeLink`."""
        return self._responses.pack(outputs)

    def discard(self, message: PackedResponse) -> None:
        """See `ExchangeLink`."""
        self._responses.discard(message, self._lost)

    def answer(self, number: int, message: PackedResponse) -> None:
        """See `ExchangeLink`."""
        if self._responses.add(number, message):
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        try:
            self._responses.flush(self._fail_response)
        except (ChannelClosedError, OSError) as error:
            self.lose(str(error))

    def _fail_response(self, number: int, error: ConchError) -> None:
        self.send(whole_response(number, *failure(error)))

    def ended(self, number: int) -> None:
        """Forgets an exchange, to which nothing more is sent."""
        self.exchanges.pop(number, None)
        self._unread.pop(number, None)

    def lose(self, reason: str) -> None:
        """Ends the conversation: the clients of all exchanges are gone."""
        if self._lost:
            return
        self._lost = True
        self.serving = False
        self._loop.remove_reader(self._file)
        self._stream.channel.close()
        self._connections.close()
        exchanges, self.exchanges = self.exchanges, {}
        self._given.clear()
        self._ended.clear()
        self.connections = 0
        self._responses.close()
        for exchange in exchanges.values():
            exchange.disconnected()
        self._stream.close()
        self._fronts.lost(self)
        self._on_lost(reason)

    def _fail(self, reason: str) -> None:
        self._loop.call_soon(self.lose, reason)

    def _on_ready(self) -> None:
        """Handles some of the messages that have come."""
        try:
            for _ in range(_READS):
                received = self._stream.receive(wait=False)
                if received.kind is Kind.EXECUTE:
                    self._execute(received)
                    continue
                for record in decode_records(received):
                    handle = self._handle.get(record.kind)
                    if handle is None:
                        raise WireError(f"a record {record.kind.name} was not expected")
                    handle(record)
        except BlockingIOError:
            pass
        except ChannelClosedError:
            self.lose("its process has ended")
        except (WireError, OSError) as error:
            self.lose(f"its messages can't be read: {error}")

    def _served(self, record: HttpRecord) -> None:
        self.serving = True

    def _count(self, record: HttpRecord) -> None:
        self._connections.release_taken()
        before = self.connections_of(record.number)
        self._ended[record.number] = min(record.amount, self._given[record.number])
        self.connections += self.connections_of(record.number) - before
        self._fronts.changed(record.number)

    def _add_head(self, record: HttpRecord) -> None:
        if not record.number:
            self._heads.clear()
        if record.number != len(self._heads) or record.number >= MOST_HEADS:
            raise WireError(f"head {record.number} comes after {len(self._heads)} others")
        try:
            self._heads.append(ReceivedHead(decode_head(record.text)))
        except (ValueError, TypeError, AttributeError) as error:
            raise WireError(f"the head of an exchange can't be read: {error}") from None

    def _begin(self, number: int, head: int) -> RemoteExchange:
        try:
            exchange = RemoteExchange(self, number, self._heads[head])
        except (IndexError, ValueError, TypeError, AttributeError) as error:
            raise WireError(f"an exchange can't be read: {error}") from None
        self.exchanges[number] = exchange
        return exchange

    def _handle_exchange(self, exchange: RemoteExchange) -> None:
        try:
            work = self._fronts.handler(exchange.port)(exchange)
        except Exception:  # boundary: the exchange fails alone
            log.exception("%s %s could not be answered", exchange.method, exchange.path)
            exchange.abort()
            return
        if work is not None:
            self.run(exchange, work)

    def _open(self, record: HttpRecord) -> None:
        exchange = self._begin(record.number, record.amount)
        try:
            chunks = int(record.text or 0)
        except ValueError as error:
            raise WireError(f"an exchange can't be read: {error}") from None
        exchange.receive(bytes(record.body), chunks, record.flag)
        self._handle_exchange(exchange)
        if not record.flag:
            self._acknowledge(record.number, len(record.body))

    def _execute(self, received: ReceivedMessage) -> None:
        for head, number, _, request in self._fronts.requests.read(received):
            if head == OPENED:
                opened = self.exchanges.get(number)  # None: its answer was on its way
                if opened is not None:
                    self._receive(opened, partial(opened.receive_decoded, request))
                continue
            exchange = self._begin(number, head)
            exchange.receive_decoded(request)
            self._handle_exchange(exchange)

    def _receive(self, exchange: RemoteExchange, receive: Callable[[], None]) -> None:
        """Takes a part of a body."""
        try:
            receive()
        except Exception:  # boundary: the exchange fails alone
            log.exception("%s %s could not be answered", exchange.method, exchange.path)
            exchange.abort()

    def _body(self, record: HttpRecord) -> None:
        number = record.number
        exchange = self.exchanges.get(number)
        if exchange is None:
            return  # its answer was on its way
        self._receive(exchange, partial(exchange.receive, bytes(record.body), record.amount, record.flag))
        if not record.flag:
            self._acknowledge(number, len(record.body))

    def _acknowledge(self, number: int, size: int) -> None:
        """Reports to the front, after some pieces of a body, that they were read."""
        if number not in self.exchanges:
            return
        unread = self._unread[number] + size
        if unread >= READ_STEP:
            self.send(HttpRecord(Record.READ, number, amount=unread))
            unread = 0
        self._unread[number] = unread

    def _gone(self, record: HttpRecord) -> None:
        exchange = self.exchanges.pop(record.number, None)
        if exchange is not None:  # else its answer was on its way
            self.ended(record.number)
            exchange.disconnected()

    def _read(self, record: HttpRecord) -> None:
        exchange = self.exchanges.get(record.number)
        if exchange is not None:
            exchange.note_read(record.amount)

    def _tidy(self) -> None:
        if not self._lost:
            self._stream.tidy()
            self._connections.release_taken()
            self._loop.call_later(_TIDY_S, self._tidy)
