"""Warm-up: which requests reach an instance, and what becomes of their answers."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.support.core import Instance, LoadedModel, make_request, make_spec

from conch.core.errors import CancelledError, InternalError, InvalidArgumentError, UnavailableError
from conch.core.model_control import cancellable_load
from conch.core.model_version import Model
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import DynamicBatching, ModelSpec, TensorSpec, WarmupInput, WarmupSample
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, Tensor

IN = WarmupInput("IN", "FP32", (16,))
SAMPLE = WarmupSample("w", (IN,))


def nothing(batch: Batch) -> list[InferenceResponse | None]:
    return [InferenceResponse([]) for _ in batch.requests]


def warm_up(spec: ModelSpec, *samples: WarmupSample, execute: Any = nothing) -> LoadedModel:
    """Makes a model and closes it again; what its instances were given stays with them."""
    loaded = LoadedModel(execute)
    model = Model.create(spec, loaded, warmup=samples)
    counted = model.statistics.snapshot()
    assert (counted.inference_count, counted.execution_count, counted.last_inference_ms) == (0, 0, 0)
    assert (counted.success.count, counted.fail.count, counted.batches) == (0, 0, {})
    assert model.pending == 0
    assert model.close()
    return loaded


def failure(spec: ModelSpec, *samples: WarmupSample, execute: Any = nothing) -> str:
    """The text a load fails with; everything that was made must be closed then."""
    loaded = LoadedModel(execute)
    with pytest.raises(InvalidArgumentError) as raised:
        Model.create(spec, loaded, warmup=samples)
    assert all(instance.closed == 1 for instance in loaded.instances)
    assert loaded.closed == 1
    return raised.value.message


def given_inputs(datatype: str, dims: tuple[int, ...], source: Any, data: bytes = b"") -> Sequence[Tensor]:
    """Inputs of the requests of one sample: two of them, run twice."""
    loaded = warm_up(
        make_spec(2, (TensorSpec("X", datatype, dims),)),
        WarmupSample("w", (WarmupInput("X", datatype, dims, source, data),), 2, 2),
    )
    return [request.inputs["X"] for batch in loaded.instances[0].batches for request in batch]


def test_batch_size_is_requests_and_count_is_executions() -> None:
    loaded = warm_up(make_spec(4), WarmupSample("w", (IN,), 3, 2), WarmupSample("v", (IN,), 1, 1))
    (instance,) = loaded.instances
    assert [len(batch) for batch in instance.batches] == [3, 3, 1]
    requests = [request for batch in instance.batches for request in batch]
    assert len({id(request) for request in requests}) == 7
    assert {request.inputs["IN"].shape for request in requests} == {(1, 16)}
    assert {request.batch_size for request in requests} == {1}
    assert {(request.model_name, request.model_version) for request in requests} == {("m", "1")}


def test_every_instance_is_warmed_before_the_next_is_made() -> None:
    made: list[int] = []

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        made.append(len(loaded.instances))
        return nothing(batch)

    loaded = LoadedModel(execute)
    model = Model.create(make_spec(instances=3), loaded, warmup=[SAMPLE])
    assert made == [1, 2, 3]
    assert [len(instance.batches) for instance in loaded.instances] == [1, 1, 1]
    assert model.close()


def test_no_scheduler_takes_part() -> None:
    hour = 3_600_000_000_000
    loaded = warm_up(make_spec(8, batching=DynamicBatching((8,), hour)), SAMPLE)
    assert [len(batch) for batch in loaded.instances[0].batches] == [1]


def test_without_a_batch_dimension_dims_are_the_shape() -> None:
    loaded = warm_up(make_spec(), SAMPLE)
    assert loaded.instances[0].batches[0][0].inputs["IN"].shape == (16,)


@pytest.mark.parametrize("datatype", sorted(ELEMENT_SIZES))
def test_zeros(datatype: str) -> None:
    tensors = given_inputs(datatype, (2, 3), "ZERO")
    assert len(tensors) == 4
    for tensor in tensors:
        assert (tensor.shape, bytes(tensor.data)) == ((1, 2, 3), bytes(6 * ELEMENT_SIZES[datatype]))


@pytest.mark.parametrize("datatype", sorted(NUMPY_DTYPES.keys() - {"BYTES"}))
def test_random_numbers(datatype: str) -> None:
    first, *others = (tensor.numpy() for tensor in given_inputs(datatype, (64,), "RANDOM"))
    assert first.dtype == NUMPY_DTYPES[datatype]
    assert len(np.unique(first)) > 1
    if datatype == "BOOL":
        assert set(first.view(np.uint8).ravel()) == {0, 1}
    elif datatype.startswith("FP"):
        assert ((first >= 0) & (first <= 1)).all()
    for other in (*others, given_inputs(datatype, (64,), "RANDOM")[0].numpy()):
        np.testing.assert_array_equal(first, other)


def test_random_bf16() -> None:
    (tensor, *_) = given_inputs("BF16", (64,), "RANDOM")
    wide = (np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16).view(np.float32)
    assert ((wide >= 0) & (wide < 1)).all()
    assert len(np.unique(wide)) > 1


@pytest.mark.parametrize("source", ["ZERO", "RANDOM"])
def test_strings_are_empty(source: str) -> None:
    for tensor in given_inputs("BYTES", (3,), source):
        assert tensor.numpy().tolist() == [[b"", b"", b""]]


def test_file_data_is_taken_as_it_is() -> None:
    data = b"\x02\0\0\0ab\0\0\0\0"
    for tensor in given_inputs("BYTES", (2,), "FILE", data):
        assert tensor.numpy().tolist() == [[b"ab", b""]]
    for tensor in given_inputs("UINT16", (2,), "FILE", b"\1\0\2\0"):
        assert tensor.numpy().tolist() == [[1, 2]]


def test_reshape_reaches_the_instance_in_every_run() -> None:
    inputs = (TensorSpec("X", "UINT8", (2, 2), reshape=(4,)),)
    sample = WarmupSample("w", (WarmupInput("X", "UINT8", (2, 2)),), 2, 2)
    loaded = warm_up(make_spec(2, inputs), sample)
    shapes = [request.inputs["X"].shape for batch in loaded.instances[0].batches for request in batch]
    assert shapes == [(1, 4)] * 4


def test_optional_inputs_may_be_left_out() -> None:
    inputs = (TensorSpec("IN", "FP32", (-1,)), TensorSpec("MORE", "FP32", (1,), optional=True))
    loaded = warm_up(make_spec(1, inputs), SAMPLE)
    assert list(loaded.instances[0].batches[0][0].inputs) == ["IN"]


@pytest.mark.parametrize(
    ("max_batch_size", "sample", "message"),
    [
        (4, WarmupSample("w", (IN, WarmupInput("NO", "FP32", (1,)))), "unexpected inference input 'NO' for"),
        (4, WarmupSample("w", ()), "expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], but "),
        (4, WarmupSample("w", ()), "missing required input(s) ['IN']"),
        (
            4,
            WarmupSample("w", (WarmupInput("IN", "FP64", (16,)),)),
            "inference input 'IN' data-type is 'FP64'",
        ),
        (
            4,
            WarmupSample("w", (WarmupInput("IN", "FP32", (8,)),)),
            "unexpected shape for input 'IN' for model",
        ),
        (
            4,
            WarmupSample("w", (WarmupInput("IN", "FP32", (16,), "FILE", b"1234"),)),
            "[request id: <id_unknown>] input byte size mismatch for input 'IN' for model 'm'. Expected 64, "
            "got 4",
        ),
        (4, WarmupSample("w", (IN,), 5), "batch size 5 for 'm', max allowed is 4"),
        (0, WarmupSample("w", (IN,), 2**32 - 1), "batch size 4294967295 for 'm', max allowed is 0"),
        (
            4,
            WarmupSample("w", (WarmupInput("IN", "FP32", (2**62,)),)),
            "input 'IN' with dims [4611686018427387904] does not fit into memory",
        ),
        (
            4,
            WarmupSample("w", (WarmupInput("IN", "FP32", (2**62,), "RANDOM"),)),
            "input 'IN' with dims [4611686018427387904] does not fit into memory",
        ),
    ],
)
def test_samples_that_do_not_fit_the_model(max_batch_size: int, sample: WarmupSample, message: str) -> None:
    text = failure(make_spec(max_batch_size), SAMPLE, sample)
    assert text.startswith("warmup sample 'w': ")
    assert message in text
    assert "request id: 0" not in text


def test_strings_of_a_file_that_do_not_fill_the_dims() -> None:
    spec = make_spec(0, (TensorSpec("X", "BYTES", (2,)),))
    sample = WarmupSample("w", (WarmupInput("X", "BYTES", (2,), "FILE", bytes(4)),))
    assert failure(spec, sample) == (
        "warmup sample 'w': expected 2 string elements for inference input 'X' for model 'm', got 1"
    )


def test_an_error_response_fails_the_load() -> None:
    runs: list[int] = []

    def second_fails(batch: Batch) -> list[InferenceResponse | None]:
        runs.append(len(batch.requests))
        responses = nothing(batch)
        responses[1] = InferenceResponse([], CancelledError("An Error Occurred"))
        return responses

    samples = (WarmupSample("zero sample", (IN,), 3, 9), WarmupSample("not run", (IN,)))
    text = failure(make_spec(4, instances=2), *samples, execute=second_fails)
    assert text == "failed to run warmup sample 'zero sample': An Error Occurred; "
    assert runs == [3]


@pytest.mark.parametrize("error", [InternalError("broken"), ValueError("broken"), SystemExit("broken")])
def test_an_exception_fails_the_load_once_for_each_request(error: BaseException) -> None:
    def fails(batch: Batch) -> None:
        raise error

    sample = WarmupSample("w", (IN,), 2)
    assert failure(make_spec(2), sample, execute=fails) == "failed to run warmup sample 'w': broken; broken; "


def test_what_a_later_run_finds_wrong_counts_too() -> None:
    runs: list[Batch] = []

    def third_fails(batch: Batch) -> list[InferenceResponse | None]:
        runs.append(batch)
        if len(runs) == 3:
            raise InternalError("tired")
        return nothing(batch)

    text = failure(make_spec(), dataclasses.replace(SAMPLE, count=5), execute=third_fails)
    assert text == "failed to run warmup sample 'w': tired; "
    assert len(runs) == 3


def test_answers_that_come_later_are_waited_for() -> None:
    threads: list[threading.Thread] = []
    answered: list[InferenceRequest] = []

    def later(batch: Batch) -> None:
        assert len(answered) == 2 * len(threads)  # nothing of the run before is still under way

        def answer() -> None:
            for request in batch.requests:
                request.respond(InferenceResponse([]), final=False)
                answered.append(request)
                request.respond(None, final=True)

        threads.append(threading.Thread(target=answer))
        threads[-1].start()

    warm_up(make_spec(2, decoupled=True), WarmupSample("w", (IN,), 2, 3), execute=later)
    assert len(answered) == 6
    for thread in threads:
        thread.join()


def test_an_error_before_the_last_response_of_a_decoupled_model_fails_the_load() -> None:
    def sends(batch: Batch) -> None:
        (request,) = batch.requests
        request.respond(InferenceResponse([], InternalError("one")), final=False)
        request.respond(InferenceResponse([]), final=False)
        request.respond(InferenceResponse([], InternalError("two")), final=True)

    text = failure(make_spec(decoupled=True), SAMPLE, execute=sends)
    assert text == "failed to run warmup sample 'w': one; two; "


def test_a_warmed_model_serves() -> None:
    model = Model.create(make_spec(), LoadedModel(), warmup=[SAMPLE])
    answered: list[InferenceResponse | None] = []
    runner = model.submit(make_request(lambda _, response, final: answered.append(response)), may_claim=True)
    assert runner is not None
    runner.run_inline()
    assert len(answered) == 1
    assert model.statistics.snapshot().success.count == 1
    assert model.close()


@pytest.mark.parametrize("samples", [0, 1])
def test_an_instance_that_starts_again_is_told_how_to_be_warmed_up(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(Instance, "set_warm_up", lambda instance, warm_up: told.append(warm_up))
    loaded = LoadedModel(nothing)
    model = Model.create(make_spec(), loaded, warmup=[SAMPLE] * samples)
    assert len(told) == samples
    for again in told:
        started = Instance(nothing)
        again(started)
        assert [len(batch) for batch in started.batches] == [1]
        assert [len(batch) for batch in loaded.instances[0].batches] == [1]
    assert model.close()


def test_a_load_stops_before_the_next_run() -> None:
    stopped = threading.Event()

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        stopped.set()
        return nothing(batch)

    loaded = LoadedModel(execute)
    often = dataclasses.replace(SAMPLE, count=2**32 - 1)
    with cancellable_load(stopped.is_set), pytest.raises(UnavailableError, match="the load was stopped"):
        Model.create(make_spec(), loaded, warmup=[often])
    assert [len(instance.batches) for instance in loaded.instances] == [1]
    assert loaded.closed == 1


def test_a_load_stops_that_waits_for_an_answer() -> None:
    stopped = threading.Event()

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        stopped.set()
        return [None for _ in batch.requests]

    loaded = LoadedModel(execute)
    with cancellable_load(stopped.is_set), pytest.raises(UnavailableError, match="the load was stopped"):
        Model.create(dataclasses.replace(make_spec(), decoupled=True), loaded, warmup=[SAMPLE])
    assert loaded.closed == 1
