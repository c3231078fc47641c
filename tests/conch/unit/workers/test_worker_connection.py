"""Batches that go over a server's link to real worker processes and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conch.unit.workers.models import SOURCE, floats, source_of, spec_of
from tests.support.workers import batch_of, request_of, worker

from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError, InternalError, NotFoundError, UnsupportedError
from conch.core.scheduling.sequence.controls import FillerRequest
from conch.core.spec import SequenceBatching, TensorSpec
from conch.core.tensor import Tensor
from conch.ipc.tensors import ReturnedTensor

pytestmark = pytest.mark.process


@pytest.mark.parametrize("count", [0, 4, 8 * 1024, 8 * 1024 + 1, 1_000_000])
def test_tensors_of_all_sizes_go_there_and_come_back(tmp_path: Path, count: int) -> None:
    with worker(spec_of(tmp_path)) as running:
        for _ in range(3):
            assert (running.infer(IN=floats(count))["OUT"] == floats(count)).all()
        stream = running.link.stream
        # Its inputs are its outputs: they stay in the block that they came in.
        assert 0 <= stream.pool.count - (4 * count > 32 * 1024) <= 1
        assert stream.mappings.count == 0


def test_many_requests_in_one_batch(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path)) as running:
        requests = [request_of(IN=floats(number))[0] for number in range(1, 1500)]
        responses = running.run(*requests)
        for number, response in enumerate(responses, 1):
            assert response is not None
            assert (response.outputs[0].numpy() == floats(number)).all()


def test_everything_about_a_request_is_there(tmp_path: Path) -> None:
    body = """
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([json.dumps([
    r.request_id(), r.correlation_id(), r.flags(), r.timeout(), r.parameters(),
    sorted(r.requested_output_names()), r.is_cancelled()])], np.object_))],
    parameters={"b": True, "i": 1, "s": "é"}) for r in requests]
"""
    with worker(spec_of(tmp_path, source_of(body))) as running:
        plain, _ = request_of(IN=floats())
        full, _ = request_of("é\ud800", IN=floats())
        full.correlation_id = "seq"
        full.sequence_start = full.sequence_end = True
        full.timeout_us = 7
        full.parameters = {"a": True, "b": 1, "c": 1.5, "d": "x"}
        full.requested = ("OUT", "OTHER")
        full.deadline_ns = monotonic_ns() + 10**12
        late, _ = request_of(IN=floats())
        late.deadline_ns = monotonic_ns() - 1
        late.correlation_id = 2**64 - 1
        gone, _ = request_of(IN=floats())
        gone.cancelled = True
        responses = running.run(plain, full, late, gone)
    import json

    texts = [json.loads(response.outputs[0].numpy()[0]) for response in responses if response is not None]
    assert texts[0] == ["", 0, 0, 0, "{}", ["OUT"], False]
    assert texts[1] == [
        *("é\ud800", "seq", 3, 7, '{"a":true,"b":1,"c":1.5,"d":"x"}', ["OTHER", "OUT"], False),
    ]
    assert texts[2][1] == 2**64 - 1
    assert (texts[2][6], texts[3][6]) == (True, True)
    assert responses[0] is not None
    assert responses[0].parameters == {"b": True, "i": 1, "s": "é"}


def test_a_filler_is_one_and_is_not_answered(tmp_path: Path) -> None:
    body = """
assert [len(requests), [r.get_response_sender() is not None for r in requests]] == [2, [True, True]]
return [None if n == 1 else pb_utils.InferenceResponse([self.one(r)]) for n, r in enumerate(requests)]
"""
    spec = spec_of(
        tmp_path, source_of(body, SOURCE[SOURCE.index("    def one") :]), sequence=SequenceBatching()
    )
    with worker(spec) as running:
        request, answers = request_of(IN=floats())
        batch = batch_of(request, FillerRequest(request, dict(request.inputs)))
        batch.fillers = 1
        # The first has a sender, so what is returned for it is sent by that.
        assert running.start(batch).result() == [None, None]
        assert answers.wait(1)
        assert running.link.table.open == {}


def test_times_and_copies_come_back(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path)) as running:
        request, _ = request_of(IN=floats(100_000))
        batch = batch_of(request)
        before = monotonic_ns()
        running.start(batch).result()
        assert before <= batch.compute_input_end_ns <= batch.compute_output_start_ns <= monotonic_ns()
        # One copy there; what comes back is the input.
        assert 400_000 <= batch.bytes_copied <= 400_200
    new = source_of(
        "return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', self.two(requests[0]))])]"
    ) + (
        "    def two(self, request):\n"
        "        return 2 * pb_utils.get_input_tensor_by_name(request, 'IN').as_numpy()\n"
    )
    with worker(spec_of(tmp_path, new)) as running:
        batch = batch_of(request_of(IN=floats(100_000))[0])
        running.start(batch).result()
        assert 800_000 <= batch.bytes_copied <= 800_200  # one copy there, and one back


def test_a_response_that_waits_is_not_changed_by_a_model_that_keeps_its_inputs(tmp_path: Path) -> None:
    body = """
array = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()
self.kept = getattr(self, "kept", [])
self.kept.append(array)
for one in self.kept:
    one += 1
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])]
"""
    with worker(spec_of(tmp_path, source_of(body))) as running:
        responses: list[Any] = []
        for _ in range(2):
            request, _ = request_of(IN=floats(100_000))
            request.responses_wait = True
            responses += running.run(request)
        assert all((one.outputs[0].numpy() == floats(100_000) + 1).all() for one in responses if one)
        assert None not in responses


@pytest.mark.parametrize("decoupled", [False, True])
def test_an_input_that_a_sender_sends_is_what_it_was_then(tmp_path: Path, decoupled: bool) -> None:
    body = """
for request in requests:
    tensor = request.inputs()[0]
    request.get_response_sender().send(pb_utils.InferenceResponse([tensor]))
    tensor.as_numpy()[:] = 666
    if self.decoupled:
        request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    source = source_of(body, f"    decoupled = {decoupled}")
    spec = spec_of(tmp_path, source, outputs=(TensorSpec("IN", "FP32", (-1,)),), decoupled=decoupled)
    with worker(spec) as running:
        request, answers = request_of(IN=floats(100_000))
        request.responses_wait = True
        running.run(request)
        assert answers.wait(1)
    (_, response, _), *_ = answers.calls
    assert response is not None and (response.outputs[0].numpy() == floats(100_000)).all()


def test_a_response_that_can_not_be_copied_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(self: Tensor, name: str) -> Tensor:
        raise MemoryError("no memory")

    with worker(spec_of(tmp_path)) as running:
        waits, _ = request_of(IN=floats(100_000))
        waits.responses_wait = True
        monkeypatch.setattr(ReturnedTensor, "detached", no_memory)
        failed, answered = running.run(waits, request_of(IN=floats(50_000))[0])
        assert failed is not None and failed.error is not None and "no memory" in failed.error.message
        assert answered is not None and (answered.outputs[0].numpy() == floats(50_000)).all()
        assert not running.link.lost


@pytest.mark.parametrize("odd", ["", "shape", "datatype", "cancelled", "requested"])
def test_batches_whose_requests_are_alike_but_for_one(tmp_path: Path, odd: str) -> None:
    body = """
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([repr([
    r.request_id(), sorted(r.requested_output_names()), r.is_cancelled(),
    [t.as_numpy().tolist() for t in r.inputs()]
    ])], np.object_))]) for r in requests]
"""
    requests = []
    for number in range(4):
        array = np.array([[number], [7]], np.int32)
        request, _ = request_of(f"é{number}" if number % 2 else "", IN=floats(1) + number, MORE=array)
        request.requested = ("OUT",)
        requests.append(request)
    one = requests[2]
    if odd == "shape":
        one.inputs["IN"] = Tensor.from_array("IN", floats(2))
    elif odd == "datatype":
        one.inputs["MORE"] = Tensor.from_array("MORE", np.array([b"x", b"yy"], np.object_))
    elif odd == "cancelled":
        one.cancelled = True
    elif odd == "requested":
        one.requested = None
    with worker(spec_of(tmp_path, source_of(body))) as running:
        responses = running.run(*requests)
    for response, request in zip(responses, requests, strict=True):
        assert response is not None
        values = [tensor.numpy().tolist() for tensor in request.inputs.values()]
        seen = [request.id, ["OUT"], request.cancelled, values]
        assert response.outputs[0].numpy()[0].decode() == repr(seen)


