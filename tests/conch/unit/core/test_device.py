"""Tensors that are on a device: what the core and frameworks get of them, without any device."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core import dlpack
from conch.core.device import DeviceMemory, DeviceTensor, concatenated
from conch.core.errors import InvalidArgumentError
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, Buffer, Tensor

NUMBERS = sorted(name for name in ELEMENT_SIZES if name != "BF16")


class HostMemory(DeviceMemory):
    """A device's memory that is the host's, and counts what is read."""

    def __init__(
        self, content: bytearray, start: int = 0, nbytes: int | None = None, pools: bool = True
    ) -> None:
        self.content = content
        self.start = start
        self.nbytes = len(content) if nbytes is None else nbytes
        self.device_id = 3
        self.pools = pools
        self.reads = 0
        self.pointer = ctypes.addressof(ctypes.c_char.from_buffer(content)) + start if content else 0

    def part(self, offset: int, nbytes: int) -> HostMemory:
        return HostMemory(self.content, self.start + offset, nbytes, self.pools)

    def read(self) -> memoryview:
        self.reads += 1
        return memoryview(bytearray(self.content[self.start : self.start + self.nbytes]))

    def write(self, parts: Iterable[Buffer | DeviceMemory]) -> None:
        joined = b"".join([part.read() if isinstance(part, DeviceMemory) else part for part in parts])
        self.content[self.start : self.start + len(joined)] = joined

    def view_owned_by(self, pointer: int, nbytes: int, owner: object) -> HostMemory:
        raise NotImplementedError

    def new_memory(self, nbytes: int) -> HostMemory | None:
        return HostMemory(bytearray(nbytes)) if self.pools else None


def tensor_of(values: Any, datatype: str, pools: bool = True) -> DeviceTensor:
    array = np.asarray(values, NUMPY_DTYPES[datatype])
    return DeviceTensor("x", datatype, array.shape, HostMemory(bytearray(array.tobytes()), pools=pools))


def memory_of(tensor: DeviceTensor) -> HostMemory:
    assert isinstance(tensor.memory, HostMemory)
    return tensor.memory


@pytest.mark.parametrize("datatype", NUMBERS)
def test_host_access_copies_once(datatype: str) -> None:
    values = np.array([[0, 1, 1], [1, 0, 1]], NUMPY_DTYPES[datatype])
    tensor = tensor_of(values, datatype)
    assert DeviceTensor.on_device
    assert [tensor.has_data] == [False]
    assert tensor.nbytes == values.nbytes
    assert tensor.fetch() == values.nbytes
    assert tensor.fetch() == 0
    assert tensor.has_data
    array = tensor.numpy()
    assert array.dtype == values.dtype
    assert array.tolist() == values.tolist()
    assert not array.flags.writeable
    assert bytes(tensor.data) == values.tobytes()
    assert memory_of(tensor).reads == 1


def test_tensors_in_host_memory_are_not_on_a_device() -> None:
    assert not Tensor("x", "FP32", (1,), b"1234").on_device


def test_a_tensor_without_elements_is_not_copied() -> None:
    tensor = DeviceTensor("x", "FP32", (0, 4), HostMemory(bytearray()))
    assert tensor.numpy().shape == (0, 4)
    assert memory_of(tensor).reads == 0


def test_other_names_and_shapes_are_the_same_memory() -> None:
    tensor = tensor_of(np.arange(6).reshape(2, 3), "INT32")
    renamed = tensor.renamed("y", (3, 2))
    assert (renamed.name, renamed.shape, renamed.memory) == ("y", (3, 2), tensor.memory)
    reshaped = tensor.reshaped((6,))
    assert (reshaped.name, reshaped.shape, reshaped.memory) == ("x", (6,), tensor.memory)
    with pytest.raises(InvalidArgumentError, match=r"'x' of shape \[2, 3\] can't have shape \[7\]"):
        tensor.reshaped((7,))


def test_a_detached_tensor_is_in_host_memory() -> None:
    tensor = tensor_of([1, 2], "INT32")
    detached = tensor.detached("y")
    tensor.memory.write([bytes(8)])
    assert type(detached) is Tensor
    assert (detached.name, detached.numpy().tolist()) == ("y", [1, 2])


def test_rows_are_parts_of_the_memory() -> None:
    tensor = tensor_of(np.arange(12).reshape(4, 3), "INT16")
    rows = tensor[1:3]
    assert rows.memory.pointer == tensor.memory.pointer + 6
    assert rows.numpy().tolist() == [[3, 4, 5], [6, 7, 8]]


def exported(tensor: DeviceTensor) -> dlpack.Described:
    return dlpack.describe(tensor.__dlpack__(stream=1, max_version=(1, 0), dl_device=None, copy=None))


@given(
    datatype=st.sampled_from(sorted(ELEMENT_SIZES)),
    shape=st.lists(st.integers(0, 4), max_size=5).map(tuple),
)
def test_a_capsule_says_where_what_is(datatype: str, shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape, dtype=int)) * ELEMENT_SIZES[datatype]
    memory = HostMemory(bytearray(size))
    tensor = DeviceTensor("x", datatype, shape, memory)
    assert tensor.__dlpack_device__() == (dlpack.CUDA, 3)
    assert exported(tensor) == (memory.pointer, (dlpack.CUDA, 3), datatype, shape, size)


class OnHost:
    """A capsule of memory that is really the host's, for numpy to take."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0


