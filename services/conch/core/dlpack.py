"""DLPack capsules of device memory, made and read with numpy and ctypes.

numpy makes a capsule of an array that only holds the address, so numpy's C code frees it on any thread; then
the device is written into the capsule. A deleter in Python could run while an exception propagates through a
model, and would lose that exception.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np

from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES

CPU = 1
CUDA = 2
CUDA_HOST = 3
"""Device kinds of DLPack; the last is pinned host memory."""

_NAME = b"dltensor"
_BFLOAT = 4
_BOOL = 6
_CODES = {"i": 0, "u": 1, "f": 2, "b": _BOOL}


class _DLTensor(ctypes.Structure):
    """The first fields of the struct behind a capsule named ``dltensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# A separate function object: attributes of those in `ctypes.pythonapi` are shared by the process.
_get_pointer: Callable[[Any, bytes], int] = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p
)(("PyCapsule_GetPointer", ctypes.pythonapi))


class _Placed:
    """Array interface of a memory range; an array of it keeps this object, and so the owner."""

    def __init__(self, pointer: int, shape: tuple[int, ...], typestr: str, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, False),
            "shape": shape,
            "typestr": typestr,
        }


class Described(NamedTuple):
    """The contents of a capsule; `device` is kind and number."""

    pointer: int
    device: tuple[int, int]
    datatype: str
    shape: tuple[int, ...]
    nbytes: int


def export(
    pointer: int, device: tuple[int, int], datatype: str, shape: tuple[int, ...], owner: object
) -> Any:
    """A capsule of contiguous memory, which keeps `owner` alive; `datatype` must not be BYTES."""
    dtype = NUMPY_DTYPES.get(datatype, np.dtype("<u2"))  # BF16 is two bytes that numpy can't name
    capsule = np.asarray(_Placed(pointer, shape, dtype.str, owner)).__dlpack__()
    tensor = _DLTensor.from_address(_get_pointer(capsule, _NAME))
    tensor.data = pointer  # numpy has an address of its own for arrays without elements
    tensor.device_type, tensor.device_id = device
    tensor.code = _BFLOAT if datatype == "BF16" else _CODES[dtype.kind]
    return capsule


def device_of(capsule: Any) -> tuple[int, int]:
    """Kind and number of a capsule's device. Raises ValueError: it is no capsule, or has been consumed."""
    tensor = _DLTensor.from_address(_get_pointer(capsule, _NAME))
    return tensor.device_type, tensor.device_id


def describe(capsule: Any) -> Described:
    """Reads a capsule without consuming it: its memory stays as long as the capsule is kept.

    Raises:
        ValueError: It is no capsule, has been consumed, is not contiguous, or is of a type that the protocol
            does not have.
    """
    tensor = _DLTensor.from_address(_get_pointer(capsule, _NAME))
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and not _is_contiguous(shape, tensor.strides[: tensor.ndim]):
        raise ValueError(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are "
            "supported."
        )
    datatype = _DATATYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if datatype is None:
        raise ValueError(
            f"DLPack type code {tensor.code} with {tensor.bits} bits and {tensor.lanes} lanes has no "
            f"datatype in the protocol"
        )
    return Described(
        (tensor.data or 0) + tensor.byte_offset,
        (tensor.device_type, tensor.device_id),
        datatype,
        shape,
        prod(shape) * ELEMENT_SIZES[datatype],
    )


_DATATYPES = {
    (_CODES[dtype.kind], dtype.itemsize * 8): name
    for name, dtype in NUMPY_DTYPES.items()
    if dtype.kind in _CODES
} | {(_BFLOAT, 16): "BF16"}


def _is_contiguous(shape: tuple[int, ...], strides: list[int]) -> bool:
    """True if elements lie in row-major order without gaps; strides of dims of length 1 are ignored."""
    if 0 in shape:
        return True
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
