"""The gRPC port with fronts: listens, gives each connection to a front, keeps the fronts alive.

The same fronts have the connections of the HTTP ports, see `http_fronts`.

Theory of operation. The loop accepts, and sends each connection's descriptor to the front with the fewest
open calls, of equals with the fewest connections. A front that has sent no STATE lately gets none. While no
front takes it, a connection waits. A thread, `conch-fronts`, starts fronts and reaps them: each has a
`RestartPolicy`, as an instance's worker has. A front that is lost takes its connections along; the calls of
its clients are cancelled.

    ========  ==========================  =====================  ====================================
    phase     event                       next                   what is done
    ========  ==========================  =====================  ====================================
    STARTING  HELLO                       SERVING                it gets connections
    STARTING  the end; `_START_NS`        WAITING                killed, reaped
    SERVING   the end, a malformed        WAITING                killed, reaped; its calls cancelled
              message
    WAITING   the wait is over            STARTING               a process is started
    any       `stop`                      CLOSED                 drained, then killed
    ========  ==========================  =====================  ====================================

Threads and locks: `start` and `stop` block, on a thread of the server's own; connections and links are the
loop's thread's; policies and processes are those of `conch-fronts`, which the loop reaches by its queue.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from conch.core.admission import HeldBytes
from conch.core.clock import Clock, monotonic_ns
from conch.core.servable import InlineClaim
from conch.frontends.connections.listener import Listener
from conch.frontends.connections.wire import tls_context
from conch.frontends.grpc.grpc_options import GrpcOptions
from conch.frontends.grpc.rpc_calls import Admit, ClientCounts, StreamMethod, UnaryMethod
from conch.frontends.grpc.tls_options import TlsOptions
from conch.frontends.grpc.transport.port_state import PortState
from conch.frontends.grpc.transport.transport_server import (
    bound_port,
    bound_sockets,
    client_address,
    port_options,
)
from conch.frontends.http.http_loop import HttpLoop
from conch.fronts.connection_passing import ConnectionSender
from conch.fronts.decoded_requests import RequestReader
from conch.fronts.front_link import FrontLink, Handlers
from conch.fronts.front_messages import FrontSettings
from conch.fronts.http_fronts import HttpFronts, HttpLink
from conch.ipc.loop import IO_LOOP, IoLoop
from conch.observability.metrics.server_metrics import FrontProcess
from conch.workers.supervision.restart_policy import Phase, RestartPolicy

log = logging.getLogger(__name__)

_START_S = 60.0
_MIN_WAIT_S = 0.5
_LONGEST_WAIT_NS = 1_000_000_000  # shorter than a worker's: without fronts nothing is served
_CPU_FIELDS = slice(11, 13)  # utime and stime, behind the command's name, see proc(5)
_TICKS = os.sysconf("SC_CLK_TCK")


class Front:
    """One front, with the processes that it has had.

    Attributes:
        name: Its name in the log.
        policy: Decides when it is started again.
        link: The link to its process; None while there is none.
        connections: Passes connections on to its last process.
        http: The link for HTTP to its last process.
        process: Its process; None while there is none.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.policy = RestartPolicy(longest_wait_ns=_LONGEST_WAIT_NS)
        self.link: FrontLink | None = None
        self.connections: ConnectionSender[tuple[int, str]] | None = None
        self.http: HttpLink | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._cpu_before_s = 0.0  # of processes that have ended
        self._cpu_s = 0.0  # of the process, as last read

    def shown(self) -> FrontProcess:
        """The front, as metrics show it."""
        link = self.link
        self._read_cpu()
        cpu_s = self._cpu_before_s + self._cpu_s
        if link is None:
            return FrontProcess(self.name, False, 0, cpu_s, self.policy.restarts)
        return FrontProcess(self.name, link.responsive, self.load[1], cpu_s, self.policy.restarts)

    @property
    def load(self) -> tuple[int, int]:
        """Its open calls, and its connections; any thread."""
        link, http = self.link, self.http
        calls = connections = 0
        if link is not None:
            calls, connections = len(link.calls), link.connections
        if http is not None:
            calls, connections = calls + len(http.exchanges), connections + http.connections
        return calls, connections

    def end(self) -> int:
        """Kills and reaps its process; returns the status."""
        process = self.process
        assert process is not None, "only a front with a process is ended"
        process.kill()
        self._read_cpu()
        status = process.wait()
        self.process = None
        self._cpu_before_s, self._cpu_s = self._cpu_before_s + self._cpu_s, 0.0
        return status

    def _read_cpu(self) -> None:
        process = self.process
        if process is not None:
            with suppress(OSError):  # it has just been reaped
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                self._cpu_s = sum(map(int, fields[_CPU_FIELDS])) / _TICKS