def test_a_model_that_keeps_an_input_keeps_its_memory_and_no_other(tmp_path: Path) -> None:
    body = """
array = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()
if not hasattr(self, "kept"):
    self.kept = array[:2]
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.kept)])]
"""
    with worker(spec_of(tmp_path, source_of(body))) as running:
        assert running.infer(IN=floats(100_000) + 5)["OUT"].tolist() == [5, 6]
        for number in range(5):
            assert running.infer(IN=floats(100_000) + number)["OUT"].tolist() == [5, 6]
        assert running.link.stream.pool.lent == 1
        assert running.link.stream.pool.count == 2


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        ('pb_utils.TritonError("no é", pb_utils.TritonError.NOT_FOUND)', NotFoundError, "no é"),
        ('pb_utils.TritonError("no", pb_utils.TritonError.UNSUPPORTED)', UnsupportedError, "no"),
        ('pb_utils.TritonError("no")', InternalError, "no"),
    ],
)
def test_errors_of_requests_keep_their_code(
    tmp_path: Path, raised: str, kind: type[ConchError], text: str
) -> None:
    body = f"""
return [pb_utils.InferenceResponse([], error={raised}), pb_utils.InferenceResponse([self.one(requests[1])])]
"""
    source = source_of(body, SOURCE[SOURCE.index("    def one") :])
    with worker(spec_of(tmp_path, source)) as running:
        failed, fine = running.run(request_of(IN=floats())[0], request_of(IN=floats())[0])
    assert failed is not None and type(failed.error) is kind and failed.error.message == text
    assert fine is not None and fine.error is None


@pytest.mark.parametrize("error", ["ValueError('bad é')", "SystemExit(3)", "KeyboardInterrupt()"])
def test_what_execute_raises_fails_the_batch_with_the_models_frames(tmp_path: Path, error: str) -> None:
    with worker(spec_of(tmp_path, source_of(f"raise {error}"))) as running:
        for _ in range(2):  # and the worker goes on
            with pytest.raises(InternalError, match=r"model\.py\(\d+\): execute") as raised:
                running.run(request_of(IN=floats())[0])
            assert error.partition("(")[0] in raised.value.message
        assert running.link.table.open == {}


def test_async_models_run_as_they_do_in_process(tmp_path: Path) -> None:
    source = SOURCE.replace("    def execute", "    async def execute")
    with worker(spec_of(tmp_path, source)) as running:
        assert running.infer(IN=floats())["OUT"].tolist() == [0, 1, 2, 3]


def test_a_deadline_that_no_clock_will_reach_is_none(tmp_path: Path) -> None:
    """As clients send it that want to say "never"."""
    body = """
cancelled = [np.float32([request.is_cancelled()]) for request in requests]
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in cancelled]
"""
    with worker(spec_of(tmp_path, source_of(body))) as running:
        far, _ = request_of(IN=floats())
        far.deadline_ns = monotonic_ns() + 2562048 * 3600 * 10**9
        other, _ = request_of(IN=floats())
        for response in running.run(far, other):
            assert response is not None
            assert response.error is None
            assert response.outputs[0].numpy().tolist() == [0]


@pytest.mark.parametrize("dim", [2**60, 2**61 - 1])
def test_an_empty_tensor_may_have_any_dimensions_that_an_array_may_have(tmp_path: Path, dim: int) -> None:
    with worker(spec_of(tmp_path, dims=(-1, -1))) as running:
        request, _ = request_of(IN=floats())
        request.inputs["IN"] = Tensor("IN", "FP32", (0, dim), b"")
        (response,) = running.run(request)
        assert response is not None
        assert response.error is None, response.error
        assert response.outputs[0].shape == (0, dim)


def test_a_tensor_that_the_worker_would_not_take_fails_its_batch_only(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path, dims=(-1, -1))) as running:
        request, _ = request_of(IN=floats())
        request.inputs["IN"] = Tensor("IN", "FP32", (0, 2**63), b"")
        with pytest.raises(InternalError, match=r"tensor 'IN' can't be sent: FP32 of shape \[0, 9223372036"):
            running.run(request)
        assert (running.infer(IN=floats().reshape(1, 4))["OUT"] == floats()).all()
        assert running.process.poll() is None
