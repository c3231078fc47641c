"""Buffers a request body while it is received. Used by: `fast_path`, `http_connection`, `infer_fast_path`."""

from __future__ import annotations

import numpy as np

_MOST_ANNOUNCED = 1 << 30
_MOST_CLEARED = 256 << 10


class RequestBody:
    """A partial or complete body.

    Args:
        length: Announced length in bytes, or None.
        most: Limit in bytes.

    Attributes:
        size: Bytes received.
        most: Limit in bytes.
    """

    __slots__ = ("_block", "_parts", "most", "size")

    def __init__(self, length: int | None, most: int) -> None:
        self._parts: list[bytes] = []
        self._block = None if length is None or length > _MOST_ANNOUNCED else _block(length)
        self.size = 0
        self.most = most

    def add(self, part: bytes) -> None:
        """Appends a piece."""
        block = self._block
        if block is None:
            self._parts.append(part)
        else:
            block[self.size : self.size + len(part)] = part
        self.size += len(part)

    def body(self) -> memoryview:
        """Returns the complete body; may copy it."""
        if self._block is not None:
            return memoryview(self._block)[: self.size].toreadonly()
        return memoryview(b"".join(self._parts))


def _block(length: int) -> bytearray | memoryview:
    """Allocates memory for a body.

    A large block is left uninitialised: pages are allocated as bytes arrive, and no time is spent on zeroing.
    """
    return bytearray(length) if length <= _MOST_CLEARED else np.empty(length, np.uint8).data
