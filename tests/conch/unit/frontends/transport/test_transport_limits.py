"""Limits on the cost of one client of the own transport: clients of raw frames that go beyond them."""

from __future__ import annotations

import gc
import os
import queue
import random
import resource
import socket
import ssl
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.certificates import Authority
from tests.support.clocks import Clock as SetClock
from tests.support.http2_peer import (
    END_STREAM,
    MAX_WINDOW,
    ErrorCode,
    Frame,
    FrameType,
    Http2Peer,
    Setting,
    call,
    call_pairs,
    data,
    header_block,
    headers,
    integer,
    message,
    ping,
    reset,
    window_update,
)
from tests.support.servers import WAIT_S, eventually

from conch.core.clock import Clock
from conch.core.tensor import Buffer
from conch.frontends.connections.turns import Turns
from conch.frontends.grpc.http2.limits import LocalSettings
from conch.frontends.grpc.rpc_calls import StreamRpc, UnaryRpc
from conch.frontends.grpc.tls_options import TlsOptions
from conch.frontends.grpc.transport import grpc_connection, messages
from conch.frontends.grpc.transport.calls import UnaryCall
from conch.frontends.grpc.transport.deadlines import Deadlines
from conch.frontends.grpc.transport.keep_alive import KeepAliveTimes
from conch.frontends.grpc.transport.metadata import RequestHead
from conch.frontends.grpc.transport.port_state import PortOptions
from conch.frontends.grpc.transport.transport_server import TransportServer
from conch.frontends.inflation import Inflated, inflate
from conch.frontends.yield_gil import yield_gil
from conch.ipc.loop import IoLoop, SharedLoop

MIB = 1 << 20
SECOND = 10**9
SIZE = "/t.T/Size"
HEALTH = "/grpc.health.v1.Health/Check"
SETTINGS = LocalSettings(max_frame_size=4 * MIB)
NARROW = PortOptions(settings=SETTINGS, most_received_bytes=16 * MIB)


class Site:
    """A server that answers with the size of messages, or with so many bytes."""

    def __init__(
        self, tls: TlsOptions | None = None, options: PortOptions | None = None, clock: Clock | None = None
    ) -> None:
        by_clock = () if clock is None else (SharedLoop(clock=clock), clock)
        self.server = TransportServer(options or PortOptions(settings=SETTINGS), *by_clock)
        self.waiting: queue.Queue[StreamRpc] = queue.Queue()
        self.cancelled: queue.Queue[None] = queue.Queue()
        self.server.serve(
            {
                SIZE: lambda call, message: call.reply(b"%d" % len(message)),
                HEALTH: lambda call, message: call.reply(b""),
                "/t.T/Bytes": self.send_bytes,
            },
            {"/t.T/Stream": self.stream},
            {},
        )
        self.address = f"127.0.0.1:{self.server.add_port('127.0.0.1:0', tls)}"
        self.server.start()

    def send_bytes(self, call: UnaryRpc, message: Any) -> None:
        call.reply(bytes(int(bytes(message))))

    def stream(self, call: StreamRpc) -> None:
        call.start(lambda message: None, partial(self.cancelled.put, None))
        self.waiting.put(call)

    @property
    def received_bytes(self) -> int:
        return self.server.client_counts.received_bytes

    def closed(self, reason: str) -> int:
        return self.server.client_counts.closed[reason]

    def ended(self, reason: str) -> int:
        return self.server.client_counts.ended[reason]

    def still_answers(self) -> None:
        with grpc.insecure_channel(self.address) as channel:
            assert channel.unary_unary(SIZE)(b"abc", timeout=WAIT_S) == b"3"

    def close(self) -> None:
        self.server.stop(0.5)


@pytest.fixture
def site() -> Iterator[Site]:
    with closing(Site()) as site:
        yield site


@pytest.fixture
def peer(site: Site) -> Iterator[Http2Peer]:
    with closing(Http2Peer(site.address)) as peer:
        yield peer


