"""Decompression of what clients send, in steps."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple

from conch.core.tensor import Buffer
from conch.frontends.yield_gil import yield_gil

STEP_BYTES = 1 << 20
INPUT_STEP_BYTES = 256 << 10  # zlib copies what a step leaves of it


class Inflated(NamedTuple):
    """Decompressed data.

    Attributes:
        plain: The data, as far as it is within the limit and one byte more.
        left: Bytes behind the compressed data; None if its end is missing.
    """

    plain: memoryview
    left: int | None


def inflate(data: Buffer, window_bits: int, most_bytes: int, hold: Callable[[int], object]) -> Inflated:
    """Decompresses one zlib or gzip stream; calls `yield_gil` after each step.

    Args:
        data: The compressed data.
        window_bits: Its format, as zlib has it.
        most_bytes: Limit of the plain data.
        hold: Called with the bytes that each step adds; may raise to refuse them.

    Raises:
        zlib.error: The data is damaged.
        ConchError: The work is abandoned, see `yield_gil`.
    """
    machine = zlib.decompressobj(window_bits)
    view = memoryview(data)
    plain = bytearray()  # the allocator moves the pages of a large one as it grows: nothing is copied
    read = 0
    while True:
        given: Buffer = machine.unconsumed_tail
        if not given:
            given, read = view[read : read + INPUT_STEP_BYTES], min(read + INPUT_STEP_BYTES, len(view))
        part = machine.decompress(given, min(STEP_BYTES, most_bytes + 1 - len(plain)))
        hold(len(part))
        plain += part
        if machine.eof or len(plain) > most_bytes:
            return Inflated(memoryview(plain).toreadonly(), len(view) - read + len(machine.unused_data))
        if not (given or part):
            return Inflated(memoryview(plain).toreadonly(), None)
        yield_gil()
