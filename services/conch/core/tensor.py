"""Tensors as they travel: a name, a datatype, a shape and bytes, viewed as numpy only on demand.

Datatype names and element sizes are those of the KServe v2 protocol; BYTES elements are each preceded
by their length as a little-endian 32-bit integer, in row-major order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from conch.core.compiled import mypyc_attr
from conch.core.errors import InvalidArgumentError, UnsupportedError

Array = npt.NDArray[Any]
Buffer = bytes | bytearray | memoryview

ELEMENT_SIZES: dict[str, int] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "FP32": 4,
    "FP64": 8,
    "BF16": 2,
}
"""Bytes per element of every datatype of fixed size; BYTES is not among them."""

POSITIONS = frozenset(("BOOL", "INT32", "INT64"))
"""Datatypes whose values kernels take for positions and counts.

Kernels check them first, so a client must not be able to change them in between: the server would read and
write anywhere.
"""

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}
"""The numpy dtype of every datatype that numpy has; BF16 is not among them."""

_DATATYPE_OF: dict[np.dtype[Any], str] = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
STRING_LENGTH = struct.Struct("<I")
"""Length before an element of BYTES."""
_MOST_ELEMENTS = 32 * 1024
_QUICK_BYTES = 4 << 20


@mypyc_attr(allow_interpreted_subclasses=True)
class Tensor:
    """One named tensor of a request or a response, in host memory.

    Holds the wire form, a numpy array, or both; each is made from the other on demand. A tensor made
    from a received message shares that message's memory, so its array is read-only.

    Attributes:
        name: Name of the input or output.
        datatype: Protocol name of the element type, such as ``FP32``.
        shape: Dimensions, batch dimension included.
        on_device: True if it is a `conch.core.device.DeviceTensor`, whose bytes must be copied to the host.
        shared: True if a client may write to its memory at any time.
        writable: True if its memory is private, so that a model may write to it.
    """

    on_device: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    writable: ClassVar[bool] = False

    __slots__ = ("_array", "_data", "datatype", "name", "shape")

    def __init__(
        self,
        name: str,
        datatype: str,
        shape: tuple[int, ...],
        data: Buffer | None = None,
        array: Array | None = None,
    ) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self._data = data
        self._array = array

    @classmethod
    def from_array(cls, name: str, array: Array, datatype: str | None = None) -> Tensor:
        """Wraps an array of any supported dtype; no copy unless it is not contiguous.

        A BF16 array is one of ml_dtypes, or of uint16 with the elements' bits if `datatype` says so.

        Raises:
            UnsupportedError: No datatype of the protocol fits the array's dtype.
        """
        datatype = datatype or datatype_of(array)
        if datatype == "BF16":  # as bytes: numpy has no type for it, and that of ml_dtypes makes no buffers
            bits = np.ascontiguousarray(array).view(np.uint16)
            return cls(name, datatype, array.shape, bits.data.cast("B") if bits.size else b"")
        return cls(name, datatype, array.shape, None, array)

    @property
    def nbytes(self) -> int:
        """Size in wire form, in bytes."""
        data = self._data
        if data is not None:
            return data.nbytes if isinstance(data, memoryview) else len(data)
        array = self._array
        if array is None or self.datatype != "BYTES":
            return len(self.data) if array is None else array.nbytes
        elements = array.ravel().tolist()
        if set(map(type, elements)) == {bytes}:  # as those of programs in this process
            return 4 * len(elements) + sum(map(len, elements))
        return len(self.data)

    @property
    def data(self) -> Buffer:
        """The wire form: row-major, little-endian, BYTES elements with their lengths before them."""
        data = self._data
        if data is None:
            array = self._array
            assert array is not None, "a tensor holds data or an array"
            if self.datatype == "BYTES":
                data = encode_bytes(array.ravel())
            elif array.size:
                data = (array if array.flags.c_contiguous else np.ascontiguousarray(array)).data.cast("B")
            else:
                data = b""  # a view of nothing can't be cast
            self._data = data
        return data

    def fetch(self) -> int:
        """Brings the bytes to host memory; returns the number of copied bytes."""
        return 0

    def numpy(self) -> Array:
        """The tensor as an array of its shape; BYTES as an object array of `bytes`.

        Raises:
            UnsupportedError: The datatype has no numpy dtype (BF16).
            InvalidArgumentError: The data does not hold as many elements as the shape says.
        """
        array = self._array
        if array is None:
            dtype = NUMPY_DTYPES.get(self.datatype)
            if dtype is None:
                raise UnsupportedError(f"tensor '{self.name}' of datatype {self.datatype} has no numpy form")
            data = self._data
            assert data is not None, "a tensor holds data or an array"
            array = decode_bytes(data) if self.datatype == "BYTES" else np.frombuffer(data, dtype)
            try:
                array = array.reshape(self.shape)
            except ValueError as error:
                raise InvalidArgumentError(
                    f"tensor '{self.name}' holds {array.size} elements, which do not fill shape "
                    f"{list(self.shape)}"
                ) from error
            self._array = array
        return array

    def reshaped(self, shape: tuple[int, ...]) -> Tensor:
        """The same elements in another shape of the same size, without a copy."""
        array = None if self._array is None else self._array.reshape(shape)
        return Tensor(self.name, self.datatype, shape, self._data, array)

    def detached(self, name: str) -> Tensor:
        """A private copy of the elements under another name."""
        array, data = self._array, self._data
        if array is not None:
            if self.datatype == "BYTES":  # its elements may be no `bytes` yet, which others expect
                return Tensor(name, "BYTES", self.shape, encode_bytes(array.ravel()))
            return Tensor(name, self.datatype, self.shape, None, array.copy())
        assert data is not None, "a tensor holds data or an array"
        return Tensor(name, self.datatype, self.shape, copied(data))

    def renamed(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same elements under another name and another shape of the same size, without a copy.

        Its array can't be written to: others have the same memory.
        """
        array = self._array
        if array is not None:
            array = array.reshape(shape)  # a view, also where the shape stays
            array.flags.writeable = False
        return Tensor(name, self.datatype, shape, self._data, array)

    @property
    def has_data(self) -> bool:
        """True if the wire form exists, not only an array."""
        return self._data is not None

    @property
    def has_array(self) -> bool:
        """True if an array of the elements exists; others may hold it and write to it."""
        return self._array is not None

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.datatype}, {list(self.shape)})"


