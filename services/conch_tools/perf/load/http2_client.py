"""A gRPC client over HTTP/2 that sends ready messages: many calls on one connection, no threads.

Unary calls have an HTTP/2 stream each. If calls are messages of bidirectional streams, those of a slot share
one; a call without a slot has its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from time import monotonic_ns
from urllib.parse import unquote

from conch.frontends.grpc.http2.connection import Http2Connection
from conch.frontends.grpc.http2.events import (
    ConnectionClosed,
    DataReceived,
    Event,
    GoAwayReceived,
    HeadersReceived,
    StreamReset,
    TrailersReceived,
)
from conch.frontends.grpc.http2.frames import MOST_STREAM_ID, ErrorCode
from conch.frontends.grpc.http2.hpack import HeaderList
from conch.frontends.grpc.http2.limits import LocalSettings
from conch.protocol import inference_pb2
from conch.protocol.status_names import STATUS_NAMES
from conch_tools.connection import Endpoint
from conch_tools.perf.load.calls import Ended, LoadCall
from conch_tools.perf.load.socket_client import LOST, WOULD_BLOCK, SocketClient
from conch_tools.perf.load.validation import grpc_difference
from conch_tools.perf.measure.records import KeptResponse

STREAM_ERROR = "stream error"
_SETTINGS_BYTES = 1 << 16
_WINDOWS = LocalSettings(initial_window=16 << 20, connection_window=1 << 30)
_PREFIX = struct.Struct(">BI")


class _Open:
    """A stream: its calls in the order of their answers, and the bytes of an unfinished message."""

    __slots__ = ("calls", "message")

    def __init__(self, call: LoadCall) -> None:
        self.calls = [call]
        self.message = bytearray()


class Http2Client(SocketClient):
    """One connection.

    Args:
        endpoint: The server.
        path: The method's path.
        bidirectional: True if calls are messages of streams.
        decoupled: True if a call has responses until one says that it is final.
        ended: Receives the ends.
        validates: True if requests have expected outputs.

    Raises:
        OSError: There is no server, its certificate is wrong, or it does not speak HTTP/2.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        path: str,
        bidirectional: bool,
        decoupled: bool,
        ended: Ended,
        validates: bool = False,
    ) -> None:
        super().__init__(endpoint, ended)
        self._bidirectional = bidirectional
        self._decoupled = decoupled
        self._validates = validates
        self._reads = bidirectional or validates
        self._connection = Http2Connection(client=True, settings=_WINDOWS)
        scheme = b"http" if endpoint.tls is None else b"https"
        self._headers = (
            (b":method", b"POST"),
            (b":scheme", scheme),
            (b":path", path.encode()),
            (b":authority", endpoint.authority.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"conch-perf"),
            *((name.encode(), value.encode()) for name, value in endpoint.headers.items()),
        )
        self._streams: dict[int, _Open] = {}
        self._slots: dict[int, int] = {}  # the stream of a slot
        self._unsent: list[memoryview] = []
        self._goes_away = False
        try:
            self._await_settings()
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def _await_settings(self) -> None:
        """Waits for the peer's limits: streams above its number would be refused.

        Raises:
            OSError: The peer closed the connection, or does not speak HTTP/2.
        """
        connection = self._connection
        for part in connection.take_output():
            self._socket.sendall(part)
        while not connection.established:
            data = self._socket.recv(_SETTINGS_BYTES)
            if not data:
                raise ConnectionResetError(LOST)
            self._receive(data, 0)
            if self.lost:
                raise ConnectionResetError("the peer speaks no HTTP/2")

    @property
    def full_at(self) -> int:
        """Streams that the server allows at the same time, if there are as many now; else 0."""
        limit = self._connection.peer_streams
        return limit if self._connection.open_streams >= limit else 0

    def takes(self, slot: int) -> bool:
        """True if a call of a slot may be sent now."""
        return not self.lost and (self._connection.can_open or (slot in self._slots and not self._goes_away))

    @property
    def wants_write(self) -> bool:
        """True if the socket took only a part of the output."""
        return bool(self._unsent)

    def send(self, call: LoadCall, now_ns: int) -> None:
        """Queues a call; `flush` sends it."""
        call.sent_ns = now_ns
        self.in_flight += 1
        connection = self._connection
        body = call.request.body
        stream_id = self._slots.get(call.slot, 0) if self._bidirectional and call.slot >= 0 else 0
        if stream_id:
            self._streams[stream_id].calls.append(call)
        else:
            stream_id = connection.open_stream()
            self._streams[stream_id] = _Open(call)
            connection.send_headers(stream_id, self._headers)
            if self._bidirectional and call.slot >= 0:
                self._slots[call.slot] = stream_id
        ends = not self._bidirectional or call.slot < 0
        connection.send_data(stream_id, [_PREFIX.pack(0, len(body)), body], ends)

    def flush(self, now_ns: int) -> None:
        """Sends what is queued, as far as the socket takes it."""
        try:
            while True:
                if not self._unsent:
                    self._unsent = [memoryview(each) for each in self._connection.take_output()]
                    if not self._unsent:
                        return
                sent = self._write()
                while sent and sent >= len(self._unsent[0]):
                    sent -= len(self._unsent.pop(0))
                if sent:
                    self._unsent[0] = self._unsent[0][sent:]
        except WOULD_BLOCK:
            return
        except OSError:
            self.fail(LOST, now_ns)

    def _write(self) -> int:
        if self._buffers:
            return self._socket.send(self._unsent[0])
        return self._socket.sendmsg(self._unsent[:64])

    def fail(self, error: str, now_ns: int) -> None:
        """Ends all calls with an error; the connection is of no use any more."""
        self.lost = True
        streams, self._streams = self._streams, {}
        self._slots.clear()
        for stream in streams.values():
            for call in stream.calls:
                self._end(call, error, now_ns)

    def close(self) -> None:
        """Resets what is open, and closes the socket."""
        for stream_id in self._streams:
            self._connection.reset(stream_id, ErrorCode.CANCEL)
        self._streams.clear()
        self.flush(0)
        super().close()

    def _receive(self, data: bytes, now_ns: int) -> None:
        connection = self._connection
        self._handle(connection.receive(data, now_ns), now_ns)
        while connection.unparsed:
            self._handle(connection.receive(b"", now_ns), now_ns)

    def _handle(self, events: Iterable[Event], now_ns: int) -> None:
        for event in events:
            if type(event) is DataReceived:
                self._data(event, now_ns)
            elif type(event) is TrailersReceived:
                self._finish(event.stream_id, event.headers, now_ns)
            elif type(event) is HeadersReceived:
                if event.end_stream:
                    self._finish(event.stream_id, event.headers, now_ns)
            elif type(event) is StreamReset:
                self._drop(event.stream_id, _reset_error(event.code), now_ns)
            elif type(event) is GoAwayReceived:
                for stream_id in [each for each in self._streams if each > event.last_stream_id]:
                    self._drop(stream_id, LOST, now_ns)
                self._goes_away = True
                for stream_id in [each for each, stream in self._streams.items() if not stream.calls]:
                    self._retire(stream_id)
            elif type(event) is ConnectionClosed:
                self.fail(f"protocol error: {event.text}", now_ns)
        if (self._goes_away or self._connection.last_stream_id >= MOST_STREAM_ID) and not self._streams:
            self.lost = True

    def _data(self, event: DataReceived, now_ns: int) -> None:
        self._connection.consumed(event.stream_id, event.end - event.start)
        stream = self._streams.get(event.stream_id)
        if stream is None or not (self._reads or stream.calls[0].kept is not None):
            return
        message = stream.message
        message += memoryview(event.data)[event.start : event.end]
        while self._bidirectional and len(message) >= _PREFIX.size:
            _, length = _PREFIX.unpack_from(message)
            end = _PREFIX.size + length
            if len(message) < end:
                return
            body = bytes(message[_PREFIX.size : end])
            del message[:end]
            self._message(event.stream_id, stream, body, now_ns)

    def _message(self, stream_id: int, stream: _Open, body: bytes, now_ns: int) -> None:
        if not stream.calls:
            return
        call = stream.calls[0]
        text, final, counts = _read_stream_response(body, self._decoupled)
        error = ""
        if text:
            error = "error response"
            self._explain(error, text)
        elif self._validates and call.request.expected is not None:
            response = inference_pb2.ModelStreamInferResponse.FromString(body).infer_response
            error = grpc_difference(call.request.expected, response)
        if counts:
            if call.kept is not None:
                call.kept.append(KeptResponse(monotonic_ns(), body))
            self._ended.responded(call, now_ns)
            call.last_ns = now_ns
            call.responses += 1
        if final:
            stream.calls.pop(0)
            if call.slot < 0:  # the stream ends with its only call, and nothing else is to be heard
                self._streams.pop(stream_id, None)
            elif self._goes_away and not stream.calls:
                self._retire(stream_id)
            self._end(call, error, now_ns)

    def _retire(self, stream_id: int) -> None:
        """Ends a slot's stream, so that the peer can close the connection."""
        del self._streams[stream_id]
        self._slots = {slot: each for slot, each in self._slots.items() if each != stream_id}
        self._connection.send_data(stream_id, [], True)

    def _finish(self, stream_id: int, headers: HeaderList, now_ns: int) -> None:
        error, text = STREAM_ERROR, b""
        for name, value in headers.pairs:
            if name == b"grpc-status":
                code = int(value) if value.isdigit() else 2
                error = "" if not code else STATUS_NAMES[code] if code < len(STATUS_NAMES) else f"CODE_{code}"
            elif name == b":status" and value != b"200":
                error = f"HTTP {value.decode()}"
            elif name == b"grpc-message":
                text = value
        if error and text:
            self._explain(error, text)
        stream = self._streams.get(stream_id)
        if stream is not None and not error and not self._bidirectional:
            call = stream.calls[0]
            call.responses, call.last_ns = 1, now_ns
            body = bytes(stream.message[_PREFIX.size :])
            if self._validates and call.request.expected is not None:
                response = inference_pb2.ModelInferResponse.FromString(body)
                error = grpc_difference(call.request.expected, response)
            if call.kept is not None:
                call.kept.append(KeptResponse(now_ns, body))
        self._drop(stream_id, error or (STREAM_ERROR if self._bidirectional else ""), now_ns)

    def _drop(self, stream_id: int, error: str, now_ns: int) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return
        if self._bidirectional:
            self._slots = {slot: each for slot, each in self._slots.items() if each != stream_id}
        for call in stream.calls:
            self._end(call, error, now_ns)

    def _explain(self, error: str, text: str | bytes) -> None:
        if error not in self._explained:
            self._explained.add(error)
            self._ended.explained(error, text if isinstance(text, str) else unquote(text.decode()))

    def _end(self, call: LoadCall, error: str, now_ns: int) -> None:
        self.in_flight -= 1
        self._ended.call_ended(call, error, now_ns)


def _reset_error(code: int) -> str:
    known = code in ErrorCode.__members__.values()
    return f"stream reset: {ErrorCode(code).name if known else code}"


def _read_stream_response(body: bytes, decoupled: bool) -> tuple[str, bool, bool]:
    """The error's text of a stream's response, whether it is its call's last one, and whether it counts."""
    if not decoupled and body[:1] == b"\x12":  # infer_response, without an error_message before it
        return "", True, True
    message = inference_pb2.ModelStreamInferResponse.FromString(body)
    if message.error_message:
        return message.error_message, True, True
    if not decoupled:
        return "", True, True
    response = message.infer_response
    final = response.parameters["triton_final_response"].bool_param
    return "", final, bool(response.outputs) or not final
