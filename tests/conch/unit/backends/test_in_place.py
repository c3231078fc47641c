"""Outputs that engines write to where clients want them, and when they must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from tests.support.backend_harness import Harness, HarnessAnswer, tensor_specs
from tests.support.onnx_graphs import graph, node
from tests.support.sharing import SharedObject, shared_object

from conch.backends import load_backend
from conch.backends.arrays import InPlaceOutputs
from conch.core.backend import Backend
from conch.core.model_version import Model
from conch.core.request import InferenceRequest, InferenceResponse, Responder
from conch.core.responder_layers import ResponderLayer
from conch.core.tensor import Array
from conch.memory.region_bindings import RegionBindings
from conch.memory.regions import Regions
from conch.memory.system_region import SystemRegion

F = 1
COUNT = 64 * 1024
NBYTES = 4 * COUNT
SIZE = 4 * NBYTES
DOUBLING = graph([node("Add", ["IN", "IN"], ["OUT"])], {"IN": (F, ["n", COUNT])}, {"OUT": (F, ["n", COUNT])})
VALUES = np.arange(COUNT, dtype=np.float32).reshape(1, COUNT)


@pytest.fixture(scope="module", params=["onnxruntime", "openvino"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return load_backend(request.param)


@pytest.fixture
def model(harness: Harness, backend: Backend) -> Model:
    harness.directory("m", {"1/model.onnx": DOUBLING})
    spec = harness.spec(
        inputs=tensor_specs(IN=("FP32", (COUNT,))),
        outputs=tensor_specs(OUT=("FP32", (COUNT,))),
        model_file="model.onnx",
    )
    return harness.load(backend, spec)


@pytest.fixture
def memory() -> Iterator[SharedObject]:
    with shared_object(SIZE) as memory:
        memory.write(VALUES)
        yield memory


@pytest.fixture
def regions(memory: SharedObject) -> Iterator[Regions]:
    with closing(Regions()) as regions:
        regions.register_system("r", memory.key, 0, SIZE)
        yield regions


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the outputs that were copied to regions."""
    sizes: list[int] = []

    def copyto(target: Array, source: Array) -> None:
        sizes.append(source.nbytes)
        target[...] = source

    monkeypatch.setattr("conch.memory.system_region.np.copyto", copyto)
    return sizes


def ask(
    model: Model, regions: Regions, offset: int = NBYTES, size: int = NBYTES, between: Any = None
) -> HarnessAnswer:
    """Has the model double what the region begins with, and write it to a place."""
    answer = HarnessAnswer()
    uses = RegionBindings(regions)
    tensor = uses.input("r", 0, NBYTES, "IN", "FP32", (1, COUNT))
    uses.output("r", offset, size, "OUT")
    request = InferenceRequest("m", "", {"IN": tensor}, answer.respond, 0)
    uses.attach(request)
    if between is not None:
        request.wrap_responder(between, ResponderLayer.CACHE)
    model.submit(request)
    answer.wait()
    return answer


def test_nothing_is_copied(model: Model, regions: Regions, memory: SharedObject, copies: list[int]) -> None:
    """The budget: no byte on the way in, and none on the way out."""
    for _ in range(3):
        memory.write(np.zeros_like(VALUES), NBYTES)
        (output,) = ask(model, regions).one.outputs
        assert (output.shape, output.data) == ((1, COUNT), b"")
        assert (memory.read(COUNT, NBYTES) == 2 * VALUES[0]).all()
    assert copies == []
    assert model.statistics.snapshot().bytes_copied == 0


@pytest.mark.parametrize("place", [0, NBYTES - 64, 64], ids=["the same", "the end", "the beginning"])
def test_inputs_are_not_overwritten_while_they_are_read(
    model: Model, regions: Regions, memory: SharedObject, copies: list[int], place: int
) -> None:
    ask(model, regions, place)
    assert (memory.read(COUNT, place) == 2 * VALUES[0]).all()
    assert copies == [NBYTES]


@pytest.mark.parametrize("place", [NBYTES + 4, NBYTES + 1, NBYTES + 32])
def test_where_memory_is_not_aligned_outputs_are_copied(
    model: Model, regions: Regions, memory: SharedObject, copies: list[int], place: int
) -> None:
    ask(model, regions, place)
    assert (memory.read(COUNT, place) == 2 * VALUES[0]).all()
    assert copies == [NBYTES]


def test_an_output_that_has_too_little_room_writes_nothing(
    model: Model, regions: Regions, memory: SharedObject
) -> None:
    answer = ask(model, regions, size=NBYTES - 1)
    assert answer.error == (
        f"shared memory size specified with the request for output 'OUT' ({NBYTES - 1} bytes) should be at "
        f"least {NBYTES} bytes to hold the results"
    )
    assert not memory.read(COUNT, NBYTES).any()


def test_who_looks_at_a_response_sees_no_memory_of_a_client(
    model: Model, regions: Regions, memory: SharedObject, copies: list[int]
) -> None:
    """A cache would keep what the client has made of the answer since."""
    seen: list[bytes] = []

    def between(responder: Responder) -> Responder:
        def look(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
            assert response is not None
            memory.write(np.zeros_like(VALUES), NBYTES)
            seen.append(bytes(response.outputs[0].data))
            responder(request, response, final)

        return look

    ask(model, regions, between=between)
    assert seen == [(2 * VALUES).tobytes()]
    assert copies == [NBYTES]


def test_a_region_that_shrinks_under_a_model_that_writes(
    model: Model, regions: Regions, memory: SharedObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check beforehand passes, as it would if it came a moment earlier."""
    with monkeypatch.context() as patch:
        patch.setattr(SystemRegion, "check", lambda self: memory.resize(NBYTES))
        answer = HarnessAnswer()
        uses = RegionBindings(regions)
        tensor = uses.input("r", 0, NBYTES, "IN", "FP32", (1, COUNT))
        uses.output("r", NBYTES, NBYTES, "OUT")
    request = InferenceRequest("m", "", {"IN": tensor}, answer.respond, 0)
    uses.attach(request)
    model.submit(request)
    assert answer.error.startswith("shared memory region 'r' has shrunk since it was registered")


def test_a_request_without_any_inputs_has_no_place(harness: Harness) -> None:
    """All of them may be optional: then nothing says how many rows there are."""
    spec = harness.spec(outputs=tensor_specs(OUT=("FP32", (COUNT,))), max_batch_size=8)

    request = InferenceRequest("m", "", {}, lambda request, response, final: None, 0)
    with closing(Regions()) as regions:
        uses = RegionBindings(regions)
        uses.attach(request)
        assert InPlaceOutputs(spec).places(request, ("OUT",), {}) is None
