"""Sockets of workers on the I/O loop: what is read there, what leaves it, and that it serves the others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.support.core import WAIT_S
from tests.support.servers import eventually
from tests.support.workers import Begun, Running, batch_of, model_spec, request_of, worker

from conch.core.backend import BatchOutcome
from conch.core.errors import ConchError, UnavailableError
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import ModelSpec, TensorSpec
from conch.ipc.channel import ChannelClosedError, Kind, PacketChannel, WireError
from conch.ipc.loop import SharedLoop
from conch.ipc.tensors import MessageStream, ReceivedMessage
from conch.workers.connection.outcome_handler import OutcomeHandler
from conch.workers.connection.socket_reader import SocketReader

MODEL = """
import os, socket, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if values[0] > 0:
                time.sleep(float(values[0]))
            if values[0] == -1:
                os._exit(3)
            if values[0] == -2:
                for fd in os.listdir("/proc/self/fd"):
                    try:
                        if "socket" in os.readlink(f"/proc/self/fd/{fd}"):
                            socket.socket(fileno=os.dup(int(fd))).send(b"garbage" * 100)
                    except OSError:
                        pass
                time.sleep(100)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)]))
        return responses
"""


class Ends:
    """A reader, the other end of its socket, and what becomes of it."""

    def __init__(self, loop: SharedLoop, handle: Callable[[ReceivedMessage], None]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel, self.theirs = PacketChannel(ours, blocking=False), PacketChannel(theirs)
        self.stream = MessageStream(self.channel, in_worker=False)
        self.worker = MessageStream(self.theirs, in_worker=True)
        self.errors: list[BaseException] = []
        self.reader = SocketReader(self.stream, loop, handle, self.errors.append)

    def close(self) -> None:
        self.channel.shut_down()
        eventually(lambda: self.errors, "reading ends")
        self.reader.close()
        for stream in (self.stream, self.worker):
            stream.close()
        for channel in (self.channel, self.theirs):
            channel.close()


@contextmanager
def ends(loop: SharedLoop, handle: Callable[[ReceivedMessage], None]) -> Iterator[Ends]:
    """A reader that has started, closed afterwards."""
    made = Ends(loop, handle)
    made.reader.start()
    try:
        yield made
    finally:
        made.close()


def test_catching_up_waits_for_all_that_had_been_sent() -> None:
    loop, seen, go = SharedLoop(), list[int](), threading.Event()

    def handle(received: ReceivedMessage) -> None:
        assert go.wait(WAIT_S)
        seen.append(received.subject)

    with ends(loop, handle) as made:
        for number in range(200):
            made.worker.send(Kind.METRIC, number)
        made.reader.catch_up(0.01)
        assert seen == [], "it gives up"
        go.set()
        made.reader.catch_up(WAIT_S)
        assert seen == list(range(200))
        made.reader.catch_up(WAIT_S)
    made.reader.catch_up(WAIT_S)  # of a closed one, it does nothing


def test_a_worker_that_sends_without_end_does_not_stop_the_others() -> None:
    loop, other = SharedLoop(), list[int]()
    answered = threading.Event()

    def answer(received: ReceivedMessage) -> None:
        if not answered.is_set():  # each message is followed by the next
            talker.worker.send(Kind.METRIC, received.subject + 1)

    def handle(received: ReceivedMessage) -> None:
        other.append(received.subject)
        answered.set()

    with ends(loop, answer) as talker, ends(loop, handle) as quiet:
        talker.worker.send(Kind.METRIC, 0)
        catching_up = threading.Thread(target=talker.reader.catch_up, args=(WAIT_S,))
        catching_up.start()
        quiet.worker.send(Kind.METRIC, 7)
        assert answered.wait(WAIT_S)
        catching_up.join(WAIT_S)
    assert other == [7]


def test_reading_ends_once_whatever_fails() -> None:
    loop = SharedLoop()

    def fail(received: ReceivedMessage) -> None:
        raise ValueError("a mistake of the server's")

    def ignore(received: ReceivedMessage) -> None:
        pass

    with ends(loop, fail) as failing, ends(loop, ignore) as wrong, ends(loop, ignore) as closed:
        for number in range(3):
            failing.worker.send(Kind.METRIC, number)
        for _ in range(3):
            wrong.theirs.send([b"nonsense"])
        closed.theirs.shut_down()
        eventually(lambda: failing.errors and wrong.errors and closed.errors, "reading ends")
        failing.reader.catch_up(WAIT_S)
    kinds = [[type(error) for error in each.errors] for each in (failing, wrong, closed)]
    assert kinds == [[ValueError], [WireError], [ChannelClosedError]]


def test_a_reader_without_a_socket_does_not_hold_the_loop() -> None:
    loop = SharedLoop()
    made = Ends(loop, lambda received: None)
    for channel in (made.channel, made.theirs):
        channel.close()
    with pytest.raises(OSError):
        made.reader.start()
    made.reader.close()
    for stream in (made.stream, made.worker):
        stream.close()
    held = loop.hold()
    loop.release()
    with pytest.raises(RuntimeError, match="stopped"):
        held.start()  # no one else held it


def spec_of(directory: Path) -> ModelSpec:
    tensors = {"inputs": (TensorSpec("IN", "FP32", (-1,)),), "outputs": (TensorSpec("OUT", "FP32", (-1,)),)}
    return model_spec(directory, MODEL, **tensors)


class Noted(Begun):
    """A batch that notes on which thread it is done."""

    thread = ""

    def done(self, batch: Batch, outcome: BatchOutcome) -> None:
        self.thread = threading.current_thread().name
        super().done(batch, outcome)


def start(running: Running, value: float, count: int = 4) -> Noted:
    request, _ = request_of(f"of {value}", IN=np.full(count, value, np.float32))
    begun = Noted(batch_of(request))
    running.link.start(begun.batch, begun.done)
    return begun


@pytest.mark.parametrize("count", [1, 100_000])
@pytest.mark.process
def test_outcomes_come_on_the_loop(tmp_path: Path, count: int) -> None:
    with worker(spec_of(tmp_path)) as running:
        begun = start(running, -10, count)
        (response,) = begun.result()
        assert response is not None
        assert np.array_equal(response.outputs[0].numpy(), np.full(count, -10, np.float32))
        assert begun.thread == "conch-io"


@pytest.mark.parametrize(("how", "says"), [(-1, "its process has ended"), (-2, "can't be understood")])
@pytest.mark.process
def test_a_worker_that_ends(tmp_path: Path, how: int, says: str) -> None:
    with worker(spec_of(tmp_path)) as running:
        with pytest.raises(UnavailableError):
            start(running, how).result()
        assert says in running.wait_lost()
        with pytest.raises(UnavailableError):
            start(running, 0).result()


@pytest.mark.process
def test_all_is_answered_before_a_worker_counts_as_lost_and_others_are_served_meanwhile(
    tmp_path: Path,
) -> None:
    events: list[str] = []
    go = threading.Event()
    with worker(spec_of(tmp_path)) as running, worker(spec_of(tmp_path)) as other:
        link = running.link
        told = link.on_lost

        def explain(reason: str) -> ConchError:  # waits for the end of the process
            ids = [one for each in link.in_flight() for one in each.request_ids]
            events.append(f"explained on {threading.current_thread().name}, {ids} in flight")
            assert go.wait(WAIT_S)
            return UnavailableError("gone")

        def lost(reason: str) -> None:
            events.append("lost")
            told(reason)

        link.explain, link.on_lost = explain, lost
        request, _ = request_of("a request", IN=np.full(4, -2, np.float32))
        begun = Begun(batch_of(request))

        def done(batch: Batch, outcome: BatchOutcome) -> None:
            events.append("answered")
            begun.done(batch, outcome)

        link.start(begun.batch, done)
        eventually(lambda: events, "it is explained")
        start(other, 0).result()
        assert begun.outcomes == []
        go.set()
        with pytest.raises(UnavailableError, match="gone"):
            begun.result()
        assert "can't be understood" in running.wait_lost()
    assert events == ["explained on conch-m_0_0-blocking, ['a request'] in flight", "answered", "lost"]


@pytest.mark.process
def test_a_failure_of_the_server_loses_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handler: OutcomeHandler, number: int, received: object) -> None:
        raise ValueError("a mistake of the server's")

    monkeypatch.setattr(OutcomeHandler, "done", fail)
    with worker(spec_of(tmp_path)) as running:
        begun = start(running, 0)
        with pytest.raises(UnavailableError, match="the server failed with what it had sent"):
            begun.result()
        assert running.wait_lost() == "the server failed with what it had sent"
    assert "a mistake of the server's" in caplog.text


@pytest.mark.process
def test_a_worker_that_is_closed_on_the_loop_is_not_waited_for(tmp_path: Path) -> None:
    closed: list[bool] = []
    with worker(spec_of(tmp_path)) as running:
        request, _ = request_of(IN=np.zeros(4, np.float32))
        begun = Begun(batch_of(request))

        def done(batch: Batch, outcome: BatchOutcome) -> None:
            closed.append(running.link.close(WAIT_S))
            begun.done(batch, outcome)

        running.link.start(begun.batch, done)
        begun.result()
    assert closed == [False]
