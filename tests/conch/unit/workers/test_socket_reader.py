"""Who begins a quick batch receives its outcome itself; nothing else changes."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.support.core import make_request, make_spec
from tests.support.servers import eventually
from tests.support.workers import Begun, Running, batch_of, model_spec, request_of, worker

from conch.core.backend import PENDING, BackendInstance, BackendModel, Done, Outcome, Pending
from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError, UnavailableError
from conch.core.execution.placement import Placement
from conch.core.model_version import Model
from conch.core.request import InferenceResponse
from conch.core.scheduling.scheduler import Batch, OutcomeWait
from conch.core.spec import ModelSpec, TensorSpec
from conch.workers.connection.outcome_handler import OutcomeHandler
from conch.workers.connection.socket_reader import SocketReader
from conch.workers.protocol.channel import ChannelClosedError, Kind, PacketChannel
from conch.workers.protocol.tensors import MessageStream, ReceivedMessage

LONG_NS = 10_000_000_000
SHORT_NS = 1_000_000
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


def test_a_thread_may_catch_up_with_what_has_arrived() -> None:
    ours, theirs = (PacketChannel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    stream = MessageStream(ours, in_worker=False)
    reader = SocketReader(ours, stream)
    worker_end = MessageStream(theirs, in_worker=True)
    seen: list[int] = []

    def handle(received: ReceivedMessage) -> None:
        seen.append(received.subject)

    for number in (1, 2):
        worker_end.send(Kind.METRIC, number)
    assert reader.claim()
    reader.catch_up(handle, 0.01)
    assert seen == [], "the thread that has claimed the socket reads"
    reader.release()
    reader.catch_up(handle, 10)
    reader.catch_up(handle, 10)
    assert seen == [1, 2]
    reader.close()
    for each in (stream, worker_end):
        each.close()
    for channel in (ours, theirs):
        channel.close()


def spec_of(directory: Path) -> ModelSpec:
    tensors = {"inputs": (TensorSpec("IN", "FP32", (-1,)),), "outputs": (TensorSpec("OUT", "FP32", (-1,)),)}
    return model_spec(directory, MODEL, **tensors)


class Noted(Begun):
    """A batch that notes on which thread it is done."""

    thread = 0

    def done(self, batch: Batch, outcome: Outcome) -> None:
        self.thread = threading.get_ident()
        super().done(batch, outcome)


def start_awaitable(running: Running, value: float, timeout_ns: int, count: int = 4) -> Noted:
    request, _ = request_of(f"of {value}", IN=np.full(count, value, np.float32))
    begun = Noted(batch_of(request))
    begun.batch.wait = wait = OutcomeWait()
    running.link.start(begun.batch, begun.done)
    if wait.reader is not None:
        wait.reader.wait(begun.batch, timeout_ns)
    return begun


@pytest.mark.parametrize("count", [1, 100_000])
@pytest.mark.process
def test_the_outcome_comes_on_the_thread_that_waits(tmp_path: Path, count: int) -> None:
    with worker(spec_of(tmp_path)) as running:

        def here() -> bool:
            begun = start_awaitable(running, -10, LONG_NS, count)
            (response,) = begun.result()
            assert response is not None
            assert np.array_equal(response.outputs[0].numpy(), np.full(count, -10, np.float32))
            return begun.thread == threading.get_ident()

        # Not if the link's thread is just seeing to something else.
        eventually(here, "the outcome comes here")
        eventually(here, "and again")


@pytest.mark.process
def test_what_takes_longer_comes_on_the_links_thread(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path)) as running:
        begun = start_awaitable(running, 0.2, SHORT_NS)
        assert begun.outcomes == []
        begun.result()
        assert begun.thread not in (0, threading.get_ident())

        def here() -> bool:
            begun = start_awaitable(running, 0, LONG_NS)
            begun.result()
            return begun.thread == threading.get_ident()

        eventually(here, "the next one comes here again")


@pytest.mark.process
def test_while_somebody_reads_the_next_one_does_not(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path)) as running, ThreadPoolExecutor(1) as pool:
        first = pool.submit(start_awaitable, running, 0.2, LONG_NS)
        eventually(lambda: bool(running.link.in_flight()), "the first batch begins")
        second = start_awaitable(running, 0, LONG_NS)
        second.result()
        first.result().result()
        assert second.thread not in (0, threading.get_ident())  # it was left to who reads


@pytest.mark.parametrize(("how", "says"), [(-1, "its process has ended"), (-2, "can't be understood")])
@pytest.mark.process
def test_a_worker_that_ends_meanwhile(tmp_path: Path, how: int, says: str) -> None:
    with worker(spec_of(tmp_path)) as running:
        begun = start_awaitable(running, how, LONG_NS)
        with pytest.raises(UnavailableError):
            begun.result()
        assert says in running.wait_lost()
        with pytest.raises(UnavailableError):
            start_awaitable(running, 0, LONG_NS).result()


@pytest.mark.process
def test_all_is_answered_before_a_worker_that_sends_nonsense_counts_as_lost(tmp_path: Path) -> None:
    """Also where the one who waits for a batch is the one who reads it."""
    events: list[str] = []
    with worker(spec_of(tmp_path)) as running:
        link = running.link
        told = link.on_lost

        def explain(reason: str) -> UnavailableError:
            events.append(
                f"explained on {threading.current_thread().name}, {len(link.in_flight())} in flight"
            )
            return UnavailableError("gone")

        def lost(reason: str) -> None:
            events.append("lost")
            told(reason)

        link.explain, link.on_lost = explain, lost
        request, _ = request_of(IN=np.full(4, -2, np.float32))
        begun = Begun(batch_of(request))

        def done(batch: Batch, outcome: Outcome) -> None:
            events.append("answered")
            begun.done(batch, outcome)

        eventually(link.socket_reader.claim, "the link's thread waits")
        link.socket_reader.release()
        begun.batch.wait = wait = OutcomeWait()
        link.start(begun.batch, done)
        assert wait.reader is not None
        wait.reader.wait(begun.batch, LONG_NS)
        with pytest.raises(UnavailableError, match="gone"):
            begun.result()
        assert "can't be understood" in running.wait_lost()
    assert events == ["explained on conch-m_0_0-reader, 1 in flight", "answered", "lost"]


@pytest.mark.process
def test_a_failure_of_the_server_while_somebody_else_reads_loses_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handler: OutcomeHandler, number: int, received: object) -> None:
        raise ValueError("a mistake of the server's")

    monkeypatch.setattr(OutcomeHandler, "done", fail)
    with worker(spec_of(tmp_path)) as running:
        begun = start_awaitable(running, 0, LONG_NS)
        with pytest.raises(UnavailableError, match="the server failed with what it had sent"):
            begun.result()
        assert running.wait_lost() == "the server failed with what it had sent"
    assert "a mistake of the server's" in caplog.text


@pytest.mark.process
def test_who_waits_leaves_what_a_lost_worker_had_to_the_links_thread(tmp_path: Path) -> None:
    """Who waits may be a client's thread; and what had been asked is known until it is answered."""
    with worker(spec_of(tmp_path)) as running:
        seen: list[tuple[int, int, list[str]]] = []
        link, begun = running.link, list[Noted]()

        def explain(reason: str) -> ConchError:
            time.sleep(0.2)  # waits for the end of the process
            ids = [one for each in link.in_flight() for one in each.request_ids]
            seen.append((threading.get_ident(), len(running.lost), ids))
            return UnavailableError(reason)

        link.explain = explain
        begun.append(start_awaitable(running, -2, LONG_NS))
        with pytest.raises(UnavailableError, match="can't be understood"):
            begun[0].result()
        running.wait_lost()
        ((thread, lost, ids),) = seen
        assert (lost, ids) == (0, ["of -2"])
        assert thread != threading.get_ident()
        assert begun[0].thread == thread


