"""Use of regions by a request: from its inputs to its last response."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from tests.support.sharing import SharedObject, shared_object

from conch.core.errors import ConchError, InternalError, InvalidArgumentError, NotFoundError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.tensor import Tensor
from conch.memory.region_bindings import PlacedTensor, RegionBindings
from conch.memory.regions import Regions
from conch.memory.sigbus_guard import process_guard

SIZE = 3 * 4096


class Front:
    """A front end that keeps what it receives, and how many users the region had then."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self.told: list[tuple[InferenceResponse | None, bool, list[int]]] = []

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        self.told.append((response, final, [region.users for region in self._regions.system_regions()]))


@pytest.fixture
def memory() -> Iterator[SharedObject]:
    with shared_object(SIZE) as memory:
        memory.write(np.arange(SIZE // 4, dtype=np.float32))
        yield memory


@pytest.fixture
def regions(memory: SharedObject) -> Iterator[Regions]:
    with closing(Regions()) as regions:
        regions.register_system("r", memory.key, 0, SIZE)
        yield regions
        assert [region.users for region in regions.system_regions()] in ([], [0])
    assert not process_guard().installed


def request_of(uses: RegionBindings, front: Front, **inputs: Tensor) -> InferenceRequest:
    request = InferenceRequest("m", "", inputs, front, 0)
    uses.attach(request)
    return request


def ones(count: int, name: str = "y") -> Tensor:
    return Tensor.from_array(name, np.ones((1, count), np.float32))


def test_inputs_are_views_and_outputs_are_written(regions: Regions, memory: SharedObject) -> None:
    front = Front(regions)
    uses = RegionBindings(regions)
    tensor = uses.input("r", 8, 16, "x", "FP32", (1, 4))
    uses.output("r", 4096, 64, "y")
    assert tensor.numpy().tolist() == [[2, 3, 4, 5]]
    request = request_of(uses, front, x=tensor)
    memory.write(np.array([7], np.float32), 8)
    assert tensor.numpy().tolist() == [[7, 3, 4, 5]]  # read when the model reads it
    request.respond(InferenceResponse([ones(4), ones(2, "z")], None, {"p": 1}))
    ((response, final, users),) = front.told
    assert final and users == [1]
    assert response is not None and response.parameters == {"p": 1}
    placed, sent = response.outputs
    assert isinstance(placed, PlacedTensor)
    assert (placed.name, placed.datatype, placed.shape, placed.data) == ("y", "FP32", (1, 4), b"")
    assert sent.numpy().tolist() == [[1, 1]]
    assert memory.read(5, 4096).tolist() == [1, 1, 1, 1, 1028]  # and nothing behind it


def test_a_placed_output_stays_one_when_it_is_kept() -> None:
    kept = PlacedTensor("y", "FP32", (1, 4)).detached("z")
    assert isinstance(kept, PlacedTensor)
    assert (kept.name, kept.datatype, kept.shape, kept.data) == ("z", "FP32", (1, 4), b"")


def test_every_response_is_written_and_the_last_one_releases(regions: Regions, memory: SharedObject) -> None:
    front = Front(regions)
    uses = RegionBindings(regions)
    uses.output("r", 0, 64, "y")
    request = request_of(uses, front)
    for value in (5, 6):
        tensor = Tensor.from_array("y", np.full(2, value, np.int64))
        request.respond(InferenceResponse([tensor]), False)
        assert memory.read(2, 0, np.int64).tolist() == [value] * 2
    request.respond(None, True)
    assert [(final, users) for _, final, users in front.told] == [(False, [1]), (False, [1]), (True, [1])]


def test_an_output_that_does_not_fit_is_an_error(regions: Regions, memory: SharedObject) -> None:
    front = Front(regions)
    uses = RegionBindings(regions)
    uses.output("r", 0, 63, "y")
    request_of(uses, front).respond(InferenceResponse([ones(16)]))
    ((response, _, _),) = front.told
    assert response is not None and isinstance(response.error, InternalError)
    assert response.error.message == (
        "shared memory size specified with the request for output 'y' (63 bytes) should be at least 64 bytes "
        "to hold the results"
    )
    assert response.outputs == []
    assert memory.read(2).tolist() == [0, 1]


def test_an_output_that_can_not_be_written_is_an_error(
    regions: Regions, caplog: pytest.LogCaptureFixture
) -> None:
    front = Front(regions)
    uses = RegionBindings(regions)
    uses.output("r", 0, 64, "y")
    tensor = Tensor.from_array("y", np.array(["\ud800"], object))
    request_of(uses, front).respond(InferenceResponse([tensor]))
    ((response, _, _),) = front.told
    assert response is not None and isinstance(response.error, InternalError)
    assert "surrogates not allowed" in response.error.message
    assert "output 'y' of model 'm' can't be sent" in caplog.text


def test_errors_and_empty_answers_pass(regions: Regions) -> None:
    front = Front(regions)
    uses = RegionBindings(regions)
    uses.output("r", 0, 64, "y")
    request_of(uses, front).fail(InvalidArgumentError("no"))
    ((response, _, _),) = front.told
    assert response is not None and response.error is not None and response.error.message == "no"


def test_a_front_end_that_fails_does_not_keep_the_region(regions: Regions) -> None:
    def front(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        raise RuntimeError("gone")

    uses = RegionBindings(regions)
    uses.output("r", 0, 64, "y")
    request = InferenceRequest("m", "", {}, front, 0)
    uses.attach(request)
    with pytest.raises(RuntimeError):
        request.respond(InferenceResponse([ones(1)]))


@pytest.mark.parametrize("discards", [1, 2])
def test_a_request_that_is_never_submitted_gives_up_what_it_holds(regions: Regions, discards: int) -> None:
    uses = RegionBindings(regions)
    tensor = uses.input("r", 0, 16, "x", "FP32", (4,))
    uses.input("r", 0, 16, "x2", "FP32", (4,))
    request = request_of(uses, Front(regions), x=tensor)
    assert [region.users for region in regions.system_regions()] == [1]
    for _ in range(discards):
        request.discard()


def test_what_is_wrong_with_a_part(regions: Regions) -> None:
    uses = RegionBindings(regions)
    for call, text in (
        (lambda: uses.input("s", 0, 1, "x", "FP32", (1,)), "Unable to find shared memory region: 's'"),
        (lambda: uses.output("s", 0, 1, "x"), "Unable to find shared memory region: 's'"),
        (lambda: uses.output("r", SIZE, 1, "x"), "Invalid offset for shared memory region: 'r'"),
        (lambda: uses.output("r", -1, 1, "x"), "Invalid offset for shared memory region: 'r'"),
        (lambda: uses.output("r", 1, SIZE, "x"), "Invalid offset + byte size for shared memory region: 'r'"),
        (lambda: uses.output("r", 0, 0, "x"), "Invalid offset + byte size for shared memory region: 'r'"),
    ):
        with pytest.raises(ConchError) as raised:
            call()
        assert raised.value.message == text
    with pytest.raises(NotFoundError):
        uses.input("s", 0, 1, "x", "FP32", (1,))
    uses.release()


def test_a_region_may_go_while_a_request_uses_it(regions: Regions, memory: SharedObject) -> None:
    front = Front(regions)
    uses = RegionBindings(regions)
    tensor = uses.input("r", 0, 16, "x", "FP32", (4,))
    uses.output("r", 4096, 64, "y")
    request = request_of(uses, front, x=tensor)
    regions.unregister_system("r")
    regions.register_system("r", memory.key, 8192, 4096)  # another one of this name
    request.respond(InferenceResponse([Tensor.from_array("y", tensor.numpy() + 1)]))
    assert memory.read(4, 4096).tolist() == [1, 2, 3, 4]
    assert memory.read(1, 8192).tolist() == [2048]


def test_a_region_that_shrinks_meanwhile_is_an_error(regions: Regions, memory: SharedObject) -> None:
    for where in ("input", "output"):
        front = Front(regions)
        uses = RegionBindings(regions)
        inputs = {}
        if where == "input":
            inputs["x"] = uses.input("r", 0, 16, "x", "FP32", (4,))
        else:
            uses.output("r", 4096, 64, "y")
        request = request_of(uses, front, **inputs)
        memory.resize(4096)
        request.respond(InferenceResponse([ones(16)]))
        ((response, _, _),) = front.told
        assert response is not None and isinstance(response.error, InvalidArgumentError)
        assert response.error.message.startswith("shared memory region 'r' has shrunk")
        memory.resize(SIZE)
        if where == "output":
            other = RegionBindings(regions)
            with pytest.raises(InvalidArgumentError, match="has lost its memory"):
                other.output("r", 0, 4, "y")
            other.release()


@pytest.mark.parametrize("offset", [0, 16, 60, 64, 200])
def test_input_and_output_may_overlap(regions: Regions, memory: SharedObject, offset: int) -> None:
    """An input that a model returns as it came is moved within the region."""
    uses = RegionBindings(regions)
    tensor = uses.input("r", 64, 128, "x", "FP32", (32,))
    uses.output("r", offset, 128, "y")
    request = request_of(uses, Front(regions), x=tensor)
    request.respond(InferenceResponse([tensor.renamed("y", (32,))]))
    assert memory.read(32, offset).tolist() == list(range(16, 48))


def arrays() -> Iterator[tuple[str, Tensor]]:
    square = np.arange(64, dtype=np.float32).reshape(8, 8)
    yield "contiguous", Tensor.from_array("y", square)
    yield "transposed", Tensor.from_array("y", square.T)
    yield "strided", Tensor.from_array("y", square[::2, 1::3])
    yield "scalar", Tensor.from_array("y", np.array(5, np.int16))
    yield "empty", Tensor.from_array("y", np.empty((0, 3), np.float64))
    yield "bool", Tensor.from_array("y", np.array([True, False]))
    yield "bytes", Tensor("y", "BF16", (2,), b"abcd")
    yield "strings", Tensor.from_array("y", np.array([b"a", b"", "é"], object))


@pytest.mark.parametrize(("name", "tensor"), [*arrays()])
@pytest.mark.parametrize("offset", [0, 3])
def test_any_tensor_is_written_in_its_wire_form(
    regions: Regions, memory: SharedObject, name: str, tensor: Tensor, offset: int
) -> None:
    uses = RegionBindings(regions)
    uses.output("r", offset, 1000, "y")
    request_of(uses, Front(regions)).respond(InferenceResponse([tensor]))
    assert memory.read(tensor.nbytes, offset, np.uint8).tobytes() == bytes(tensor.data)


def test_an_output_that_was_written_in_place_is_not_copied(regions: Regions, memory: SharedObject) -> None:
    uses = RegionBindings(regions)
    uses.output("r", 4096, 64, "y")
    assert uses.buffer("z", 64) is None
    assert uses.buffer("y", 65) is None
    buffer = uses.buffer("y", 32)
    assert buffer is not None
    array = np.frombuffer(buffer, np.float32)
    del buffer
    array[:] = 3
    request = request_of(uses, Front(regions))
    request.respond(InferenceResponse([Tensor.from_array("y", array)]))
    assert memory.read(8, 4096).tolist() == [3] * 8
