"""The transports with grpcio's clients: calls, streams, cancellation, deadlines, the end."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.grpc_transports import TRANSPORTS
from tests.support.http2 import ACK, GOAWAY, PING, REQUEST, data, headers, settings, window_update
from tests.support.http2_peer import PREFACE, frame
from tests.support.servers import WAIT_S, eventually, past_deadline

from conch.core.clock import Clock, monotonic_ns
from conch.frontends.grpc.grpc_options import ConnectionLimits, GrpcOptions
from conch.frontends.grpc.rpc_calls import RpcServer, StreamRpc, UnaryRpc
from conch.frontends.grpc.transport.port_state import PortOptions
from conch.frontends.grpc.transport.transport_server import TransportServer, own_server
from conch_grpcio.grpcio_server import GrpcioServer

BLOCK = bytes(1 << 20)


class Site:
    """A server whose methods show what a transport must do."""

    def __init__(self, server: RpcServer) -> None:
        self.server = server
        self.waiting: queue.Queue[UnaryRpc] = queue.Queue()
        self.cancelled: queue.Queue[Any] = queue.Queue()
        self.written = 0
        self.flooded: Any = None
        self.server.serve(
            {
                "/t.T/Echo": lambda call, message: call.reply(bytes(message)),
                "/t.T/Thread": self.on_a_thread,
                "/t.T/Pack": lambda call, message: call.reply_with(
                    bytes(message), "gzip", (("key", "v"), ("k-bin", b"\0\xff"))
                ),
                "/t.T/Fail": lambda call, message: call.abort(3, "wrong: ü%\n", (("retry-after", "1"),)),
                "/t.T/Wait": self.wait,
                "/t.T/Broken": self.broken,
                "/t.T/Say": lambda call, message: call.reply(
                    repr(([*map(tuple, call.metadata)], call.client.partition(":")[0])).encode()
                ),
                "/t.T/Refused": lambda call, message: call.reply(b"no"),
            },
            {
                "/t.T/Each": self.each,
                "/t.T/Busy": self.busy,
                "/t.T/Flood": self.flood,
                "/t.T/BrokenStream": self.broken,
                "/t.T/No": lambda call: call.refuse(7, "closed"),
            },
            {"/t.T/Refused": self.refuse},
        )
        self.port = self.server.add_port("127.0.0.1:0")
        self.server.start()
        self.channel = grpc.insecure_channel(
            f"127.0.0.1:{self.port}",
            options=[("grpc.max_receive_message_length", -1), ("grpc.enable_retries", 0)],
        )

    def refuse(self, call: UnaryRpc) -> bool:
        call.abort(16, "who is it?")
        return False

    def broken(self, *call: Any) -> None:
        raise ValueError("for the log only")

    def on_a_thread(self, call: UnaryRpc, message: Any) -> None:
        threading.Thread(target=call.reply, args=(bytes(message),)).start()

    def wait(self, call: UnaryRpc, message: Any) -> None:
        call.watch(self.cancelled.put, bytes(message))
        self.waiting.put(call)

    def each(self, call: StreamRpc) -> None:
        def take(message: Any) -> None:
            if message is None:
                call.close(0, "", (("end", "yes"),))
            else:
                call.write(bytes(message))
                call.read_next()

        def drain(status: int, details: str) -> None:
            call.close(status, details)

        call.on_drain = drain
        call.start(take, lambda: self.cancelled.put("stream"))

    def busy(self, call: StreamRpc) -> None:
        """Answers the messages, and does not end."""

        def take(message: Any) -> None:
            if message is not None:
                call.write(bytes(message))
                call.read_next()

        call.start(take, lambda: self.cancelled.put("stream"))

    def flood(self, call: StreamRpc) -> None:
        """Writes 256 MB on a thread, as fast as its reader reads."""
        self.flooded = call

        def write() -> None:
            for _ in range(256):
                call.write(BLOCK)
                self.written += len(BLOCK)
                call.wait_until_writable()
            call.close()

        def take(message: Any) -> None:
            if message is not None:
                threading.Thread(target=write).start()

        call.start(take, lambda: self.cancelled.put("flood"))

    def call(self, method: str, message: bytes = b"message", **arguments: Any) -> Any:
        return self.channel.unary_unary(f"/t.T/{method}")(message, timeout=WAIT_S, **arguments)

    def begin(self, method: str, message: bytes, timeout_s: float = WAIT_S) -> Any:
        return self.channel.unary_unary(f"/t.T/{method}").future(message, timeout=timeout_s)

    def closed(self) -> Mapping[str, int]:
        """Numbers of connections that the server has closed, by reason."""
        counts = self.server.client_counts
        assert counts is not None
        return counts.closed

    def close(self) -> None:
        self.channel.close()
        while not self.waiting.empty():
            self.waiting.get().reply(b"")
        self.server.stop(WAIT_S)


def grpc_server(transport: str, **settings: Any) -> RpcServer:
    make: Callable[[GrpcOptions, Clock], RpcServer] = own_server if transport == "own" else GrpcioServer
    return make(GrpcOptions(address="127.0.0.1", port=0, **settings), monotonic_ns)


@pytest.fixture(params=TRANSPORTS)
def site(request: pytest.FixtureRequest, grpc_is_warm: None) -> Iterator[Site]:
    with closing(Site(grpc_server(request.param, max_message_bytes=8 << 20))) as site:
        yield site


@pytest.fixture
def own_site() -> Iterator[Site]:
    with closing(Site(TransportServer(PortOptions(most_message_bytes=8 << 20)))) as site:
        yield site


@pytest.mark.parametrize("method", ["Echo", "Thread"])
@pytest.mark.parametrize("size", [0, 1, 16_384, 70_000, 3_000_000])
def test_messages_of_all_sizes(site: Site, method: str, size: int) -> None:
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert site.call(method, message) == message


def test_a_message_over_the_limit(site: Site) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        site.call("Echo", bytes((8 << 20) + 1))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = raised.value.details().removeprefix("SERVER: ")  # with grpcio
    assert details == f"Received message larger than max ({(8 << 20) + 1} vs. {8 << 20})"
    assert site.call("Echo") == b"message"


def test_compression_and_trailing_metadata(site: Site) -> None:
    message = b"conch " * 10_000
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate):
        answer, call = site.channel.unary_unary("/t.T/Pack").with_call(message, compression=compression)
        assert answer == message
        assert ("key", "v") in call.trailing_metadata()
        assert ("k-bin", b"\0\xff") in call.trailing_metadata()


def test_errors(site: Site) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        site.call("Fail")
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details() == "wrong: ü%\n"
    assert ("retry-after", "1") in raised.value.trailing_metadata()
    for method, code in (("Unknown", "UNIMPLEMENTED"), ("Refused", "UNAUTHENTICATED")):
        with pytest.raises(grpc.RpcError) as raised:
            site.call(method, bytes(200_000))  # is still being sent
        assert raised.value.code().name == code
    assert site.call("Echo") == b"message"


def test_a_handler_that_raises_fails_its_call(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    stream = site.channel.stream_stream("/t.T/BrokenStream")
    for call in (lambda: site.call("Broken"), lambda: list(stream(iter([b"a"]), timeout=WAIT_S))):
        with pytest.raises(grpc.RpcError) as raised:
            call()
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        assert raised.value.details() == "the server failed to handle the call; its log has the cause"
        assert "for the log only" in caplog.text
        caplog.clear()


def test_metadata_and_client(site: Site) -> None:
    answer = site.call("Say", metadata=(("key", "value"), ("raw-bin", b"\xff"))).decode()
    assert "('key', 'value'), ('raw-bin', b'\\xff')" in answer
    assert "'user-agent'" in answer
    assert "'ipv4'" in answer


def test_a_client_that_cancels(site: Site) -> None:
    call = site.begin("Wait", b"one")
    late = site.waiting.get(timeout=WAIT_S)
    call.cancel()
    assert site.cancelled.get(timeout=WAIT_S) == b"one"
    late.reply(b"too late")
    assert site.call("Echo") == b"message"


def test_a_deadline(site: Site) -> None:
    ended = past_deadline(
        lambda timeout_s: site.begin("Wait", b"two", timeout_s=timeout_s).code(),
        lambda: not site.waiting.empty(),
    )
    assert ended is grpc.StatusCode.DEADLINE_EXCEEDED
    late = site.waiting.get()
    assert site.cancelled.get(timeout=WAIT_S) == b"two"
    late.abort(3, "too late")


def test_many_calls_with_deadlines_leave_nothing(site: Site) -> None:
    echo = site.channel.unary_unary("/t.T/Echo")
    for call in [echo.future(b"x", timeout=WAIT_S) for _ in range(300)]:
        assert call.result() == b"x"


def test_a_stream(site: Site) -> None:
    call = site.channel.stream_stream("/t.T/Each")(iter([b"a", b"", b"b" * 100_000]), timeout=WAIT_S)
    assert list(call) == [b"a", b"", b"b" * 100_000]
    assert ("end", "yes") in call.trailing_metadata()


def test_a_compressed_stream(site: Site) -> None:
    messages = [bytes([number]) * 100_000 for number in range(9)]
    stream = site.channel.stream_stream("/t.T/Each")
    assert list(stream(iter(messages), timeout=WAIT_S, compression=grpc.Compression.Gzip)) == messages
    with pytest.raises(grpc.RpcError) as raised:
        site.call("Echo", bytes((8 << 20) + 1), compression=grpc.Compression.Gzip)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_many_deadlines_that_pass_are_no_attack(site: Site) -> None:
    innocent = site.begin("Wait", b"innocent")
    held = site.waiting.get(timeout=WAIT_S)
    late = [site.begin("Wait", b"late", timeout_s=0.05) for _ in range(300)]
    codes = {each.code() for each in late}
    held.reply(b"answer")
    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert innocent.result() == b"answer"


def test_a_successor_keeps_its_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    old, new = grpc_server("own"), grpc_server("own")
    for server in (old, new):
        server.add_port(f"unix:{path}")
        server.start()
    assert old.stop(WAIT_S)
    assert path.is_socket()
    assert new.stop(WAIT_S)
    assert not path.exists()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_metadata_of_any_size_that_is_set(transport: str, grpc_is_warm: None) -> None:
    server = grpc_server(transport, limits=ConnectionLimits(metadata_bytes=1 << 20))
    server.serve({"/t.T/Count": lambda call, message: call.reply(b"%d" % len(call.header("key")))}, {}, {})
    try:
        port = server.add_port("127.0.0.1:0")
        server.start()
        most = [("grpc.max_metadata_size", 1 << 20), ("grpc.absolute_max_metadata_size", 1 << 20)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", most) as channel:
            answer = channel.unary_unary("/t.T/Count")(b"", metadata=[("key", "v" * 500_000)], timeout=WAIT_S)
        assert answer == b"500000"
    finally:
        assert server.stop(WAIT_S)


def test_a_refused_stream(site: Site) -> None:
    call = site.channel.stream_stream("/t.T/No")(iter([b"a"]), timeout=WAIT_S)
    with pytest.raises(grpc.RpcError) as raised:
        next(call)
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.PERMISSION_DENIED, "closed")


def test_a_stream_whose_client_cancels(site: Site) -> None:
    messages: queue.Queue[bytes] = queue.Queue()
    messages.put(b"a")
    call = site.channel.stream_stream("/t.T/Busy")(iter(messages.get, None), timeout=WAIT_S)
    assert next(call) == b"a"
    call.cancel()
    assert site.cancelled.get(timeout=WAIT_S) == "stream"
    messages.put(None)  # type: ignore[arg-type]


def test_a_slow_reader_holds_its_writer(site: Site) -> None:
    call = site.channel.stream_stream("/t.T/Flood")(iter([b"go"]), timeout=10 * WAIT_S)
    assert next(call) == BLOCK
    eventually(lambda: site.flooded and site.flooded.backpressure, "the writer waits")
    assert site.written < 200 << 20
    assert sum(1 for _ in call) == 255
    assert site.written == 256 << 20


def test_the_end_of_a_client_cancels_its_calls(site: Site) -> None:
    call = site.begin("Wait", b"three")
    late = site.waiting.get(timeout=WAIT_S)
    site.channel.close()
    assert site.cancelled.get(timeout=WAIT_S) == b"three"
    late.reply(b"too late")
    assert call.code() is grpc.StatusCode.CANCELLED


def test_a_client_may_ping_while_a_long_answer_arrives(own_site: Site) -> None:
    """As gRPC's clients do to measure the bandwidth; pings without any answer between are strikes."""
    request = tuple((name, b"/t.T/Flood" if name == b":path" else value) for name, value in REQUEST)
    with socket.create_connection(("127.0.0.1", own_site.port), WAIT_S) as client:
        client.sendall(PREFACE + settings() + headers(1, request) + data(1, b"\0\0\0\0\0"))
        received = b""
        for _ in range(10):  # the first of the messages has many windows
            window = len(received) + 60_000
            while len(received) < window:
                some = client.recv(window - len(received))
                assert some, received[-40:]
                received += some
            client.sendall(frame(PING, 0, 0, b"how fast") + window_update(0, 60_000))
            client.sendall(window_update(1, 60_000))
    eventually(lambda: not own_site.cancelled.empty(), "the server sees the end")
    assert not own_site.closed()["pings"]


