"""Request headers forwarded to models as request parameters (``--http-header-forward-pattern``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from conch.core.request import InferenceRequest
from conch.frontends.grpc.forward import HeaderForwarder

Forward = Callable[[InferenceRequest, Iterable[tuple[bytes, bytes]]], None]


def forwarder(pattern: str) -> Forward | None:
    """What adds matching headers to a request's parameters; None without a pattern.

    Raises:
        ValueError: The pattern is not a regular expression.
    """
    if not pattern:
        return None
    forward = HeaderForwarder(pattern)

    def add(request: InferenceRequest, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Adds them.

        Raises:
            InvalidArgumentError: A matching name is reserved.
        """
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        forward(request, pairs)

    return add
