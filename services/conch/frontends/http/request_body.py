"""Bodies of requests while they come."""

from __future__ import annotations

import numpy as np

_MOST_ANNOUNCED = 1 << 30
_MOST_CLEARED = 256 << 10


class RequestBody:
    """A body, or what has come of it so far.

    Args:
        length: How long it will be; None if nobody knows.
        most: How long it may be.

    Attributes:
        size: How much has come.
        most: How long it may be.
    """

    __slots__ = ("_block", "_parts", "most", "size")

    def __init__(self, length: int | None, most: int) -> None:
        self._parts: list[bytes] = []
        self._block = None if length is None or length > _MOST_ANNOUNCED else _block(length)
        self.size = 0
        self.most = most

    def add(self, part: bytes) -> None:
        """Adds a piece."""
        block = self._block
        if block is None:
            self._parts.append(part)
        else:
            block[self.size : self.size + len(part)] = part
        self.size += len(part)

    def body(self) -> memoryview:
        """The body, once it is complete; may copy all of it."""
        if self._block is not None:
            return memoryview(self._block)[: self.size].toreadonly()
        return memoryview(b"".join(self._parts))


def _block(length: int) -> bytearray | memoryview:
    """Memory for a body.

    The system gives that of a large one only as it is written to: a client has to send what it announces,
    and no thread stands still while all of it is cleared, as it would be for a `bytearray`.
    """
    return bytearray(length) if length <= _MOST_CLEARED else np.empty(length, np.uint8).data
