"""Clients that change their minds by the hundred: one outcome for every request, and books that balance."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.support.calls import INFER, STREAM
from tests.support.core import Answers, make_model, make_request, make_spec
from tests.support.servers import WAIT_S, RawClient, eventually, write_model
from tritonclient.grpc import service_pb2

from conch.core.errors import ConchError, UnavailableError
from conch.core.model_statistics import StatisticsSnapshot
from conch.core.model_version import Model
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import Servable
from conch.core.spec import DynamicBatching, QueuePolicy
from conch.core.tensor import Tensor
from conch.frontends.grpc.grpc_options import GrpcOptions
from conch.server import InferenceServer
from conch.server_options import PartOptions
from conch_control.control_options import ControlOptions

MS = 1_000_000
UNARY = """
import random, time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(random.random() * 0.004)
        responses = []
        for request in requests:
            if random.random() < 0.1:
                error = pb_utils.TritonError("now and then")
                responses.append(pb_utils.InferenceResponse(error=error))
            else:
                out = pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())
                responses.append(pb_utils.InferenceResponse([out]))
        return responses
"""
GENERATING = """
import random, time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            out = pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())
            for _ in range(random.randrange(6)):
                if sender.is_cancelled():
                    break
                time.sleep(random.random() * 0.001)
                sender.send(pb_utils.InferenceResponse([out]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """
    backend: "python"
    max_batch_size: 8
    input {{ name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }}
    output {{ name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }}
    instance_group {{ count: 2 }}
    model_transaction_policy {{ decoupled: {decoupled} }}
    dynamic_batching {{
        preferred_batch_size: [ 6 ]
        max_queue_delay_microseconds: 3000
        default_queue_policy {{ default_timeout_microseconds: 30000 }}
    }}
"""
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,  # the model's own
    grpc.StatusCode.UNAVAILABLE,  # waited for too long
    grpc.StatusCode.UNIMPLEMENTED,  # a unary call to a decoupled model
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, grpc_is_warm: None) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_model(directory, "unary", CONFIG.format(decoupled="false"), {"model.py": UNARY})
    write_model(directory, "generating", CONFIG.format(decoupled="true"), {"model.py": GENERATING})
    with in_process(directory) as (_, raw):  # gRPC keeps what it opens for its first server
        assert raw("ServerLive", service_pb2.ServerLiveRequest()).live
    return directory


@contextmanager
def in_process(repository: Path) -> Iterator[tuple[InferenceServer, RawClient]]:
    """A server whose books can be looked into, and a client on a connection of its own."""
    control = ControlOptions(repositories=(repository,))
    server = InferenceServer(PartOptions(control=control, grpc=GrpcOptions(address="127.0.0.1", port=0)))
    server.start()
    try:
        with closing(RawClient(f"127.0.0.1:{server.port('gRPC')}")) as raw:
            yield server, raw
    finally:
        assert server.stop()


class Submissions:
    """Counts what is accepted by a model, and checks its books."""

    def __init__(self, model: Servable, patch: pytest.MonkeyPatch) -> None:
        self._model = model
        self._lock = threading.Lock()
        self.accepted = 0
        submit = Model.submit

        def counted(served: Model, request: InferenceRequest, may_claim: bool = False) -> Any:
            """As the model's, counted where it does not raise."""
            claim = submit(served, request, may_claim)
            if served is model:
                with self._lock:
                    self.accepted += 1
            return claim

        patch.setattr(Model, "submit", counted)

    def snapshot(self) -> StatisticsSnapshot:
        return self._model.statistics.snapshot()

    def balanced(self) -> StatisticsSnapshot | None:
        """The statistics once every accepted request is in them and none is left."""
        seen = self.snapshot()
        finished = seen.success.count + seen.fail.count == self.accepted
        return seen if finished and not (seen.pending or seen.running) else None


def failures(seen: StatisticsSnapshot) -> int:
    """Those that are accounted for by a reason."""
    return seen.failed_in_model + sum(seen.rejected.values()) + sum(seen.cancelled.values())


def cancelled(books: Submissions) -> int:
    return sum(books.snapshot().cancelled.values())


def infer_request(model: str, number: int) -> bytes:
    request = service_pb2.ModelInferRequest(
        model_name=model, id=str(number), raw_input_contents=[np.float32(number).tobytes()]
    )
    request.inputs.add(name="IN", datatype="FP32", shape=[1, 1])
    return bytes(request.SerializeToString())


@pytest.mark.parametrize("model", ["unary", "generating"])
def test_unary_calls(repository: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    outcomes: Counter[grpc.StatusCode] = Counter()
    with in_process(repository) as (server, raw):
        books = Submissions(server.core.model(model), monkeypatch)
        call = raw.channel.unary_unary(INFER)
        rounds = 0
        # A quick server may have answered, a slow one not yet seen, whatever is cancelled in a round.
        while rounds < 10 or (rounds < 500 and not cancelled(books)):
            rounds += 1
            futures = []
            for number in range(80):
                timeout = chance.choice([WAIT_S, WAIT_S, 0.01])
                futures.append(call.future(infer_request(model, number), timeout=timeout))
                if chance.random() < 0.3:
                    chance.choice(futures).cancel()
            for number, future in enumerate(futures):
                if chance.random() < 0.3:
                    chance.choice(futures[number:]).cancel()
                with suppress(grpc.FutureCancelledError):
                    future.exception(WAIT_S)
                code = future.code()
                outcomes[code] += 1
                if code is grpc.StatusCode.OK:
                    answer = service_pb2.ModelInferResponse.FromString(future.result())
                    assert (answer.id, answer.raw_output_contents[0]) == (
                        str(number),
                        np.float32(number).tobytes(),
                    )
        assert outcomes.keys() <= EXPECTED, outcomes
        assert outcomes.total() == 80 * rounds
        assert outcomes[grpc.StatusCode.OK] and outcomes[grpc.StatusCode.CANCELLED]
        seen = eventually(books.balanced, "the books balance")
        assert failures(seen) == seen.fail.count
        assert cancelled(books)
        # A client that has its answer is counted; one that has left meanwhile may be too.
        assert seen.success.count >= outcomes[grpc.StatusCode.OK]


@pytest.mark.parametrize("model", ["unary", "generating"])
def test_streams(repository: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is cancelled, left by its deadline, half-closed or read to the end."""
    finals: Counter[tuple[int, str]] = Counter()
    errors: list[BaseException] = []

    def use(raw: RawClient, stream: int) -> None:
        chance = random.Random(stream)
        requests = [infer_request(model, number) for number in range(30)]
        call = raw.channel.stream_stream(
            STREAM, response_deserializer=service_pb2.ModelStreamInferResponse.FromString
        )(iter(requests), timeout=chance.choice([WAIT_S, 0.05]))
        read = 0
        leaves = chance.choice([0, 1, 5, 20, 10**6])
        try:
            for message in call:
                if message.infer_response.parameters["triton_final_response"].bool_param:
                    finals[stream, message.infer_response.id] += 1
                read += 1
                if read > leaves:
                    call.cancel()
        except grpc.RpcError as error:
            if error.code() not in EXPECTED:
                errors.append(error)
        except BaseException as error:
            errors.append(error)

    with in_process(repository) as (server, raw):
        books = Submissions(server.core.model(model), monkeypatch)
        start = 0
        while start < 48 or (start < 1_600 and not cancelled(books)):
            threads = [threading.Thread(target=use, args=(raw, start + n)) for n in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(2 * WAIT_S)
            start += 16
        seen = eventually(books.balanced, "the books balance")
        assert errors == []
        assert all(count == 1 for count in finals.values()), "more than one end"
        assert failures(seen) == seen.fail.count
        assert cancelled(books)
        assert seen.success.count


def test_the_core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that submit and others that cancel, in no order; every request is answered once."""
    chance = random.Random(1)
    policies = (QueuePolicy(timeout_ns=3 * MS),)

    def work(batch: Batch) -> list[InferenceResponse | None]:
        time.sleep(0.0005)
        if chance.random() < 0.05:
            raise UnavailableError("now and then")
        return [InferenceResponse([Tensor("OUT", "FP32", (1,), b"1234")]) for _ in batch.requests]

    batching = DynamicBatching(max_queue_delay_ns=MS, preferred_sizes=(4,), policies=policies)
    model: Model = make_model(make_spec(8, batching=batching, instances=2), work)
    books = Submissions(model, monkeypatch)
    answers = Answers()
    submitted: list[InferenceRequest] = []
    refused = 0

    def submit() -> None:
        nonlocal refused
        for _ in range(600):
            request = make_request(answers, rows=1, received_ns=time.monotonic_ns())
            if random.random() < 0.2:
                request.deadline_ns = request.received_ns + 2 * MS
            try:
                model.submit(request)
            except ConchError:
                refused += 1
                continue
            submitted.append(request)

    def cancel(stop: threading.Event) -> None:
        while not stop.is_set():
            if submitted:
                model.cancel(random.choice(submitted[-40:]))
            time.sleep(0)

    stop = threading.Event()
    threads = [threading.Thread(target=submit) for _ in range(3)]
    cancelling = [threading.Thread(target=cancel, args=(stop,)) for _ in range(2)]
    for thread in (*threads, *cancelling):
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    stop.set()
    for thread in cancelling:
        thread.join(WAIT_S)
    assert model.close(WAIT_S)
    assert refused == 0
    assert books.accepted == len(submitted) == 1_800
    assert answers.finals == 1_800
    assert all(answers.finals_of(request) == 1 for request in submitted[::50])
    seen = books.balanced()
    assert seen is not None
    assert failures(seen) == seen.fail.count
    assert seen.cancelled["queued"]