class Sender:
    """Sends parts of messages of 3 MiB, as far as windows allow."""

    def __init__(self, peer: Http2Peer) -> None:
        self.peer = peer
        self.left = SETTINGS.connection_window
        self.sent = 0
        self.refused = 0

    def begin(self, stream: int, count: int) -> bool:
        """Begins a call and sends so many bytes of its message; False if the window does not allow it."""
        self.peer.send(headers(stream, header_block(*call_pairs(SIZE))))
        return self.more(stream, message(bytes(3 * MIB))[:count])

    def more(self, stream: int, part: bytes, flags: int = 0) -> bool:
        if self.left < len(part):
            return False
        self.left -= len(part)
        self.sent += len(part)
        self.peer.send(data(stream, part, flags))
        return True

    def look(self, stream: int) -> None:
        """Sends a short call, and reads frames until its answer."""
        self.left -= len(message(b"abc"))
        self.peer.send(call(stream, b"abc", SIZE))
        while not ((each := self.peer.wait_any()).ends and each.stream == stream):
            if each.kind == FrameType.WINDOW_UPDATE and each.stream == 0:
                self.left += int.from_bytes(each.payload, "big")
            elif each.kind == FrameType.RST_STREAM:
                assert each.code == ErrorCode.REFUSED_STREAM
                self.refused += 1


def test_messages_that_are_partly_sent_are_bounded(
    site: Site, peer: Http2Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_connection, "MOST_PARTIAL_BYTES", 128 * MIB)
    peer.handshake()
    sender = Sender(peer)
    for number in range(200):
        sender.look(4 * number + 1)
        assert sender.begin(4 * number + 3, 2 * MIB), "the connection's window does not wait for streams"
    sender.look(1001)
    assert sender.sent - sender.refused * 2 * MIB <= 130 * MIB
    assert sender.refused < 150
    assert site.ended("partial_messages") == sender.refused
    # The oldest is still received, and once it has ended the next one is.
    for stream in (3, 7, 11):
        sender.more(stream, bytes(MIB + 5), END_STREAM)
        peer.wait_frame(FrameType.HEADERS, stream, END_STREAM)