def datatype_of(array: Array) -> str:
    """The protocol's name for an array's dtype. Raises UnsupportedError: no datatype of the protocol fits."""
    name = _DATATYPE_OF.get(array.dtype)
    if name is None:
        if array.dtype.kind in "SUO":
            return "BYTES"
        if array.dtype.name == "bfloat16":  # of ml_dtypes, which need not be installed
            return "BF16"
        raise UnsupportedError(f"arrays of dtype {array.dtype} have no datatype in the protocol")
    return name


def float_array(data: Buffer, shape: tuple[int, ...]) -> Array:
    """The elements of a BF16 tensor as an array of float32, which has each of them exactly."""
    bits = np.frombuffer(data, "<u2").astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32).reshape(shape)


def brain_floats(array: Array) -> bytes:
    """An array of float32 as the data of a BF16 tensor, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    nan = np.isnan(array).reshape(-1)
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype("<u2").tobytes()


def encode_bytes(elements: Iterable[Any]) -> bytes:
    """BYTES elements in wire form; `str` elements are encoded as UTF-8."""
    chunks, remaining = list[bytes](), iter(elements)
    # To join, and to free, millions at once would hold up all other threads.
    while values := list(islice(remaining, _MOST_ELEMENTS)):
        if set(map(type, values)) != {bytes}:
            values = [bytes(each) if isinstance(each, bytes) else str(each).encode() for each in values]
        parts = [b""] * (2 * len(values))
        parts[::2] = map(STRING_LENGTH.pack, map(len, values))
        parts[1::2] = values
        chunks.append(b"".join(parts))
    return b"".join(chunks)


def decode_bytes(data: Buffer) -> Array:
    """The elements of a BYTES tensor in wire form, as a flat object array of `bytes`.

    Raises:
        InvalidArgumentError: An element runs past the end of the data.
    """
    end = len(data)
    # A slice of bytes is an element, one of a view has to be copied; the copy of a large one takes long.
    source = bytes(data) if end <= _QUICK_BYTES else memoryview(data)
    elements: list[bytes] = []
    position, unpack, keep = 0, STRING_LENGTH.unpack_from, elements.append
    try:
        while position < end:
            start = position + 4
            position = start + unpack(source, position)[0]
            keep(bytes(source[start:position]))
    except struct.error:
        raise InvalidArgumentError("BYTES tensor ends inside a length indicator") from None
    if position > end:
        raise InvalidArgumentError("BYTES tensor ends inside an element")
    array = np.empty(len(elements), dtype=object)
    for start in range(0, len(elements), _MOST_ELEMENTS):  # all at once would hold up all other threads
        array[start : start + _MOST_ELEMENTS] = elements[start : start + _MOST_ELEMENTS]
    return array


def copied(data: bytes | bytearray | memoryview) -> bytes | memoryview:
    """A private copy of the bytes; `bytes` is returned as it is.

    Large copies go through numpy, which releases the interpreter lock; `bytes` would hold it throughout.
    """
    if isinstance(data, bytes):
        return data
    if not len(data):
        return b""
    view = np.frombuffer(data, np.uint8)
    if view.size <= _QUICK_BYTES:
        return view.tobytes()
    whole = np.empty_like(view)
    np.copyto(whole, view)
    return whole.data.toreadonly()


def joined(parts: Sequence[bytes | bytearray | memoryview]) -> bytes | memoryview:
    """Concatenated parts; large ones are copied without the interpreter lock."""
    size = sum(map(len, parts))
    if size <= _QUICK_BYTES:
        return b"".join(parts)
    whole = np.empty(size, np.uint8)
    position = 0
    for part in parts:
        whole[position : position + len(part)] = np.frombuffer(part, np.uint8)
        position += len(part)
    return whole.data.toreadonly()