def test_a_stop_lets_calls_end(site: Site) -> None:
    call = site.begin("Wait", b"four")
    held = site.waiting.get(timeout=WAIT_S)
    stopping = threading.Thread(target=site.server.stop, args=(WAIT_S,))
    stopping.start()
    with pytest.raises(ConnectionRefusedError):
        while True:  # until nothing listens
            with suppress(ConnectionResetError):  # not accepted yet
                socket.create_connection(("127.0.0.1", site.port), WAIT_S).close()
    held.reply(b"in time")
    assert call.result() == b"in time"
    stopping.join(WAIT_S)
    assert not stopping.is_alive()


def test_the_client_closes_after_the_last_answer(own_site: Site) -> None:
    """A proxy may still pass the answer on, and would drop it where its connection ends."""
    request = tuple((name, b"/t.T/Wait" if name == b":path" else value) for name, value in REQUEST)
    with socket.create_connection(("127.0.0.1", own_site.port), WAIT_S) as client:

        def receive_until(expected: bytes) -> None:
            received = b""
            while expected not in received:
                some = client.recv(65536)
                assert some, received
                received += some

        client.sendall(PREFACE + settings() + headers(1, request) + data(1, b"\0\0\0\0\0", end=True))
        held = own_site.waiting.get(timeout=WAIT_S)
        stopping = threading.Thread(target=own_site.server.stop, args=(WAIT_S,))
        stopping.start()
        receive_until(b"conch-go")
        # A call that the client has begun before it read the first GOAWAY.
        late = tuple((name, b"/t.T/Echo" if name == b":path" else value) for name, value in REQUEST)
        client.sendall(
            frame(PING, ACK, 0, b"conch-go") + headers(3, late) + data(3, b"\0\0\0\0\4late", end=True)
        )
        receive_until(b"late")
        client.sendall(frame(PING, ACK, 0, b"conch-g2"))
        receive_until(frame(GOAWAY, 0, 0, bytes((0, 0, 0, 3)) + bytes(4)))
        held.reply(b"the last answer")
        receive_until(b"the last answer")
        client.sendall(frame(PING, 0, 0, b"are-here"))
        receive_until(frame(PING, ACK, 0, b"are-here"))
    stopping.join(WAIT_S)
    assert not stopping.is_alive()


