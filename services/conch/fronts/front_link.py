"""The core's end of one front: its calls, and the messages both ways.

A round's responses to decoded requests leave together when the loop flushes, those of one model in one
message. A front that is slow makes nothing wait: what it does not read is queued, within the channel's
limits.

Threads and locks: the loop's thread; `write` runs on any.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from conch.core.clock import Clock
from conch.core.errors import ConchError
from conch.core.tensor import Buffer, Tensor
from conch.door.operation_table import INFER
from conch.frontends.grpc.open_calls import OpenCalls
from conch.frontends.grpc.rpc_calls import Admit, StreamMethod, UnaryMethod
from conch.fronts import front_messages as messages
from conch.fronts.connection_passing import ConnectionSender
from conch.fronts.decoded_requests import RequestReader, UnencodedResponse
from conch.fronts.front_messages import Answer, CallerFacts, FrontSettings
from conch.fronts.packed_responses import ResponseSender
from conch.fronts.remote_calls import OpenCall, RemoteCall, RemoteStream, RemoteUnary
from conch.ipc import codec
from conch.ipc.channel import ChannelClosedError, Kind, PacketChannel, WireError
from conch.ipc.loop import IoLoop, Timer
from conch.ipc.spec_json import record_to_json
from conch.ipc.tensors import MessageStream, Payload, ReceivedMessage
from conch.ipc.worker_log import WorkerLog

log = logging.getLogger(__name__)

_READS = 8
"""Messages handled before other sockets have their turn."""

_SILENCE_NS = 1_500_000_000
"""A front that has not sent STATE for so long gets no connections."""

_TIDY_NS = 10_000_000_000


class Handlers(NamedTuple):
    """Handlers by method, see `RpcServer.serve`."""

    unary: Mapping[str, UnaryMethod] = {}
    streams: Mapping[str, StreamMethod] = {}
    admissions: Mapping[str, Admit] = {}


class FrontCounts(NamedTuple):
    """Counts of a front's clients, see `ClientCounts`."""

    closed: Mapping[str, int]
    ended: Mapping[str, int]
    received_bytes: int


