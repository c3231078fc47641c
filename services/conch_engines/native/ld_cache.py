"""Reads ``/etc/ld.so.cache``, which ldconfig(8) writes: the libraries of the system's directories."""

from __future__ import annotations

import os
import struct
from pathlib import Path

CACHE = Path("/etc/ld.so.cache")

_OLD_MAGIC = b"ld.so-1.7.0"
_OLD_HEADER, _OLD_ENTRY = 16, 12
_MAGIC = b"glibc-ld.so.cache1.1"
_HEADER = "=20sI24x"
_ENTRY = "=iIIIQ"
_MOST_BYTES = 1 << 26


def read_ld_cache(path: Path = CACHE) -> dict[str, list[str]]:
    """Paths of each library by its name, in their order; nothing from a file that the loader would ignore."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return {}
        data = path.read_bytes()
    except OSError:
        return {}
    if data.startswith(_OLD_MAGIC) and len(data) >= _OLD_HEADER:
        # The table of old loaders comes first, and the other one at a multiple of 8 behind it.
        (count,) = struct.unpack_from("=I", data, _OLD_HEADER - 4)
        data = data[(_OLD_HEADER + count * _OLD_ENTRY + 7) // 8 * 8 :]
    if not data.startswith(_MAGIC) or len(data) < struct.calcsize(_HEADER):
        return {}
    _, count = struct.unpack_from(_HEADER, data)
    start = struct.calcsize(_HEADER)
    table = data[start : start + count * struct.calcsize(_ENTRY)]
    if len(table) != count * struct.calcsize(_ENTRY):
        return {}
    found: dict[str, list[str]] = {}
    for _, key, value, _, _ in struct.iter_unpack(_ENTRY, table):
        name, place = _string(data, key), _string(data, value)
        if name and place:
            found.setdefault(name, []).append(place)
    return found


def _string(data: bytes, offset: int) -> str:
    return os.fsdecode(data[offset : max(data.find(b"\0", offset), offset)])