def test_a_link_that_is_closed_before_its_thread_reads() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        channel = PacketChannel(ours)
        turns = SocketReader(channel, MessageStream(channel, in_worker=False))
        turns.close()
        with pytest.raises(ChannelClosedError):
            turns.read(lambda received: None)
        assert not turns.claim()
        channel.close()


# --- when the runner waits ---------------------------------------------------------------------


class Waited(BackendInstance):
    """Does its batches at once, and notes whether it might have taken its time."""

    blocks = False

    def __init__(self) -> None:
        self.computed_ns = 1000
        self.waits: list[int] = []

    def start(self, batch: Batch, done: Done) -> Pending:
        self.waits.append(int(batch.wait is not None))
        batch.compute_input_end_ns = monotonic_ns()
        batch.compute_output_start_ns = batch.compute_input_end_ns + self.computed_ns
        done(batch, [InferenceResponse([]) for _ in batch.requests])
        return PENDING


class WaitedModel(BackendModel):
    def __init__(self) -> None:
        self.instance = Waited()

    def create_instance(self, placement: Placement) -> BackendInstance:
        return self.instance


def test_only_those_who_lead_wait_and_only_for_quick_models() -> None:
    loaded = WaitedModel()
    model = Model.create(make_spec(), loaded)
    instance = loaded.instance

    def run_inline() -> bool:
        runner = model.submit(make_request(), may_claim=True)
        assert runner is not None
        runner.run_inline(1_000_000)
        return instance.waits[-1] > 0

    try:
        assert not run_inline()  # nobody knows yet how long it takes
        assert run_inline()
        model.submit(make_request())
        assert instance.waits[-1] == 0
        runner = model.submit(make_request(), may_claim=True)
        assert runner is not None
        runner.release()
        assert instance.waits[-1] == 0
        instance.computed_ns = 100_000_000
        assert run_inline()
        assert not run_inline()
    finally:
        assert model.close(10)


def test_nobody_who_leads_waits_for_a_decoupled_model() -> None:
    """What it answers may have to wait for a client to read, and those who lead send to that client."""
    loaded = WaitedModel()
    model = Model.create(make_spec(decoupled=True), loaded)
    try:
        for _ in range(3):
            runner = model.submit(make_request(), may_claim=True)
            assert runner is not None
            runner.run_inline(1_000_000)
        assert loaded.instance.waits == [0, 0, 0]
    finally:
        assert model.close(10)