def test_a_stop_cancels_what_does_not_end(site: Site) -> None:
    call = site.begin("Wait", b"five")
    late = site.waiting.get(timeout=WAIT_S)
    assert not site.server.stop(0.1)
    assert site.cancelled.get(timeout=WAIT_S) == b"five"
    assert call.code() is grpc.StatusCode.UNAVAILABLE
    late.reply(b"too late")


def test_streams_are_drained(site: Site) -> None:
    messages: queue.Queue[bytes | None] = queue.Queue()
    call = site.channel.stream_stream("/t.T/Each")(iter(messages.get, None), timeout=WAIT_S)
    messages.put(b"a")
    assert next(call) == b"a"
    assert site.server.drain_streams(14, "going", WAIT_S)
    with pytest.raises(grpc.RpcError) as raised:
        next(call)
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.UNAVAILABLE, "going")
    messages.put(None)


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nxxxxxxxxx"]
)
def test_what_is_no_http2_is_disconnected(own_site: Site, first: bytes) -> None:
    with socket.create_connection(("127.0.0.1", own_site.port), WAIT_S) as client:
        client.sendall(first)
        while client.recv(65536):
            pass
    eventually(lambda: sum(own_site.closed().values()) == 1, "it is counted")
    assert own_site.call("Echo") == b"message"