@pytest.mark.parametrize("datatype", NUMBERS)
def test_consumers_share_the_memory_and_keep_its_owner(datatype: str) -> None:
    class Owner:
        pass

    values = np.array([[0, 1, 1], [1, 0, 1]], NUMPY_DTYPES[datatype])
    owner = Owner()
    gone = weakref.ref(owner)
    capsule = dlpack.export(values.ctypes.data, (dlpack.CPU, 0), datatype, values.shape, owner)
    del owner
    array = np.from_dlpack(OnHost(capsule))
    del capsule
    assert array.dtype == values.dtype
    values[0, 0] = 1
    assert array.tolist() == values.tolist()
    assert gone() is not None
    del array
    assert gone() is None


def test_a_consumer_that_fails_loses_no_error() -> None:
    """The tensor is freed while its exception is on the way."""
    tensor = tensor_of([1, 2], "INT32")
    for _ in range(100):
        with pytest.raises(TypeError):
            len(tensor.__dlpack__())
    gc.collect()


def test_a_capsule_of_another_producer_is_read() -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    described = dlpack.describe(array[1:].__dlpack__())
    assert described == (array.ctypes.data + 24, (dlpack.CPU, 0), "INT64", (1, 3), 24)
    assert dlpack.describe(np.array(1.5).__dlpack__()).shape == ()


@pytest.mark.parametrize(
    "array",
    [np.arange(6).reshape(2, 3).T, np.arange(6)[::2], np.zeros((2, 4))[:, :2]],
    ids=["transposed", "stepped", "cut"],
)
def test_what_is_not_contiguous_is_refused(array: Any) -> None:
    with pytest.raises(ValueError, match=r"DLPack tensor is not contiguous\. Only contiguous DLPack"):
        dlpack.describe(array.__dlpack__())


def test_types_that_the_protocol_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="DLPack type code 5 with 64 bits and 1 lanes"):
        dlpack.describe(np.zeros(2, np.complex64).__dlpack__())


def test_a_capsule_that_was_consumed_is_refused() -> None:
    capsule = np.zeros(2).__dlpack__()
    np.from_dlpack(OnHost(capsule))
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        dlpack.describe(capsule)


def test_the_array_interface_of_cuda() -> None:
    tensor = tensor_of([[1.5, 2.5]], "FP32")
    assert tensor.__cuda_array_interface__ == {
        "version": 3,
        "shape": (1, 2),
        "typestr": "<f4",
        "data": (tensor.memory.pointer, False),
        "strides": None,
        "stream": None,
    }
    assert not hasattr(DeviceTensor("x", "BF16", (1,), HostMemory(bytearray(2))), "__cuda_array_interface__")


def test_rows_of_host_and_device_are_joined_on_the_device() -> None:
    tensors = [
        Tensor.from_array("x", np.array([[1, 2]], np.int32)),
        tensor_of([[3, 4], [5, 6]], "INT32"),
        Tensor("x", "INT32", (0, 2), b""),
    ]
    joined = concatenated("y", tensors, 3)
    assert joined is not None
    assert (joined.name, joined.shape) == ("y", (3, 2))
    assert joined.numpy().tolist() == [[1, 2], [3, 4], [5, 6]]


def test_rows_are_not_joined_where_memory_can_not_be_had() -> None:
    assert concatenated("y", [tensor_of([[1]], "INT32", pools=False)], 3) is None
