"""Reads the metadata of GGUF files, and writes files; see GGUF's specification, version 3."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_MAGIC = b"GGUF"
_ALIGNMENT = 32
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_UINT32, _INT32, _FLOAT32, _STRING, _ARRAY = 4, 5, 6, 8, 9
_MOST_KEYS = 65536
_MOST_DIMENSIONS = 8
_MOST_BYTES = 1 << 26  # of one string or array: vocabularies have a few MB


@dataclass(frozen=True, slots=True)
class Texts:
    """An array of texts, such as the vocabulary.

    Attributes:
        longest: Bytes of the longest one.
    """

    longest: int


def read_metadata(path: Path) -> dict[str, Any]:
    """The values of a file by key; arrays of numbers are None, those of texts `Texts`.

    Raises:
        ValueError: The file is no GGUF file, or is cut.
        OSError: It can't be read.
    """
    with path.open("rb") as file:
        metadata, _ = _read_head(file)
    return metadata


def read_layout(path: Path) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]], int]:
    """As `read_metadata`, and the name, shape, kind and offset of each tensor, and where they end.

    Raises:
        ValueError: The file is no GGUF file, or is cut.
        OSError: It can't be read.
    """
    with path.open("rb") as file:
        metadata, count = _read_head(file)
        if count > _MOST_KEYS:
            raise ValueError(f"it has {count} tensors, which is not supported")
        try:
            return metadata, [_read_tensor(file) for _ in range(count)], file.tell()
        except struct.error:
            raise ValueError("it is cut") from None


def _read_head(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The values of a file, and the number of its tensors."""
    if file.read(4) != _MAGIC:
        raise ValueError("it does not begin with 'GGUF'")
    try:
        version, tensors, count = _unpack(file, "IQQ")
        if version not in (2, 3) or count > _MOST_KEYS:
            raise ValueError(f"it has version {version} and {count} keys, which is not supported")
        return dict(_read_entry(file) for _ in range(count)), tensors
    except struct.error:
        raise ValueError("it is cut") from None


def _read_tensor(file: BinaryIO) -> tuple[str, tuple[int, ...], int, int]:
    name = _read_value(file, _STRING)
    (dimensions,) = _unpack(file, "I")
    if dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"its tensor '{name}' has {dimensions} dimensions")
    shape = _unpack(file, f"{dimensions}Q")
    kind, offset = _unpack(file, "IQ")
    return name, shape, kind, offset


def _unpack(file: BinaryIO, layout: str) -> Any:
    layout = f"<{layout}"
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _read_entry(file: BinaryIO) -> tuple[str, Any]:
    key = _read_value(file, _STRING)
    (kind,) = _unpack(file, "I")
    return key, _read_value(file, kind)


def _read_value(file: BinaryIO, kind: int) -> Any:
    if kind in _NUMBERS:
        return _unpack(file, _NUMBERS[kind])[0]
    if kind == _STRING:
        return file.read(_text_length(file)).decode(errors="replace")
    if kind != _ARRAY:
        raise ValueError(f"it has a value of the unknown type {kind}")
    of, count = _unpack(file, "IQ")
    if count > _MOST_BYTES:
        raise ValueError("it has an array that is too long")
    if of == _ARRAY:
        raise ValueError("it has an array of arrays, which is not supported")
    if of in _NUMBERS:
        file.seek(count * struct.calcsize(_NUMBERS[of]), 1)
        return None
    if of != _STRING:
        raise ValueError(f"it has an array of the unknown type {of}")
    return Texts(max((_skip_text(file) for _ in range(count)), default=0))


def _skip_text(file: BinaryIO) -> int:
    length = _text_length(file)
    file.seek(length, 1)
    return length


def _text_length(file: BinaryIO) -> int:
    length: int = _unpack(file, "Q")[0]
    if length > _MOST_BYTES:
        raise ValueError("it has a string of more than 64 MiB")
    return length


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Writes a file.

    Args:
        path: The file.
        metadata: Strings, floats, whole numbers, and lists of strings or whole numbers.
        tensors: Arrays of float32 or float16.
    """
    head = [_MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        head += (_text(key), _value(value))
    body: list[bytes] = []
    offset = 0
    for name, array in tensors.items():
        dimensions = array.shape[::-1]
        head += (_text(name), struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions))
        head.append(struct.pack("<IQ", 0 if array.dtype == np.float32 else 1, offset))
        body.append(_padded(array.tobytes()))
        offset += len(body[-1])
    path.write_bytes(_padded(b"".join(head)) + b"".join(body))


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
    return struct.pack(f"<IIQ{len(value)}i", _ARRAY, _INT32, len(value), *value)