_Event = tuple[Front, str | None]
"""A front serves, or is lost for a reason."""


class FrontServer:
    """A gRPC server whose connections are its fronts'; see `RpcServer`.

    Args:
        count: Number of fronts.
        options: The port's.
        thread: The event loop of the HTTP ports.
        held: Counts the bytes of the server's requests.
        clock: Monotonic time in nanoseconds.

    Attributes:
        http: The HTTP ports, whose connections the same fronts have.
    """

    def __init__(
        self,
        count: int,
        options: GrpcOptions,
        thread: HttpLoop,
        held: HeldBytes,
        clock: Clock = monotonic_ns,
    ) -> None:
        self.http = HttpFronts(thread, count, self._http_links)
        limits = port_options(options)
        # Each front has its share of what the port may hold, and of its connections.
        self._port = PortState(limits, clock, held=held)
        self._share = max(held.most // count, 1)
        self._most_connections = -(-limits.most_connections // count)
        self._reuse_port = options.reuse_port
        self._clock = clock
        self._loop: IoLoop | None = None
        self._handlers = Handlers()
        self._requests = RequestReader()
        self._tls: list[TlsOptions | None] = []
        self._bound: list[Listener] = []
        self._fronts = [Front(f"front {number}") for number in range(count)]
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._supervise, name="conch-fronts", daemon=True)
        self._all_serve = threading.Event()
        self._all_ended = threading.Event()
        self._stopping = self._ended = self._closed = False
        self._waiting: deque[tuple[int, socket.socket, str]] = deque()  # connections that no front takes

    # --- RpcServer -----------------------------------------------------------------------------------------

    @property
    def client_counts(self) -> ClientCounts:
        """Counts of the clients of all fronts."""
        closed, ended = Counter(self._port.closed), Counter(self._port.ended)
        received = self._port.received.held.total
        for front in self._fronts:
            link = front.link
            if link is not None:
                closed.update(link.counts.closed)
                ended.update(link.counts.ended)
                received += link.counts.received_bytes
        return ClientCounts(closed, ended, received)

    def processes(self) -> list[FrontProcess]:
        """The fronts, as metrics show them."""
        return [front.shown() for front in self._fronts]

    def queue_inline(self, claim: InlineClaim) -> None:
        """Takes a claim of a model that the loop may run after the round's events."""
        assert self._loop is not None, "handlers run after the start"
        self._loop.queue_inline(claim)

    def serve(
        self,
        unary: Mapping[str, UnaryMethod],
        streams: Mapping[str, StreamMethod],
        admissions: Mapping[str, Admit],
    ) -> None:
        """See `RpcServer`; admissions run here, at the fronts' ADMIT."""
        self._handlers = Handlers(unary, streams, admissions)

    def add_port(self, address: str, tls: TlsOptions | None = None) -> int:
        """Listens on an address; see `RpcServer`."""
        if tls is not None:
            tls_context(tls.private_key, tls.certificate, tls.client_root)
        try:
            bound = bound_sockets(address, self._reuse_port)
        except OSError as error:
            raise OSError(f"address {address} can't be listened on: {error.strerror or error}") from None
        for each in bound:
            accept = partial(self._accept, len(self._tls))
            self._bound.append(Listener(each, accept, "the gRPC port", self._clock))
            self._tls.append(tls)
        return bound_port(bound)

    def start(self) -> None:
        """Starts the fronts, and accepts connections once all serve; a second call has no effect.

        Raises:
            OSError: A front can't be started, or does not serve.
        """
        if self._loop is not None:
            return
        loop = self._loop = IO_LOOP.hold()
        self._port.use(loop)
        self._thread.start()
        if not self._all_serve.wait(_START_S):
            self.stop(0)
            raise OSError(f"the front processes do not serve {_START_S:g} s after their start")
        for listener in self._bound:
            loop.call_soon(partial(listener.listen, loop))

    def stop(self, grace_s: float) -> bool:
        """Refuses new connections, has the fronts end theirs, kills what is left; see `RpcServer`."""
        if self._stopping:
            return self._ended
        self._stopping = True
        loop = self._loop
        if loop is None:
            for listener in self._bound:
                listener.close()
            return True
        end = time.monotonic() + grace_s
        loop.call_soon(self._drain)
        in_time = self._all_ended.wait(grace_s)
        if in_time and self.http.open:  # those connections end later
            left = max(end - time.monotonic(), _MIN_WAIT_S)
            self._ended = self._port.open_calls.wait_until_none(left)
            return self._ended
        self.close()
        left = max(end - time.monotonic(), _MIN_WAIT_S)
        self._ended = self._port.open_calls.wait_until_none(left) and in_time
        if not self._ended:
            log.warning("calls are still being worked on %.1f s after the server was stopped", grace_s)
        return self._ended

    def close(self) -> None:
        """Ends the fronts, if they run; blocks."""
        loop = self._loop
        if loop is None or self._closed:
            return
        self._closed = True
        self._events.put(None)
        self._thread.join()  # it kills what is left
        closed = threading.Event()
        loop.call_soon(partial(self._close_links, closed))
        closed.wait()
        self.http.close()
        IO_LOOP.release()

    def drain_streams(self, status: int, details: str, timeout_s: float) -> bool:
        """See `RpcServer.drain_streams`."""
        return self._port.open_calls.drain_streams(status, details, timeout_s)

    # --- on the loop's thread ------------------------------------------------------------------------------

    def _accept(self, listener: int, accepted: socket.socket, address: object) -> None:
        peer = client_address(accepted, address)
        if self._give(listener, accepted, peer):
            return
        if len(self._waiting) >= self._port.options.most_connections:
            self._port.closed["connections"] += 1
            accepted.close()
        else:
            self._waiting.append((listener, accepted, peer))

    def _give(self, listener: int, accepted: socket.socket, peer: str) -> bool:
        """Gives a connection to a front; False if none takes it now."""
        links = [link for front in self._by_load() if (link := front.link) is not None and link.serving]
        # Those with their share of the connections come last: idle ones would give way there.
        links.sort(key=lambda link: link.connections >= self._most_connections)
        return any(link.give(accepted, listener, peer) for link in links)

    def _by_load(self) -> list[Front]:
        """The fronts that are alive, the one with the fewest open calls first; any thread."""
        found = [each for each in self._fronts if (link := each.link) is not None and link.alive]
        return sorted(found, key=lambda front: front.load)

    def _http_links(self) -> list[HttpLink]:
        """Those of the fronts that take HTTP connections; on their loop."""
        return [http for front in self._by_load() if (http := front.http) is not None and http.serving]

    def _give_waiting(self) -> None:
        """Gives connections that wait to a front, as one has just sent STATE."""
        while self._waiting and self._give(*self._waiting[0]):
            self._waiting.popleft()
        if self._stopping:
            self._check_ended()

    def _take_back(self, connections: ConnectionSender[tuple[int, str]]) -> None:
        """Gives connections that a front had not taken to others; its process has ended."""
        for accepted, (listener, peer) in connections.take_back():
            if self._stopping:
                accepted.close()
            elif not self._give(listener, accepted, peer):
                self._waiting.append((listener, accepted, peer))

    def _drain(self) -> None:
        for listener in self._bound:
            listener.close()
        while self._waiting:
            self._waiting.popleft()[1].close()
        for front in self._fronts:
            if front.link is not None:
                front.link.drain()
        self._check_ended()

    def _connect(self, front: Front, link: FrontLink, settings: FrontSettings) -> None:
        front.link = link
        try:
            link.start(settings)
        except OSError as error:
            link.lose(str(error))
        else:
            if self._stopping:
                link.drain()

    def _on_serving(self, front: Front) -> None:
        self._events.put((front, None))

    def _on_lost(self, front: Front, reason: str) -> None:
        link, front.link = front.link, None
        if link is not None:
            self._port.closed.update(link.counts.closed)
            self._port.ended.update(link.counts.ended)
        self._events.put((front, reason))
        self._check_ended()

    def _on_http_lost(self, link: FrontLink, reason: str) -> None:
        """Ends a front whose link for HTTP has ended; on the HTTP ports' loop."""
        link.loop.call_soon(partial(link.lose, reason))

    def _check_ended(self) -> None:
        links = [front.link for front in self._fronts]
        if self._stopping and all(link is None or not link.connections for link in links):
            self._all_ended.set()

    def _close_links(self, closed: threading.Event) -> None:
        for front in self._fronts:
            if front.link is not None:
                front.link.lose("the server stops")
            if front.connections is not None:
                self._take_back(front.connections)
        closed.set()

    # --- on the thread of the fronts -----------------------------------------------------------------------

    def _supervise(self) -> None:
        """Starts fronts, and reaps those that were lost, until None is queued."""
        for front in self._fronts:
            self._launch(front)
        while (event := self._next()) is not None:
            front, reason = event
            if reason is None:
                self._served(front)
            else:
                self._reap(front, reason)
        for front in self._fronts:
            if front.process is not None:
                front.end()
            if front.http is not None:
                self.http.take_back(front.http)

    def _next(self) -> _Event | None:
        """The next event; starts those fronts meanwhile whose wait is over."""
        while True:
            waiting = [front for front in self._fronts if front.policy.phase is Phase.WAITING]
            first_ns = min((front.policy.try_ns for front in waiting), default=None)
            timeout_s = None if first_ns is None else max(first_ns - self._clock(), 0) / 1e9
            try:
                return self._events.get(timeout=timeout_s)
            except queue.Empty:
                pass
            for front in waiting:
                if front.policy.try_ns <= self._clock() and not self._stopping:
                    front.policy.begin()
                    self._launch(front)

    def _served(self, front: Front) -> None:
        if front.policy.phase is Phase.STARTING:
            front.policy.served(self._clock())
            if all(each.policy.phase is Phase.SERVING for each in self._fronts):
                self._all_serve.set()

    def _reap(self, front: Front, reason: str) -> None:
        """Ends the process of a front that was lost, and has it started again."""
        status = front.end()
        loop, connections, http = self._loop, front.connections, front.http
        assert loop is not None and connections is not None and http is not None, "it has been started"
        loop.call_soon(partial(self._take_back, connections))
        self.http.take_back(http)
        if self._stopping:
            front.policy.close()
            return
        log.error("%s (status %d): %s; its connections have ended", front.name, status, reason)
        now_ns = self._clock()
        if front.policy.phase is Phase.SERVING:
            front.policy.lost(now_ns, reason)
            front.policy.ended(now_ns, reason)
        else:
            front.policy.failed(now_ns, reason)

    def _launch(self, front: Front) -> None:
        loop = self._loop
        assert loop is not None, "the server has started"
        try:
            with ExitStack() as undo, ExitStack() as theirs:
                ours: list[socket.socket] = []
                taken: list[int] = []
                given: list[int] = []
                for _ in range(2):  # gRPC and HTTP
                    for _ in range(2):  # messages and connections
                        our_end, their_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                        undo.callback(our_end.close)
                        theirs.callback(their_end.close)
                        ours.append(our_end)
                        given.append(their_end.fileno())
                    taken.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
                    undo.callback(os.close, taken[-1])
                    given.append(taken[-1])
                front.process = _start_process(given)
                undo.pop_all()
        except OSError as error:
            log.error("%s can't be started: %s", front.name, error)
            front.policy.failed(self._clock(), str(error))
            return
        front.connections = ConnectionSender(ours[1], taken[0])
        link = FrontLink(
            front.name,
            ours[0],
            front.connections,
            self._handlers,
            self._requests,
            self._port.open_calls,
            loop,
            self._clock,
            on_serving=partial(self._on_serving, front),
            on_state=self._give_waiting,
            on_lost=partial(self._on_lost, front),
        )
        most = self._most_connections
        limits = replace(self._port.options, most_received_bytes=self._share, most_connections=most)
        level = logging.getLogger("conch").getEffectiveLevel()
        unary, streams, checked = self._handlers
        settings = FrontSettings(
            limits, tuple(self._tls), tuple(unary), tuple(streams), tuple(checked), level
        )
        loop.call_soon(partial(self._connect, front, link, settings))
        on_lost = partial(self._on_http_lost, link)
        front.http = self.http.connect(ours[2], ConnectionSender(ours[3], taken[1]), on_lost)


def _start_process(sockets: Sequence[int]) -> subprocess.Popen[bytes]:
    """Starts a front with its ends of the sockets; it ends when the core closes them.

    Raises:
        OSError: The system does not allow it.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "conch.fronts.front_process", *map(str, sockets)],
        stdin=subprocess.DEVNULL,
        pass_fds=sockets,
        start_new_session=True,  # a terminal's signals are for the core
    )