class FrontLink:
    """The core's end of one front.

    Args:
        name: Name of the front, for the log.
        sock: The socket of its messages.
        connections: Passes its connections on, each with its listening socket and its client's address.
        handlers: Handlers of the port.
        requests: Reads its requests; all fronts have the same, so that equal requests are recognised.
        open_calls: The calls of the port.
        loop: The loop, which runs.
        clock: Monotonic time in nanoseconds.
        on_serving: Called once it serves.
        on_state: Called with each STATE.
        on_lost: Called once with the reason when it is gone.

    Attributes:
        serving: True if it takes connections.
        calls: Its calls that have not ended, by number.
        connections: Number of its connections.
        counts: Counts of its clients.
    """

    def __init__(
        self,
        name: str,
        sock: socket.socket,
        connections: ConnectionSender[tuple[int, str]],
        handlers: Handlers,
        requests: RequestReader,
        open_calls: OpenCalls,
        loop: IoLoop,
        clock: Clock,
        on_serving: Callable[[], None],
        on_state: Callable[[], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.loop = loop
        self.open_calls = open_calls
        self.serving = False
        self.calls: dict[int, OpenCall] = {}
        self.counts = FrontCounts({}, {}, 0)
        self._handlers = handlers
        self._clock = clock
        self._on_serving = on_serving
        self._on_state = on_state
        self._on_lost = on_lost
        self._state_ns = 0
        self._lost = False
        self._next_tidy: Timer | None = None
        self._given = self._ended = 0  # connections
        self._connections = connections
        channel = PacketChannel(sock, blocking=False)
        self._stream = MessageStream(channel, in_worker=False, trusted=True, passes_blocks=True)
        self._file = self._stream.channel.fileno()
        self._log = WorkerLog(name)
        self._callers: list[CallerFacts] = []
        self._requests = requests
        self._responses = ResponseSender(self._stream)
        self._handle: dict[Kind, Callable[[ReceivedMessage], None]] = {
            Kind.HELLO: self._greeted,
            Kind.CALLERS: self._add_callers,
            Kind.ADMIT: self._admit,
            Kind.EXECUTE: self._execute,
            Kind.OPEN: self._open,
            Kind.CANCEL: self._cancel,
            Kind.MESSAGE: self._message,
            Kind.READ: self._read,
            Kind.STATE: self._state,
            Kind.LOG: lambda received: self._log.handle(codec.decode_json(received.fields)),
        }

    @property
    def connections(self) -> int:
        """Number of its connections."""
        return self._given - self._ended

    @property
    def responsive(self) -> bool:
        """True if it takes connections, and has sent STATE lately."""
        return self.serving and self.alive

    @property
    def alive(self) -> bool:
        """True if it has sent STATE lately."""
        return self._clock() - self._state_ns < _SILENCE_NS

    def start(self, settings: FrontSettings) -> None:
        """Begins the conversation.

        Raises:
            OSError: No descriptor is free.
        """
        self.loop.register(self._file, self)
        self._send(Kind.START, 0, codec.encode_json(record_to_json(settings)))
        self._tidy()

    def give(self, accepted: socket.socket, listener: int, peer: str) -> bool:
        """Gives a connection to the front; False if it does not take any now."""
        packet = messages.encode_connection(listener, peer)
        if not self._connections.send(accepted, packet, (listener, peer)):
            return False
        self._given += 1
        return True

    def drain(self) -> None:
        """Has it end its connections."""
        self.serving = False
        self._send(Kind.DRAIN)

    def lose(self, reason: str) -> None:
        """Ends the conversation: cancels the calls, frees what they hold."""
        if self._lost:
            return
        self._lost = True
        self.serving = False
        self.loop.unregister(self._file)
        self._stream.channel.close()
        self._connections.close()
        calls, self.calls = self.calls, {}
        self._responses.close()
        for call in calls.values():
            self._guarded(call, call.cancelled)
        self._stream.close()
        # Without these references the link and its buffers are freed at once, else by a full collection.
        self._handle = {}
        if self._next_tidy is not None:
            self._next_tidy.cancel()
        self._on_lost(reason)

    # --- from the front ------------------------------------------------------------------------------------

    def on_ready(self, events: int) -> None:
        """Handles some of the messages that have come."""
        try:
            for _ in range(_READS):
                received = self._stream.receive(wait=False)
                handle = self._handle.get(received.kind)
                if handle is None:
                    raise WireError(f"a message {received.kind.name} was not expected")
                handle(received)
                if self._lost:
                    return
        except BlockingIOError:
            pass
        except ChannelClosedError:
            self.lose("its process has ended")
        except (WireError, OSError) as error:
            self.lose(f"its messages can't be read: {error}")

    def _greeted(self, received: ReceivedMessage) -> None:
        codec.check_hello(received.fields, "front")
        self.serving = True
        self._on_serving()

    def _add_callers(self, received: ReceivedMessage) -> None:
        if not received.subject:
            self._callers.clear()
        self._callers += messages.decode_callers(received.fields)

    def _caller(self, number: int) -> CallerFacts:
        try:
            return self._callers[number]
        except IndexError:
            raise WireError(f"there is no caller {number}") from None

    def _admit(self, received: ReceivedMessage) -> None:
        caller, deadline_ns, method, _ = messages.decode_open(received)
        admit = self._handlers.admissions.get(method)
        if admit is None:
            raise WireError(f"method {method} has no check")
        call = self._begin_unary(received.subject, caller, deadline_ns)
        self._guarded(call, lambda: admit(call))

    def _begin_unary(self, number: int, caller: int, deadline_ns: int | None) -> RemoteUnary:
        call = RemoteUnary(self, number, self._caller(caller), deadline_ns)
        self.calls[number] = call
        self.open_calls.unary.add(call)
        return call

    def _unary(self, number: int, caller: int, deadline_ns: int | None, method: str) -> RemoteUnary | None:
        """The call of a message that has come; None if a check has refused it."""
        if method not in self._handlers.admissions:
            return self._begin_unary(number, caller, deadline_ns)
        call = self.calls.get(number)
        return call if isinstance(call, RemoteUnary) and not call.answered else None

    def _execute(self, received: ReceivedMessage) -> None:
        handle = self._handlers.unary[INFER.grpc_method]
        for caller, number, deadline_ns, request in self._requests.read(received):
            call = self._unary(number, caller, deadline_ns, INFER.grpc_method)
            if call is None:
                continue
            call.decoded = True
            try:
                handle(call, request)  # type: ignore[arg-type]  # `FrontDecoder` takes it
            except Exception:  # boundary: the call fails alone
                log.exception("a call could not be handled")
                call.fail()

    def _open(self, received: ReceivedMessage) -> None:
        caller, deadline_ns, method, message = messages.decode_open(received)
        number = received.subject
        if message is None:
            stream = RemoteStream(self, number, self._caller(caller), deadline_ns)
            self.calls[number] = stream
            open_stream = self._handlers.streams.get(method)
            if open_stream is None:
                raise WireError(f"there is no method {method}")
            self._guarded(stream, lambda: open_stream(stream))
            return
        handle = self._handlers.unary.get(method)
        if handle is None:
            raise WireError(f"there is no method {method}")
        call = self._unary(number, caller, deadline_ns, method)
        if call is not None:
            self._guarded(call, lambda: handle(call, message))

    def _guarded(self, call: OpenCall, work: Callable[[], object]) -> None:
        """Does work of a call; if its handler raises, the call alone fails."""
        try:
            work()
        except Exception:  # boundary: the call fails alone
            log.exception("a call could not be handled")
            call.fail()

    def _cancel(self, received: ReceivedMessage) -> None:
        call = self.calls.pop(received.subject, None)
        if call is not None:  # else its answer was on its way
            self._guarded(call, call.cancelled)

    def _message(self, received: ReceivedMessage) -> None:
        stream = self.calls.get(received.subject)
        if isinstance(stream, RemoteStream):
            message = messages.decode_message(received)
            self._guarded(stream, lambda: stream.receive(message))

    def _read(self, received: ReceivedMessage) -> None:
        stream = self.calls.get(received.subject)
        if isinstance(stream, RemoteStream):
            stream.note_read(messages.decode_count(received))

    def _state(self, received: ReceivedMessage) -> None:
        self._connections.release_taken()
        fields = codec.decode_json(received.fields)
        self._ended = min(received.subject, self._given)
        try:
            self.counts = FrontCounts(fields["closed"], fields["ended"], fields["received"])
        except KeyError as error:
            raise WireError(f"a front's state lacks {error}") from None
        self._state_ns = self._clock()
        if self._log.changed:
            self._send(Kind.LEVEL, 0, codec.encode_json({"level": self._log.level}))
        self._on_state()

    # --- to the front --------------------------------------------------------------------------------------

    def pack(self, outputs: Sequence[Tensor]) -> Payload:
        """See `CallLink`."""
        return self._responses.pack(outputs)

    def discard(self, message: Any) -> None:
        """See `CallLink`."""
        if type(message) is UnencodedResponse:
            self._responses.discard(message, self._lost)

    def answer(self, call: RemoteUnary, message: Any) -> None:
        """See `CallLink`."""
        if self._lost:
            self.discard(message)
            return
        if type(message) is not UnencodedResponse:
            self.end(call, Answer(0, "", (), None, message))
            return
        if self._responses.add(call.number, message):
            self.loop.flush_later(self)

    def flush(self) -> None:
        """Sends the responses of the round."""
        try:
            self._responses.flush(self._fail, self._sent)
        except (ChannelClosedError, OSError) as error:
            self.lose(str(error))

    def _sent(self, number: int) -> None:
        self.calls.pop(number, None)

    def _fail(self, number: int, error: ConchError) -> None:
        if self.calls.pop(number, None) is not None:
            answer = Answer(error.grpc_status, error.message, (), None, None)
            self._send(Kind.ANSWER, number, messages.encode_answer(answer))

    def end(self, call: RemoteCall, answer: Answer) -> None:
        """See `CallLink`."""
        if self.calls.pop(call.number, None) is not None:
            self._send(Kind.ANSWER, call.number, messages.encode_answer(answer), answer.message)

    def begin(self, call: RemoteStream, compression: str | None) -> None:
        """See `CallLink`."""
        if not call.ended:
            self._send(Kind.BEGIN, call.number, (compression or "").encode())

    def read_next(self, call: RemoteStream) -> None:
        """See `CallLink`."""
        if not call.ended:
            self._send(Kind.READ, call.number)

    def write(self, call: RemoteStream, message: Buffer) -> None:
        """See `CallLink`."""
        self._send(Kind.MESSAGE, call.number, messages.encode_message(message), message)

    def _send(self, kind: Kind, subject: int = 0, fields: bytes = b"", message: Buffer | None = None) -> None:
        try:
            self._stream.send(kind, subject, fields, messages.carrying(message))
        except (ChannelClosedError, OSError) as error:
            self.loop.call_soon(partial(self.lose, str(error)))

    def _tidy(self) -> None:
        self._stream.tidy()
        self._next_tidy = self.loop.call_at(self._clock() + _TIDY_NS, self._tidy)
