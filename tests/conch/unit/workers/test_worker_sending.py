"""Sending: new blocks go once, unsendable data leaves nothing behind, no thread waits for ever."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.conch.unit.ipc.test_blocks import LARGE, exchanges, send, tell
from tests.conch.unit.workers.models import CalledServer, floats, source_of, spec_of
from tests.support.core import WAIT_S
from tests.support.servers import eventually
from tests.support.workers import batch_of, placed, request_of, worker

from conch.core.errors import InternalError, UnavailableError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.tensor import Buffer, Tensor
from conch.ipc import channel as channel_module
from conch.ipc.channel import (
    BUFFER_BYTES,
    ChannelClosedError,
    Kind,
    PacketChannel,
    WireError,
    encode,
)
from conch.ipc.devices import ServerDevices
from conch.ipc.tensors import Place, ReceivedMessage


class FailingSocket:
    """A socket on which sending fails for a reason of the system's, from a certain message on."""

    def __init__(self, sock: socket.socket, after: int = 0) -> None:
        self._sock = sock
        self._left = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendmsg(self, *arguments: Any) -> int:
        self._left -= 1
        if self._left < 0:
            raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
        return self._sock.sendmsg(*arguments)


def fail_to_send(channel: PacketChannel, after: int = 0) -> None:
    channel._sock = FailingSocket(channel._sock, after)  # type: ignore[assignment]


def large() -> Tensor:
    return Tensor.from_array("x", LARGE)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.pure("replaces the send of a channel")
def test_a_new_block_that_is_back_before_its_sender_goes_on_is_sent_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with exchanges() as (server, host):
        real = server.channel.send
        files = open_files()

        def send_and_answer(parts: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
            """Runs on other threads before the one that sends goes on."""
            real(parts, fds)
            monkeypatch.setattr(server.channel, "send", real)
            host.receive()
            tell(host, server)
            (tensor,) = send(server, host, [large()])
            assert np.array_equal(tensor.numpy(), LARGE)

        monkeypatch.setattr(server.channel, "send", send_and_answer)
        payload = server.pack([[large()]])
        server.send(Kind.EXECUTE, 1, payload=payload)
        assert server.pool.count == 1
        assert open_files() == files + 2  # of the two mappings


@pytest.mark.pure("replaces the send of a channel")
@pytest.mark.parametrize("side", [0, 1])
def test_a_message_that_can_not_be_sent_gives_its_block_back(
    monkeypatch: pytest.MonkeyPatch, side: int
) -> None:
    with exchanges() as sides:
        source, target = sides[side], sides[1 - side]
        held = send(target, source, [large()])
        files = open_files()
        payload = source.pack([[large()]])

        def no_files(*arguments: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        del held  # to be given back with the message
        with monkeypatch.context() as patch:
            patch.setattr(source.channel, "send", no_files)
            with pytest.raises(OSError, match="Too many open files"):
                source.send(Kind.DONE, 0, payload=payload)
        assert (source.pool.lent, source.pool.count) == (0, 1)
        # And the block can still be used, though the other side has never seen it.
        (tensor,) = send(source, target, [large()])
        assert np.array_equal(tensor.numpy(), LARGE)
        assert target.pool.lent == 0
        del tensor
        tell(target, source)
        assert (source.pool.lent, source.pool.count) == (0, 1)
        assert open_files() == files + 2  # of the two mappings


def test_tensors_that_can_not_be_packed_leave_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Tensor):
        """As of a device that has failed."""

        __slots__ = ()

        @property
        def has_data(self) -> bool:
            raise OSError("the device is gone")

    with exchanges() as (server, _):
        broken = Broken("y", "FP32", (4,), bytes(16))
        for _ in range(3):
            with pytest.raises(OSError, match="the device is gone"):
                server.pack([[large(), broken]])
        assert (server.pool.lent, server.pool.count) == (0, 1)


@pytest.mark.process
def test_a_batch_that_can_not_be_encoded_fails_and_leaves_nothing(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path)) as running:
        pool = running.link.stream.pool
        for _ in range(3):
            bad, _ = request_of(IN=floats(100_000))
            bad.parameters = {"no": object()}  # type: ignore[dict-item]
            with pytest.raises(InternalError, match="not JSON serializable"):
                running.run(bad)
        assert pool.lent == 0
        assert running.link.table.open == {}
        assert (running.infer(IN=floats(100_000))["OUT"] == floats(100_000)).all()
        assert running.process.poll() is None


