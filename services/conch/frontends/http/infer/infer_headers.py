"""Headers of infer requests: lengths, and forwarding as parameters.

Used by: `infer_response`, `infer_route`, `server_options`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest
from conch.frontends.grpc.metadata_forwarding import HeaderForwarder

_NUMBER = re.compile(rb"[ \t]*[-+]?[0-9]+[ \t]*")
_LEAST, _MOST = -(2**31), 2**31 - 1
HEAD_LENGTH = b"inference-header-content-length"


def head_length(value: bytes) -> int:
    """Returns the length of the JSON, 0 for a raw request, from its header.

    Raises:
        InvalidArgumentError: The header is no number; texts are Triton's.
    """
    text = value.decode("latin-1")
    if _NUMBER.fullmatch(value) is None:
        raise InvalidArgumentError(f"Unable to parse Inference-Header-Content-Length, got: {text}")
    number = int(value) if len(value) < 32 else _MOST + 1
    if not _LEAST <= number <= _MOST:
        raise InvalidArgumentError(
            f"Unable to parse Inference-Header-Content-Length, value is out of range [ {_LEAST}, {_MOST} ], "
            f"got: {text}"
        )
    return number


def check_head(head: int | None, size: int, most_bytes: int) -> None:
    """Checks the JSON length against the body length.

    Raises:
        InvalidArgumentError: The length is out of range; texts are Triton's.
    """
    if head is not None and not 0 <= head <= size:
        raise InvalidArgumentError(f"inference header size should be in range (0, {size}), got: {head}")
    if head == 0 and size > most_bytes:
        raise InvalidArgumentError(
            f"Raw input has a byte_size ({size} bytes) that exceeds the maximum allowed value of "
            f"{most_bytes} bytes. Use --http-max-input-size to increase the limit."
        )
    length = size if head is None else head
    if length > most_bytes:
        raise InvalidArgumentError(
            f"request JSON size of {length} bytes exceeds the maximum allowed input size of {most_bytes} "
            f"bytes. Use --http-max-input-size to increase the limit."
        )


Forward = Callable[[InferenceRequest, Iterable[tuple[bytes, bytes]]], None]


def forwarder(pattern: str) -> Forward | None:
    """Returns a function that adds matching headers to the parameters; None without a pattern.

    Raises:
        ValueError: The pattern is not a regular expression.
    """
    if not pattern:
        return None
    forward = HeaderForwarder(pattern)

    def add(request: InferenceRequest, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Adds them. Raises InvalidArgumentError: a matching name is reserved."""
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        forward(request, pairs)

    return add
