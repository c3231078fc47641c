"""Regions on GPUs: registering them, and requests that have tensors in them."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from tests.support.cuda import Allocation, FakeCuda

from conch.core.device import DeviceTensor
from conch.core.errors import (
    AlreadyExistsError,
    ConchError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
)
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.tensor import Tensor, encode_bytes
from conch.memory.cuda import CudaDevice, CudaDevices, CudaMemory
from conch.memory.cuda_regions import OpenedRegion, cuda_opener
from conch.memory.region_bindings import RegionBindings
from conch.memory.regions import Regions

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def regions(devices: CudaDevices) -> Regions:
    return Regions(open_cuda=cuda_opener(lambda: devices))


@pytest.fixture
def theirs(cuda: FakeCuda, regions: Regions) -> Allocation:
    """Memory on device 1 that is registered as ``r``."""
    allocation = cuda.allocate(VALUES, device=1)
    regions.register_cuda("r", allocation.handle, 1, VALUES.nbytes)
    return allocation


class Sent:
    """A request with its first input and its output in a region, and what its front end got."""

    def __init__(self, regions: Regions, output: tuple[int, int] = (0, 16)) -> None:
        uses = RegionBindings(regions)
        self.tensor = uses.input("r", 16, 16, "X", "FP32", (1, 4))
        uses.output("r", *output, "Y")
        self.answers: list[InferenceResponse | None] = []
        self.request = InferenceRequest("m", "", {"X": self.tensor}, self._respond, 0)
        uses.attach(self.request)

    def _respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        self.answers.append(response)

    def answer(self, tensor: Tensor) -> InferenceResponse:
        self.request.respond(InferenceResponse([tensor]))
        (response,) = self.answers
        assert response is not None
        return response


def refusal(call: object, *arguments: object) -> ConchError:
    assert callable(call)
    with pytest.raises(ConchError) as refused:
        call(*arguments)
    return refused.value


def test_a_region_is_listed_until_it_is_unregistered(
    cuda: FakeCuda, regions: Regions, theirs: Allocation
) -> None:
    (region,) = regions.cuda_regions()
    assert (region.name, region.device_id, region.byte_size) == ("r", 1, 48)
    assert regions.cuda_regions("r") == [region]
    assert regions.system_regions() == []
    assert cuda.open_handles == {theirs.name}
    del region
    regions.unregister_cuda("r")
    assert regions.cuda_regions() == []
    assert cuda.open_handles == set()
    regions.unregister_cuda("r")


def test_errors_about_names_are_those_of_every_region(regions: Regions, theirs: Allocation) -> None:
    error = refusal(regions.register_cuda, "r", theirs.handle, 1, 48)
    assert isinstance(error, AlreadyExistsError)
    assert error.message == "shared memory region 'r' already in manager"
    error = refusal(regions.system_regions, "r")
    assert isinstance(error, NotFoundError)
    assert (
        error.message == "The region named 'r' is registered as CUDA shared memory, not system shared memory"
    )
    assert refusal(regions.cuda_regions, "s").message == "Unable to find cuda shared memory region: 's'"
    regions.unregister_system()
    assert len(regions.cuda_regions()) == 1


@pytest.mark.parametrize(
    ("device", "handle", "size", "text"),
    [
        (1, b"x" * 64, 48, "failed to open CUDA IPC handle: invalid argument"),
        (1, b"", 48, "failed to open CUDA IPC handle: invalid argument"),
        (7, None, 48, "failed to open CUDA IPC handle: invalid device ordinal"),
        (-1, None, 48, "failed to open CUDA IPC handle: invalid device ordinal"),
        (0, None, 48, "failed to open CUDA IPC handle: the memory is on device 1, not on device 0"),
        (1, None, 49, "invalid args"),
        (1, None, 0, "invalid args"),
        (1, None, 2**64 - 1, "invalid args"),
    ],
)
def test_what_can_not_be_registered(
    cuda: FakeCuda, regions: Regions, device: int, handle: bytes | None, size: int, text: str
) -> None:
    theirs = cuda.allocate(VALUES, device=1)
    error = refusal(regions.register_cuda, "n", theirs.handle if handle is None else handle, device, size)
    assert isinstance(error, InvalidArgumentError)
    kind = "" if text == "invalid args" else "CUDA "
    assert error.message == f"failed to register {kind}shared memory region 'n': {text}"
    assert regions.cuda_regions() == []
    del error
    assert cuda.open_handles == set()
    regions.register_cuda("n", theirs.handle, 1, 48)


def test_without_cuda_the_text_is_tritons() -> None:
    for library in ("libno-such-driver.so.1", "libc.so.6"):
        regions = Regions(open_cuda=cuda_opener(lambda library=library: CudaDevices(library)))  # type: ignore[misc]
        error = refusal(regions.register_cuda, "n", b"x" * 64, 0, 48)
        assert isinstance(error, InvalidArgumentError)
        assert error.message == "failed to register CUDA shared memory region: 'n', GPUs not supported"
        assert regions.cuda_regions() == []
        regions.unregister_cuda()


def test_two_regions_of_one_handle_are_closed_with_the_second(
    cuda: FakeCuda, regions: Regions, theirs: Allocation
) -> None:
    regions.register_cuda("s", theirs.handle, 1, 16)
    regions.unregister_cuda("r")
    assert cuda.open_handles == {theirs.name}
    uses = RegionBindings(regions)
    assert uses.input("s", 0, 16, "X", "FP32", (4,)).numpy().tolist() == [0, 1, 2, 3]
    uses.release()
    regions.unregister_cuda()
    assert cuda.open_handles == set()


def test_tensors_are_read_and_written_in_place(regions: Regions, theirs: Allocation) -> None:
    sent = Sent(regions)
    assert isinstance(sent.tensor, DeviceTensor)
    assert sent.tensor.memory.device_id == 1
    assert sent.tensor.numpy().tolist() == [[4, 5, 6, 7]]
    response = sent.answer(Tensor.from_array("Y", sent.tensor.numpy() * 2))
    assert response.error is None
    assert [(tensor.name, tensor.shape, bytes(tensor.data)) for tensor in response.outputs] == [
        ("Y", (1, 4), b"")
    ]
    assert theirs.array[0].tolist() == [8, 10, 12, 14]


def test_an_output_on_the_device_is_copied_there(
    cuda: FakeCuda, devices: CudaDevices, regions: Regions, theirs: Allocation
) -> None:
    near = devices.open(cuda.allocate(VALUES + 50, device=0).handle, 0)
    sent = Sent(regions)
    assert sent.answer(DeviceTensor("Y", "FP32", (1, 4), near.part(32, 16))).error is None
    assert theirs.array[0].tolist() == [58, 59, 60, 61]


def test_an_output_that_is_its_place_is_not_copied(
    cuda: FakeCuda, regions: Regions, theirs: Allocation
) -> None:
    sent = Sent(regions, (16, 32))
    with cuda.failing("cuMemcpyAsync", 700):
        assert sent.answer(sent.tensor.renamed("Y", (1, 4))).error is None


def test_an_output_that_is_too_large_is_not_written(regions: Regions, theirs: Allocation) -> None:
    response = Sent(regions, (0, 15)).answer(Tensor.from_array("Y", np.ones((1, 4), np.float32)))
    assert isinstance(response.error, InternalError)
    assert response.error.message == (
        "shared memory size specified with the request for output 'Y' (15 bytes) should be at least 16 bytes "
        "to hold the results"
    )
    assert theirs.array.tolist() == VALUES.tolist()


def test_a_copy_that_fails_is_the_requests_error(
    cuda: FakeCuda, regions: Regions, theirs: Allocation
) -> None:
    sent = Sent(regions)
    with cuda.failing("cuMemcpyAsync", 700):
        response = sent.answer(Tensor.from_array("Y", np.ones((1, 4), np.float32)))
    assert response.error is not None
    assert response.error.message == (
        "a copy on CUDA device 1 failed: an illegal memory access was encountered"
    )
    assert response.outputs == []


def test_a_region_in_use_is_closed_with_its_last_user(
    cuda: FakeCuda, regions: Regions, theirs: Allocation
) -> None:
    sent = Sent(regions)
    regions.unregister_cuda()
    assert regions.cuda_regions() == []
    assert cuda.open_handles == {theirs.name}
    assert refusal(RegionBindings(regions).input, "r", 0, 4, "X", "FP32", (1,)).message == (
        "Unable to find shared memory region: 'r'"
    )
    sent.answer(Tensor.from_array("Y", np.full((1, 4), 9, np.float32)))
    assert theirs.array[0].tolist() == [9, 9, 9, 9]
    del sent
    gc.collect()  # the test's own cycle
    assert cuda.open_handles == set()


def test_what_a_model_kept_of_an_input_outlives_its_region(
    cuda: FakeCuda, regions: Regions, theirs: Allocation
) -> None:
    sent = Sent(regions)
    assert isinstance(sent.tensor, DeviceTensor)
    kept = sent.tensor.__dlpack__()
    sent.answer(sent.tensor.renamed("Y", (1, 4)))
    regions.unregister_cuda()
    del sent
    gc.collect()  # the test's own cycle
    assert cuda.open_handles == {theirs.name}
    del kept
    assert cuda.open_handles == set()


def test_strings_and_odd_addresses_come_as_copies(cuda: FakeCuda, regions: Regions) -> None:
    strings = encode_bytes([b"ab", b"c"])
    theirs = cuda.allocate(np.frombuffer(strings + VALUES.tobytes(), np.uint8))
    regions.register_cuda("r", theirs.handle, 0, len(strings) + 48)
    uses = RegionBindings(regions)
    tensor = uses.input("r", 0, len(strings), "S", "BYTES", (2,))
    assert not tensor.on_device
    assert tensor.numpy().tolist() == [b"ab", b"c"]
    assert len(strings) % 4
    tensor = uses.input("r", len(strings), 48, "X", "FP32", (3, 4))
    assert not tensor.on_device
    assert tensor.numpy().tolist() == VALUES.tolist()
    uses.release()


def test_more_strings_than_a_message_has_are_refused() -> None:
    device = CudaDevice.__new__(CudaDevice)
    device.number = 0
    region = OpenedRegion("r", 2**33, CudaMemory(device, 4096, 2**33, None))
    error = refusal(region.tensor, 0, 2**31, "S", "BYTES", (1,))
    assert isinstance(error, InvalidArgumentError)
    assert error.message == (
        "input 'S' in shared memory region 'r' has 2147483648 bytes, but of datatype BYTES at most "
        "2147483647 are taken there"
    )


@pytest.mark.parametrize(
    ("offset", "size"), [(48, 1), (2**63, 1), (-1, 4), (0, 49), (44, 5), (0, 2**64), (4, 0)]
)
def test_no_part_reaches_out_of_its_region(
    regions: Regions, theirs: Allocation, offset: int, size: int
) -> None:
    uses = RegionBindings(regions)
    for call in (
        lambda: uses.input("r", offset, size, "X", "FP32", (1,)),
        lambda: uses.output("r", offset, size, "Y"),
    ):
        assert refusal(call).message.startswith(("Invalid offset", "Integer overflow detected"))
    uses.release()


def test_regions_come_and_go_while_requests_use_them(cuda: FakeCuda, regions: Regions) -> None:
    theirs = cuda.allocate(VALUES)
    wrong: list[object] = []

    def use() -> None:
        for _ in range(100):
            uses = RegionBindings(regions)
            try:
                if uses.input("r", 0, 48, "X", "FP32", (3, 4)).numpy().tolist() != VALUES.tolist():
                    wrong.append("contents")
            except NotFoundError:
                pass
            except ConchError as error:
                wrong.append(error)
            finally:
                uses.release()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        regions.register_cuda("r", theirs.handle, 0, 48)
        regions.unregister_cuda("r")
    assert wrong == []
    assert cuda.open_handles == set()