def test_a_payload_that_is_not_sent_is_given_back() -> None:
    with exchanges() as (server, _):
        payload = server.pack([[large()]])
        server.discard_payload(payload)
        server.discard_payload(payload)  # once is enough
        assert server.pool.lent == 0


def test_a_message_of_more_than_two_gigabytes() -> None:
    """Its block has 4 GB then; of its memory only the pages exist that are written."""
    size = 2**31 + 8
    with exchanges() as (server, host):
        block = server.pool.take_block(size)
        block.memory[size - 8 : size] = np.arange(8, dtype=np.uint8)
        payload = placed((("x", "UINT8", (size,)),), [Place(block.number, 0, size)])
        payload.block = block
        server.send(Kind.EXECUTE, 1, payload=payload)
        (tensor,) = host.receive().lists(1)[0]
        assert tensor.nbytes == size
        assert tensor.numpy()[-8:].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.process
def test_a_reply_that_can_not_be_encoded_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    class Odd(CalledServer):
        def submit(
            self, request: InferenceRequest, may_claim: bool = False, model: Any = None, parent: Any = None
        ) -> None:
            parameters: Any = {"no": object()}
            request.respond(InferenceResponse([large()], None, parameters), True)

    body = """
array = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()
request = pb_utils.InferenceRequest("", 0, [pb_utils.Tensor("IN", array)], ["OUT"], "other")
response = request.exec(decoupled=True)
return [pb_utils.InferenceResponse([], error=next(response).error())]
"""
    with worker(spec_of(tmp_path, source_of(body)), Odd()) as running:
        for _ in range(3):
            (response,) = running.run(request_of(IN=floats())[0])
            assert response is not None
            assert response.error is not None
            assert "not JSON serializable" in response.error.message
        assert running.link.stream.pool.lent == 0


@pytest.mark.process
def test_an_outcome_that_can_not_be_sent_fails_its_batch_only(tmp_path: Path) -> None:
    body = """
import gc
from conch.ipc.channel import PacketChannel
if requests[0].request_id() == "odd":
    channel = next(item for item in gc.get_objects() if isinstance(item, PacketChannel))
    def send(parts, fds=()):
        del channel.send
        raise OSError(24, "Too many open files")
    channel.send = send
array = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy() + 1
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])]
"""
    with worker(spec_of(tmp_path, source_of(body))) as running:
        for count in (4, 100_000):
            with pytest.raises(InternalError, match=r"responses can't be sent: .* Too many open files"):
                running.run(request_of("odd", IN=floats(count))[0])
            assert (running.infer(IN=floats(count))["OUT"] == floats(count) + 1).all()
        assert running.process.poll() is None


# --- a socket that does not take it ------------------------------------------------------------