def test_long_messages_do_not_wait_for_each_other(peer: Http2Peer) -> None:
    """Forty that came in turns had used up the connection's window before one of them was whole."""
    peer.handshake()
    long = message(bytes(4 * MIB))
    sent = dict.fromkeys(range(1, 80, 2), 0)
    windows = dict.fromkeys([0, *sent], SETTINGS.initial_window) | {0: SETTINGS.connection_window}
    peer.send(*(headers(stream, header_block(*call_pairs(SIZE))) for stream in sent))
    answered = 0
    while answered < 40:
        parts = []
        for stream, start in sent.items():
            count = min(MIB // 4, windows[0], windows[stream], len(long) - start)
            if count:
                sent[stream] += count
                windows[0] -= count
                windows[stream] -= count
                end = sent[stream] == len(long)
                parts.append(data(stream, long[start : start + count], END_STREAM if end else 0))
        peer.send(*parts)
        for each in peer.drain() if parts else [peer.wait_any()]:
            assert each.kind != FrameType.RST_STREAM
            if each.kind == FrameType.WINDOW_UPDATE:
                windows[each.stream] += int.from_bytes(each.payload, "big")
            answered += each.ends


@pytest.mark.slow
def test_answers_to_a_client_that_reads_nothing_are_bounded(site: Site, peer: Http2Peer) -> None:
    """Errors are headers, which no window holds back: the server reads no more until the client does."""
    peer.handshake()
    # A long path that costs a byte each time it comes again, and is in each error.
    path = b"/" + b"x" * 3000
    first = header_block((":method", "POST"), (":scheme", "http"))
    rest = header_block(("te", "trailers"), ("content-type", "application/grpc"))
    rest += b"\x10\x03x-a" + integer(2000, 7) + b"a" * 2000
    peer.send(headers(1, first + b"\x44" + integer(len(path), 7) + path + rest, 0x5))
    again = first + integer(62, 7, 0x80) + rest
    flood = memoryview(b"".join(headers(stream, again, 0x5) for stream in range(3, 30_000, 2)))
    sent = 0
    peer.socket.settimeout(3.0)  # far more than it takes to read what makes room for the next part
    with suppress(TimeoutError):
        while sent < len(flood):
            sent += peer.socket.send(flood[sent : sent + 65536])
    assert sent < len(flood), "the server reads on, whatever it has to send"
    site.still_answers()
    sender = threading.Thread(target=peer.send, args=(bytes(flood[sent:]), ping(b"the last")))
    sender.start()
    peer.wait_pong(b"the last")
    sender.join()


@pytest.mark.parametrize("whole", [False, True], ids=["stream", "connection"])
def test_answers_whose_window_stays_shut_are_dropped(
    site: Site, peer: Http2Peer, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_connection, "CHECK_NS", 50_000_000)
    peer.handshake((Setting.INITIAL_WINDOW_SIZE, 2 * MIB if whole else 10))
    size = 100_000 if whole else 20
    peer.send(call(1, b"%d" % size, "/t.T/Bytes"))
    peer.wait_frame(FrameType.RST_STREAM, 1)
    peer.send(window_update(0, MAX_WINDOW - 65535), call(3, b"1", "/t.T/Bytes"))
    peer.wait_frame(FrameType.HEADERS, 3, END_STREAM)


def test_answers_of_a_client_that_leaves_are_freed(site: Site, peer: Http2Peer) -> None:
    """They had stayed until the collector of cycles came by."""
    peer.handshake((Setting.INITIAL_WINDOW_SIZE, 0))
    tracemalloc.start()
    gc.disable()
    try:
        peer.send(call(1, b"%d" % (32 * MIB), "/t.T/Bytes"))
        peer.wait_frame(FrameType.HEADERS, 1)
        assert tracemalloc.get_traced_memory()[0] > 32 * MIB
        peer.close()
        eventually(lambda: tracemalloc.get_traced_memory()[0] < 16 * MIB, "its answer is freed")
    finally:
        gc.enable()
        tracemalloc.stop()


def test_a_stuck_stream_is_cancelled_beside_one_that_moves() -> None:
    clock, any_rate = SetClock(), PortOptions(settings=SETTINGS, least_rate=0)
    with closing(Site(options=any_rate, clock=clock)) as site, closing(Http2Peer(site.address)) as peer:
        peer.handshake((Setting.INITIAL_WINDOW_SIZE, 10))
        block = header_block(*call_pairs("/t.T/Stream"))
        peer.send(headers(1, block) + headers(3, block))
        stuck, moving = site.waiting.get(timeout=WAIT_S), site.waiting.get(timeout=WAIT_S)
        stuck.write(bytes(100))
        moving.write(bytes(100_000))
        checks = 0
        while (each := peer.wait_any()).kind != FrameType.RST_STREAM:
            if each.kind == FrameType.DATA and each.stream == 3:
                # It has moved since the last check, and the next one is over when the ping is answered.
                clock.now += grpc_connection.CHECK_NS
                peer.send(ping(b"%8d" % checks))
            elif each.kind == FrameType.PING:
                checks += 1
                peer.send(window_update(3, 1))
        assert each.stream == 1
        site.cancelled.get(timeout=WAIT_S)
        moving.close()
        peer.send(window_update(3, 200_000), window_update(0, 200_000))
        assert peer.wait_end(3)["grpc-status"] == "0"
        assert site.cancelled.empty()
        assert site.ended("slow_reader") == 1


@pytest.fixture
def demanding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A server whose clients have to move 4 MiB in each 50 ms."""
    monkeypatch.setattr(grpc_connection, "CHECK_NS", 50_000_000)
    with closing(Site(options=PortOptions(settings=SETTINGS, least_rate=80 * MIB))) as site:
        yield site


@pytest.mark.parametrize("whole", [False, True], ids=["stream", "connection"])
def test_answers_whose_window_opens_slowly_are_dropped(demanding: Site, whole: bool) -> None:
    with closing(Http2Peer(demanding.address)) as peer:
        peer.handshake((Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW if whole else 10))
        if not whole:
            peer.send(window_update(0, MAX_WINDOW - 65535))
        peer.send(call(1, b"%d" % (32 * MIB), "/t.T/Bytes"))
        while (each := peer.wait_any()).kind != FrameType.RST_STREAM:
            if each.kind == FrameType.DATA:
                peer.send(window_update(0 if whole else 1, 1))
        assert (each.stream, each.code) == (1, ErrorCode.CANCEL)
    assert demanding.ended("slow_reader") == 1


def test_a_client_that_takes_little_is_disconnected(demanding: Site) -> None:
    with closing(Http2Peer(demanding.address)) as peer:
        peer.handshake((Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW))
        peer.send(window_update(0, MAX_WINDOW - 65535), call(1, b"%d" % (32 * MIB), "/t.T/Bytes"))
        with suppress(ConnectionError):
            while not demanding.server.client_counts.closed["stuck"]:
                assert peer.socket.recv(1)
    eventually(lambda: demanding.server.client_counts.closed["stuck"] == 1, "it is closed")


@pytest.mark.parametrize("path", [SIZE, "/t.T/Stream"])
def test_a_message_that_comes_slowly_ends_its_call(demanding: Site, path: str) -> None:
    with closing(Http2Peer(demanding.address)) as peer:
        peer.handshake()
        peer.send(headers(1, header_block(*call_pairs(path))), data(1, message(bytes(3 * MIB))[:100]))
        while not demanding.ended("slow_sender"):
            peer.send(data(1, b"x"))
        fields = peer.wait_end(1)
        assert fields["grpc-status"] == "4"
        assert "--grpc-min-client-rate" in fields["grpc-message"]
        peer.send(data(1, b"x") if path == SIZE else data(1, b"x", END_STREAM), call(3, b"abc", SIZE))
        assert peer.wait_end(3)["grpc-status"] == "0"
    assert demanding.received_bytes == 0


class Upload:
    """A call with a long message, on a connection of its own; sends as far as windows allow."""

    def __init__(self, address: str, size: int = 5 * MIB) -> None:
        self.peer = Http2Peer(address)
        self.peer.handshake()
        self.left = memoryview(message(bytes(size)))
        self.window = SETTINGS.initial_window
        self.ended = False
        self.looks = 0
        self.peer.send(headers(1, header_block(*call_pairs(SIZE))))

    def send(self, count: int) -> None:
        """Sends so many bytes, as soon as windows allow; less if the call ends before."""
        while count and not self.ended:
            size = min(count, self.window, len(self.left))
            if size:
                part, self.left = self.left[:size], self.left[size:]
                self.window -= size
                count -= size
                self.peer.send(data(1, bytes(part), END_STREAM if not self.left else 0))
            else:
                self.take(self.peer.wait_any())

    def take(self, each: Frame) -> None:
        if each.kind == FrameType.WINDOW_UPDATE and each.stream == 1:
            self.window += int.from_bytes(each.payload, "big")
        self.ended |= each.stream == 1 and each.ends

    def look(self) -> None:
        """Sends a short call, and reads frames until its answer."""
        self.looks += 1
        stream = 2 * self.looks + 1
        self.peer.send(call(stream, b"abc", SIZE))
        while not ((each := self.peer.wait_any()).ends and each.stream == stream):
            self.take(each)

    def close(self) -> None:
        """Closes its connection."""
        self.peer.close()

    def end(self) -> None:
        """Sends the rest, and waits for the answer."""
        self.send(len(self.left))
        while not self.ended:
            self.take(self.peer.wait_any())


@pytest.fixture
def narrow() -> Iterator[Site]:
    """A server that may hold 16 MiB of messages."""
    with closing(Site(options=NARROW)) as site:
        yield site


def test_messages_of_all_connections_are_bounded(narrow: Site) -> None:
    with ExitStack() as stack:
        uploads = []
        for _ in range(12):
            uploads.append(Upload(narrow.address))
            stack.enter_context(closing(uploads[-1]))
            uploads[-1].send(3 * MIB)
            uploads[-1].look()
            assert narrow.received_bytes <= 16 * MIB
        refused = [each for each in uploads if each.ended]
        assert len(refused) == narrow.ended("received_bytes") == 7
        first, second, *others = (each for each in uploads if not each.ended)
        assert first.window > MIB, "the oldest one goes on"
        assert others[-1].window == MIB, "the others wait"
        # Also behind one that leaves.
        second.close()
        for each in (first, *others):
            each.end()
        assert narrow.ended("received_bytes") == 7
        assert narrow.received_bytes == 0


def test_clients_beyond_the_bound_end_or_are_refused(narrow: Site) -> None:
    """None waits for ever: neither for one that is refused, nor for a stream whose handler does not read."""

    def run(number: int) -> grpc.StatusCode:
        size = random.Random(number).randrange(MIB, 12 * MIB)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(narrow.address, options=options) as channel:
            try:
                if number % 3:
                    assert channel.unary_unary(SIZE)(bytes(size), timeout=WAIT_S) == b"%d" % size
                else:
                    parts = iter([bytes(size // 4)] * 4)
                    list(channel.stream_stream("/t.T/Stream")(parts, timeout=2.0))
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    with ThreadPoolExecutor(24) as pool:
        codes = list(pool.map(run, range(24)))
    refused = grpc.StatusCode.RESOURCE_EXHAUSTED
    assert {code for number, code in enumerate(codes) if number % 3} <= {grpc.StatusCode.OK, refused}
    assert grpc.StatusCode.OK in codes
    assert codes.count(refused) <= narrow.ended("received_bytes")
    eventually(lambda: narrow.received_bytes == 0, "all is forgotten")


def test_a_message_that_has_to_wait_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_connection, "CHECK_NS", 50_000_000)
    clock = SetClock()
    with (
        closing(Site(options=NARROW, clock=clock)) as narrow,
        closing(Upload(narrow.address, 32 * MIB)) as oldest,
        closing(Upload(narrow.address, 32 * MIB)) as waiting,
        closing(Http2Peer(narrow.address)) as slow,
    ):
        oldest.send(7 * MIB)
        while waiting.window:
            waiting.send(waiting.window)
            waiting.look()
            oldest.send(200)
        slow.handshake()
        slow.send(headers(1, header_block(*call_pairs(SIZE))), data(1, message(bytes(MIB))[:100]))
        while not narrow.ended("slow_sender"):
            oldest.send(200)
            oldest.look()
            clock.now += grpc_connection.CHECK_NS
            oldest.look()
        slow.wait_frame(FrameType.HEADERS, 1, END_STREAM)
        assert narrow.ended("slow_sender") == 1
        oldest.end()
        waiting.end()
        assert narrow.ended("slow_sender") == 1


def test_a_client_that_sends_a_long_message_is_not_quiet() -> None:
    clock, keep_alive = SetClock(), KeepAliveTimes(every_ns=10 * SECOND, timeout_ns=5 * SECOND)
    options = PortOptions(settings=SETTINGS, keep_alive=keep_alive)
    with closing(Site(options=options, clock=clock)) as site, closing(Http2Peer(site.address)) as peer:
        peer.handshake()
        whole = data(1, message(bytes(MIB)), END_STREAM)
        peer.send(headers(1, header_block(*call_pairs(SIZE))) + whole[:1000])
        closed = site.server.client_counts.closed

        def goes_on(least: int) -> bool:
            return site.received_bytes > least or closed["keep_alive"] > 0

        for part in range(1, 10):
            eventually(partial(goes_on, 900 * part), "it is received")
            assert not closed["keep_alive"]
            clock.now += 4 * SECOND
            peer.send(whole[1000 * part : 1000 * (part + 1)])
        peer.send(whole[10_000:])
        assert peer.wait_end(1)["grpc-status"] == "0"


def test_a_refused_message_names_the_bound(narrow: Site) -> None:
    with closing(Upload(narrow.address)) as oldest, ExitStack() as stack:
        oldest.send(MIB)
        oldest.look()
        for _ in range(5):
            peer = stack.enter_context(closing(Http2Peer(narrow.address)))
            peer.handshake()
            peer.send(headers(1, header_block(*call_pairs(SIZE))))
            peer.send(data(1, message(bytes(5 * MIB))[: 4 * MIB]))
        fields = peer.wait_end(1)
        assert fields["grpc-status"] == "8"
        assert "16777216 (--grpc-max-received-bytes)" in fields["grpc-message"]


def compressible(size: int) -> bytes:
    """A message that gzip makes about half as large; grpcio sends one that it can't shrink as it is."""
    return os.urandom(size // 2).hex().encode()


def test_messages_that_no_handler_reads_are_bounded(narrow: Site) -> None:
    """Each stream has one that its handler has, and one that waits for `read_next`."""
    with closing(Http2Peer(narrow.address)) as peer:
        peer.handshake()
        unread = message(bytes(3 * MIB))
        block = header_block(*call_pairs("/t.T/Stream"))
        streams = range(1, 33, 4)
        for stream in streams:
            peer.send(headers(stream, block) + data(stream, message(b"first") + unread))
            peer.send(call(stream + 2, b"abc", SIZE))
            peer.wait_end(stream + 2)
            assert narrow.received_bytes <= 16 * MIB
        assert narrow.ended("received_bytes") == 3
        assert narrow.received_bytes > 12 * MIB
        # They do not hold up a message for which a handler waits.
        with closing(Upload(narrow.address)) as upload:
            upload.end()
        with grpc.insecure_channel(narrow.address) as channel:
            packed = compressible(MIB // 4)
            channel.unary_unary(SIZE)(packed, timeout=WAIT_S, compression=grpc.Compression.Gzip)
        assert narrow.ended("received_bytes") == 3
        for _ in streams:
            narrow.waiting.get(timeout=WAIT_S).read_next()
        eventually(lambda: narrow.received_bytes == 0, "all are read")


def test_a_message_that_decompresses_to_more_than_the_bound_is_refused_by_then(narrow: Site) -> None:
    with grpc.insecure_channel(narrow.address) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(SIZE)(bytes(64 * MIB), timeout=WAIT_S, compression=grpc.Compression.Gzip)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "16777216 (--grpc-max-received-bytes)" in raised.value.details()
    assert narrow.ended("received_bytes") == 1
    assert narrow.received_bytes == 0


def test_a_short_compressed_message_does_not_wait_for_long_ones_of_its_host(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    begun: queue.Queue[None] = queue.Queue()

    def hold_up(data: Buffer, *arguments: Any) -> Inflated:
        if len(data) > MIB // 4:
            begun.put(None)
            while not go.is_set():
                yield_gil()
        return inflate(data, *arguments)

    monkeypatch.setattr(messages, "inflate", hold_up)
    with grpc.insecure_channel(site.address) as channel:
        size = channel.unary_unary(SIZE)
        gzip = grpc.Compression.Gzip
        long = [size.future(compressible(MIB), timeout=WAIT_S, compression=gzip) for _ in range(10)]
        for _ in range(8):
            begun.get(timeout=WAIT_S)
        assert size(b"short" * 1000, timeout=WAIT_S, compression=gzip) == b"5000"
        go.set()
        assert [call.result() for call in long] == [b"%d" % MIB] * 10


def test_compressed_messages_count_until_they_are_decompressed(narrow: Site) -> None:
    with grpc.insecure_channel(narrow.address) as channel:
        method = channel.unary_unary(SIZE)
        for _ in range(3):
            answer = method(compressible(4 * MIB), timeout=WAIT_S, compression=grpc.Compression.Gzip)
            assert answer == b"%d" % (4 * MIB)
    assert narrow.received_bytes == 0
    assert narrow.ended("received_bytes") == 0


def test_a_client_that_pings_too_often_is_disconnected(site: Site, peer: Http2Peer) -> None:
    """One with an open call had kept its connection, and was counted for each ping."""
    peer.handshake()
    peer.send(headers(1, header_block(*call_pairs(SIZE))) + 50 * ping())
    peer.wait_connection_error(ErrorCode.ENHANCE_YOUR_CALM)
    assert site.server.client_counts.closed["pings"] == 1


def test_a_client_that_takes_nothing_is_disconnected(
    site: Site, peer: Http2Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_connection, "CHECK_NS", 50_000_000)
    peer.handshake((Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW))
    peer.send(window_update(0, MAX_WINDOW - 65535), call(1, b"%d" % (32 * MIB), "/t.T/Bytes"))
    eventually(lambda: site.server.client_counts.closed["stuck"] == 1, "it is closed")
    site.still_answers()


def test_connections_beyond_descriptors_wait(
    site: Site, peer: Http2Peer, caplog: pytest.LogCaptureFixture
) -> None:
    peer.handshake()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        late = stack.enter_context(closing(Http2Peer(site.address)))
        late.close()
        late.socket = socket.socket()
        resource.setrlimit(resource.RLIMIT_NOFILE, (late.socket.fileno() + 3, limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with ExitStack() as used:
            with suppress(OSError):
                while True:
                    used.callback(os.close, os.dup(late.socket.fileno()))
            host, _, port = site.address.partition(":")
            late.socket.connect((host, int(port)))
            eventually(lambda: "can't accept connections" in caplog.text, "no descriptor is left")
            peer.send(call(1, b"abc", SIZE))
            assert peer.wait_end(1)["grpc-status"] == "0"
        late.handshake()


def test_deadlines_that_are_far_leave_nothing() -> None:
    deadlines = Deadlines(IoLoop())
    pairs = [(name.encode(), value.encode()) for name, value in call_pairs(SIZE)]
    head = RequestHead((*pairs, (b"grpc-timeout", b"100H")))

    def make(number: int) -> UnaryCall:
        connection: Any = None
        return UnaryCall(connection, 1, head, number << 30, lambda call, message: None)

    open_calls = [make(-number) for number in range(1, 2000)]
    tracemalloc.start()
    try:
        for each in open_calls:
            deadlines.add(each)
        used, _ = tracemalloc.get_traced_memory()
        for number in range(20_000):
            each = make(number)
            deadlines.add(each)
            deadlines.discard(each)
        assert tracemalloc.get_traced_memory()[0] < 4 * used
    finally:
        tracemalloc.stop()


def test_all_of_a_tls_record_is_read(tmp_path: Path) -> None:
    """Bytes that TLS has buffered make no event; a third of these had waited for the client's next bytes."""
    key, certificate = Authority(tmp_path / "authority").issue("server")
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with closing(Site(TlsOptions(key.read_bytes(), certificate.read_bytes()))) as site:
        for number in range(60):
            with closing(Http2Peer(site.address)) as peer:
                peer.socket = context.wrap_socket(peer.socket)
                peer.handshake()
                long = message(bytes(70_000 + 5501 * number))
                peer.send(
                    headers(1, header_block(*call_pairs(SIZE)))
                    + data(1, long, END_STREAM)
                    + ping(b"the last")
                )
                peer.wait_pong(b"the last")


@pytest.fixture
def crowded() -> Iterator[Site]:
    """A server with three places for connections."""
    with closing(Site(options=PortOptions(settings=SETTINGS, most_connections=3))) as site:
        yield site


def status(peer: Http2Peer, stream: int, path: str = SIZE) -> str:
    """Status of a call."""
    peer.send(call(stream, b"abc", path))
    return peer.wait_end(stream)["grpc-status"]


def connected(stack: ExitStack, site: Site) -> Http2Peer:
    """A new connection."""
    peer = stack.enter_context(closing(Http2Peer(site.address)))
    peer.handshake()
    return peer


def test_the_connection_that_was_quiet_longest_gives_way(crowded: Site) -> None:
    with ExitStack() as stack:
        first, quiet, third = (connected(stack, crowded) for _ in range(3))
        assert status(first, 1) == "0"
        late = connected(stack, crowded)
        quiet.wait_frame(FrameType.GOAWAY)
        quiet.wait_closed()
        assert [status(each, 3) for each in (first, third, late)] == ["0"] * 3
        assert crowded.closed("crowded") == 1


def test_health_checks_have_places_where_all_connections_have_calls(crowded: Site) -> None:
    with ExitStack() as stack:
        peers = [connected(stack, crowded) for _ in range(3)]
        for each in peers:
            each.send(headers(1, header_block(*call_pairs("/t.T/Stream"))))
            crowded.waiting.get(timeout=WAIT_S)
        late = [connected(stack, crowded) for _ in range(12)]
        for each in late[:4]:  # others have taken their places
            each.wait_closed()
        for each in late[4:]:
            assert (status(each, 1), status(each, 3, HEALTH)) == ("14", "0")
        peers[0].close()
        eventually(crowded.cancelled.qsize, "there is a place again")
        assert status(connected(stack, crowded), 1) == "0"


def test_answers_that_are_not_read_are_bounded_for_all_connections(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_connection, "MOST_ANSWER_BYTES", 4 * MIB)
    with ExitStack() as stack:
        peers = [stack.enter_context(closing(Http2Peer(site.address))) for _ in range(4)]
        for each in peers:
            each.handshake((Setting.INITIAL_WINDOW_SIZE, 0))
            # What arrives together is answered although nothing of it is read: up to twice the bound.
            each.send(*(call(stream, b"%d" % MIB, "/t.T/Bytes") for stream in range(1, 13, 2)))
            each.wait_frame(FrameType.HEADERS, 11)
        dropped = site.ended("unread_answers")
        assert dropped >= 4 * 6 - 8 - 4 - 1, "each client has an answer, all of them twice the bound"
        peers[0].send(call(101, b"1", "/t.T/Bytes"))
        assert peers[0].wait_frame(FrameType.RST_STREAM, 101).code == ErrorCode.REFUSED_STREAM
        site.still_answers()
        for each in peers[:3]:
            each.close()
        streams = iter(range(101, 10_000, 2))

        def taken() -> bool:
            peers[3].send(call(next(streams), b"1", "/t.T/Bytes"))
            return peers[3].wait_any().kind == FrameType.HEADERS

        eventually(taken, "its own are few")


@pytest.mark.parametrize(("path", "streams"), [("/t.T/Stream", 1), ("/t.T/Stream", 300), (SIZE, 1000)])
def test_connections_take_turns(path: str, streams: int) -> None:
    """A call of one client is handled long before all that another has sent in few bytes."""
    server = TransportServer(PortOptions(settings=SETTINGS))
    handled: list[str] = []
    begun, sent = threading.Event(), threading.Event()
    flood = 1000 if path == SIZE else 18_000
    # Of many streams, all are open before the other client sends its call.
    first, most = (20 * streams, 2 * streams) if 1 < streams < flood else (1, flood // 2)

    def flooded() -> None:
        handled.append("flood")
        if len(handled) == first:
            begun.set()
            assert sent.wait(WAIT_S)

    def stream(call: StreamRpc) -> None:
        def take(message: object) -> None:
            flooded()
            call.write(b"")
            call.read_next()

        call.start(take, lambda: None)

    def unary(call: UnaryRpc, message: Any) -> None:
        flooded()
        call.reply(b"")

    def other(call: UnaryRpc, message: Any) -> None:
        handled.append("other")
        call.reply(b"")

    server.serve({SIZE: unary, "/t.T/Other": other}, {"/t.T/Stream": stream}, {})
    address = f"127.0.0.1:{server.add_port('127.0.0.1:0')}"
    with ExitStack() as stack:
        stack.callback(server.stop, 0)
        server.start()
        flooding, peer = (stack.enter_context(closing(Http2Peer(address))) for _ in range(2))
        flooding.handshake()
        peer.handshake()
        block, each = header_block(*call_pairs(path)), message(b"") * (flood // streams)
        end = END_STREAM if path == SIZE else 0
        for number in range(1, 2 * streams, 2):
            flooding.send(headers(number, block), data(number, each, end))
        assert begun.wait(WAIT_S)
        peer.send(call(1, b"", "/t.T/Other"))
        peer.wait_sent()
        sent.set()
        eventually(lambda: "other" in handled, "the other client's call is handled")
        assert handled.index("other") < first + most
        eventually(lambda: handled.count("flood") == flood, "all of the flood is handled, too")


def test_a_round_of_many_connections_is_bounded() -> None:
    """Each connection has a few frames handled as it is read; further ones share the round's turns."""
    clock = count(0, SECOND // 10_000).__next__
    server = TransportServer(PortOptions(settings=SETTINGS), SharedLoop(clock=clock), clock)
    handled: list[str] = []
    begun, sent = threading.Event(), threading.Event()

    def unary(path: str, call: UnaryRpc, message: Any) -> None:
        handled.append(path)
        begun.set()
        assert sent.wait(WAIT_S)
        call.reply(b"")

    server.serve({path: partial(unary, path) for path in (SIZE, "/t.T/Other")}, {}, {})
    address = f"127.0.0.1:{server.add_port('127.0.0.1:0')}"
    with ExitStack() as stack:
        stack.callback(server.stop, 0)
        server.start()
        *flooding, peer = (stack.enter_context(closing(Http2Peer(address))) for _ in range(17))
        for each in (*flooding, peer):
            each.handshake()
        for each in flooding:
            each.send(*(call(number, b"", SIZE) for number in range(1, 401, 2)))
            assert begun.wait(WAIT_S)
        peer.send(call(1, b"", "/t.T/Other"))
        for each in (*flooding, peer):
            each.wait_sent()
        sent.set()
        eventually(lambda: "/t.T/Other" in handled, "the other client's call is handled")
        assert handled.index("/t.T/Other") < 800


def test_a_cancellation_is_heard_while_messages_wait_for_their_turns() -> None:
    server = TransportServer(PortOptions(settings=SETTINGS))
    handled = 0
    sent, cancelled = threading.Event(), threading.Event()

    def stream(call: StreamRpc) -> None:
        def take(message: object) -> None:
            nonlocal handled
            handled += 1
            assert sent.wait(WAIT_S)
            call.read_next()

        call.start(take, cancelled.set)

    server.serve({}, {"/t.T/Stream": stream}, {})
    address = f"127.0.0.1:{server.add_port('127.0.0.1:0')}"
    with ExitStack() as stack:
        stack.callback(server.stop, 0)
        server.start()
        peer = stack.enter_context(closing(Http2Peer(address)))
        peer.handshake()
        peer.send(
            headers(1, header_block(*call_pairs("/t.T/Stream"))), data(1, message(b"") * 50_000), reset(1)
        )
        eventually(lambda: handled, "the first message is handled")
        sent.set()
        assert cancelled.wait(WAIT_S)
        assert handled < 10_000


def test_a_turn_that_fails_takes_no_other_connection_its_own() -> None:
    turns = []
    work: list[Callable[[], object]] = []

    class Connection:
        def __init__(self, fails: bool) -> None:
            self.fails = fails

        def take_turn(self) -> None:
            turns.append(self)
            assert not self.fails

    queue = Turns(work.append, lambda: 0)
    bad, good = Connection(True), Connection(False)
    queue.queue(bad)
    queue.queue(good)
    with pytest.raises(AssertionError):
        work.pop(0)()
    work.pop(0)()
    assert (turns, work) == ([bad, good], [])
