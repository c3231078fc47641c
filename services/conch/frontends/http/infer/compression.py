"""gzip and deflate compression of HTTP bodies."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Buffer
from conch.frontends.inflation import inflate

ENCODINGS = (b"gzip", b"deflate")
"""Supported encodings of requests and responses."""


def decompressed(body: memoryview, most_bytes: int, hold: Callable[[int], object]) -> memoryview:
    """Decompresses a body; detects the format by its header.

    Args:
        body: The compressed body.
        most_bytes: Limit of the plain body.
        hold: See `inflate`.

    Raises:
        InvalidArgumentError: The content is too large or damaged.
    """
    if not len(body):
        raise InvalidArgumentError("nothing to be decompressed")
    try:
        plain, left = inflate(body, zlib.MAX_WBITS | 32, most_bytes, hold)
    except zlib.error as error:
        raise InvalidArgumentError(f"the compressed request body is damaged: {error}") from None
    if len(plain) > most_bytes:
        raise InvalidArgumentError(
            f"Decompressed data size exceeds the maximum allowed value of {most_bytes} bytes. Use "
            f"--http-max-input-size to increase the limit."
        )
    if left is None:
        raise InvalidArgumentError("the compressed request body ends too early")
    return plain


def compressed(parts: list[Buffer], encoding: bytes) -> list[Buffer]:
    """Compresses a body."""
    deflate = zlib.compressobj(wbits=zlib.MAX_WBITS | (16 if encoding == b"gzip" else 0))
    out: list[Buffer] = [deflate.compress(part) for part in parts]
    out.append(deflate.flush())
    return out


@lru_cache(64)
def accepted(header: bytes) -> bytes | None:
    """Selects the response encoding by ``Accept-Encoding``; None for identity.

    The first with the highest weight wins; an invalid weight counts as 0.
    """
    best: bytes | None = None
    most = 0.0
    for item in header.split(b","):
        name, *parameters = (part.strip() for part in item.split(b";"))
        if name not in (*ENCODINGS, b"identity"):
            continue
        weight = _weight(parameters)
        if weight > most:
            best, most = name, weight
    return None if best == b"identity" else best


def _weight(parameters: list[bytes]) -> float:
    for parameter in parameters:
        key, _, value = parameter.partition(b"=")
        if key.strip() == b"q":
            try:
                weight = float(value)
            except ValueError:
                return 0.0
            return weight if 0 <= weight <= 1 else 0.0
    return 1.0