@pytest.mark.parametrize("blocking", [False, True])
def test_a_socket_that_fails_ends_the_conversation(blocking: bool) -> None:
    """Readers on both sides get the error; else they would wait for what was lost."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, other = PacketChannel(ours, blocking), PacketChannel(theirs)
    try:
        fail_to_send(channel)
        with pytest.raises(ChannelClosedError, match="Too many references"):
            channel.send([b"message"])
        for side in (channel, other):
            with pytest.raises(ChannelClosedError):
                side.receive(bytearray(BUFFER_BYTES))
    finally:
        channel.close()
        other.close()


@pytest.mark.process
def test_a_batch_on_a_socket_that_fails_is_answered(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path)) as running:
        fail_to_send(running.link.channel)
        with pytest.raises(UnavailableError):
            running.run(request_of(IN=floats())[0])
        running.wait_lost()


def fill(channel: PacketChannel) -> None:
    """Sends until the rest has to wait."""
    for _ in range(10_000):
        channel.send([bytes(10_000)])
        if channel.flushing:
            return
    raise AssertionError("the other side takes everything")


def test_a_thread_that_can_not_be_started_ends_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, other = PacketChannel(ours, blocking=False), PacketChannel(theirs)

    def no_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_threads)
            with pytest.raises(ChannelClosedError, match="can't start new thread"):
                fill(channel)
        assert not channel.backlog_bytes
        with pytest.raises(ChannelClosedError):
            channel.receive(bytearray(BUFFER_BYTES))
    finally:
        channel.close()
        other.close()


def test_a_backlog_that_can_not_be_sent_ends_the_conversation() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, other = PacketChannel(ours, blocking=False), PacketChannel(theirs)
    try:
        fill(channel)
        fail_to_send(channel)
        with suppress(ChannelClosedError):  # it may have been noticed by now
            channel.send([b"one"])
            channel.send([b"more"])
        with pytest.raises(ChannelClosedError):
            while True:
                other.receive(bytearray(BUFFER_BYTES))
        eventually(lambda: not channel.flushing, "the thread that sends ends")
        with pytest.raises(ChannelClosedError):
            channel.send([b"message"])
    finally:
        channel.close()
        other.close()


@contextmanager
def pair() -> Iterator[tuple[PacketChannel, PacketChannel]]:
    """A server's side and a worker's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, other = PacketChannel(ours, blocking=False), PacketChannel(theirs)
    try:
        yield channel, other
    finally:
        channel.close()
        other.close()


