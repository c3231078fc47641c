"""Copies of memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_QUICK_BYTES = 4 << 20


def copied(data: bytes | bytearray | memoryview) -> bytes | memoryview:
    """The same bytes in memory that nobody else writes to.

    Other threads run while many are copied: Python lets none run until `bytes` has taken them all, and
    memory that is new costs more than to write to it.
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
    """Parts one after the other, as one; other threads run while many bytes are copied."""
    size = sum(map(len, parts))
    if size <= _QUICK_BYTES:
        return b"".join(parts)
    whole = np.empty(size, np.uint8)
    position = 0
    for part in parts:
        whole[position : position + len(part)] = np.frombuffer(part, np.uint8)
        position += len(part)
    return whole.data.toreadonly()