def bound(monkeypatch: pytest.MonkeyPatch, most: int, patience_s: float) -> None:
    """Changes what may wait."""
    monkeypatch.setattr(channel_module, "MOST_WAITING", most)
    monkeypatch.setattr(channel_module, "ROOM", most // 10)
    monkeypatch.setattr(channel_module, "READ_TIMEOUT_S", patience_s)


def test_what_waits_for_a_side_that_does_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    bound(monkeypatch, 1_000_000, 0.05)
    with pair() as (channel, _):
        files = open_files()
        fill(channel)
        channel.send([encode(Kind.EXECUTE, 0, bytes(2_000_000))])  # one may be larger than all together
        assert channel.backlog_bytes > 2_000_000  # its file counts

        def given_up() -> bool:
            try:
                channel.send([b"one more"])
            except ChannelClosedError as error:
                return "it has read nothing for 0.05 s" in str(error)
            return False

        eventually(given_up, "the other side is given up")
        assert "it has read nothing" in channel.close_reason
        assert channel.backlog_bytes == 0
        with pytest.raises(ChannelClosedError):
            channel.receive(bytearray(BUFFER_BYTES))
        eventually(lambda: not channel.flushing, "the thread that sends ends")
        assert open_files() == files


def test_a_side_that_reads_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bound(monkeypatch, 100_000, 60)
    with pair() as (channel, other):
        for _ in range(200):
            channel.send([bytes(10_000)])
        assert channel.backlog_bytes > 100_000
        buffer = bytearray(BUFFER_BYTES)
        for _ in range(200):
            assert len(other.receive(buffer)[0]) == 10_000
        eventually(lambda: not channel.flushing, "the thread that sends ends")
        assert (channel.close_reason, channel.backlog_bytes) == ("", 0)


def waits(channel: PacketChannel) -> threading.Thread:
    """A thread that waits for room, as it would send more."""
    thread = threading.Thread(target=channel.wait_for_room)
    thread.start()
    eventually(lambda: channel.waiting_senders == 1, "it waits")
    return thread


def test_who_sends_much_waits_for_a_side_that_reads_late(monkeypatch: pytest.MonkeyPatch) -> None:
    bound(monkeypatch, 1_000_000, 60)
    with pair() as (channel, other):
        channel.wait_for_room()
        for _ in range(100):
            channel.send([bytes(10_000)])
        thread = waits(channel)
        buffer = bytearray(BUFFER_BYTES)
        for _ in range(100):
            other.receive(buffer)
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("end", ["close", "shut_down"])
def test_nobody_waits_for_room_in_what_is_closed(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    bound(monkeypatch, 1_000_000, 60)
    with pair() as (channel, _):
        for _ in range(100):
            channel.send([bytes(10_000)])
        thread = waits(channel)
        getattr(channel, end)()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_who_sends_much_does_not_hang_with_a_side_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bound(monkeypatch, 1_000_000, 0.05)
    with pair() as (channel, _):
        for _ in range(100):
            channel.send([bytes(10_000)])
        channel.wait_for_room()
        assert channel.backlog_bytes > 100_000
        assert channel.close_reason == ""


@pytest.mark.process
def test_a_worker_that_does_not_read_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound(monkeypatch, 100_000, 0.05)
    with worker(spec_of(tmp_path, source_of("time.sleep(100)"))) as running:
        begun = running.start(batch_of(request_of(IN=floats())[0]))
        os.kill(running.process.pid, signal.SIGSTOP)
        try:

            def lost() -> bool:
                running.link.notify(Kind.CREDIT, 0, bytes(12_000))
                return running.link.lost

            eventually(lost, "the worker is given up")
            assert "it has read nothing for 0.05 s" in running.wait_lost()
            with pytest.raises(UnavailableError, match="it has read nothing"):
                begun.result()
        finally:
            os.kill(running.process.pid, signal.SIGCONT)


@pytest.mark.process
def test_a_model_that_answers_faster_than_its_caller_reads_is_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue for the caller's worker stays small, and the worker is not given up."""
    bound(monkeypatch, 1_000_000, 60)
    most = 0

    class Many(CalledServer):
        thread: threading.Thread

        def submit(
            self, request: InferenceRequest, may_claim: bool = False, model: Any = None, parent: Any = None
        ) -> None:
            self.thread = threading.Thread(target=self.answer, args=(request,))
            self.thread.start()

        def answer(self, request: InferenceRequest) -> None:
            nonlocal most
            response = InferenceResponse([Tensor.from_array("OUT", floats(5000))])
            os.kill(running.process.pid, signal.SIGSTOP)
            for _ in range(300):
                request.respond(response, False)
                most = max(most, running.link.channel.backlog_bytes)
                request.wait_until_writable()
            request.respond(None, True)

    body = """
array = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()
request = pb_utils.InferenceRequest("", 0, [pb_utils.Tensor("IN", array)], ["OUT"], "other")
count = sum(bool(response.output_tensors()) for response in request.exec(decoupled=True))
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([count], np.float32))])]
"""
    server = Many()
    with worker(spec_of(tmp_path, source_of(body)), server) as running:
        begun = running.start(batch_of(request_of(IN=floats())[0]))
        try:
            channel = running.link.channel
            eventually(lambda: channel.waiting_senders or most > 1_000_000, "it has sent too much")
        finally:
            os.kill(running.process.pid, signal.SIGCONT)
        (response,) = begun.result()
        server.thread.join(WAIT_S)
    assert response is not None and response.outputs[0].numpy().tolist() == [300]
    assert 100_000 < most < 200_000


@pytest.mark.process
def test_a_worker_gets_a_batch_without_tensors_on_gpus_once(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path, source_of("threading.Event().wait()"))) as running:
        begun = running.start(batch_of(request_of(IN=floats())[0]))
        link, nothing = running.link, cast(ReceivedMessage, None)
        (number,) = running.link.table.batches
        link.devices = cast(ServerDevices, SimpleNamespace(lends=True))
        link.on_unreachable(number, nothing)
        assert not link.devices.lends
        link.on_unreachable(number, nothing)
        with pytest.raises(UnavailableError, match="the worker can't open further files"):
            begun.result()
        with pytest.raises(WireError, match="has not begun"):
            link.on_unreachable(number, nothing)
        os.kill(running.process.pid, signal.SIGKILL)
