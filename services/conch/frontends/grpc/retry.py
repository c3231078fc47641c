"""How clients are told when to try again: gRPC's own way for its retry policies, and HTTP's for everybody."""

from __future__ import annotations

from conch.core.errors import ConchError
from conch.frontends.grpc.adapter import Metadata

PARAMETER = "retry_after_ms"
"""The response parameter that says it in streams, whose errors are messages."""


def retry_metadata(error: ConchError) -> Metadata | None:
    """The trailing metadata of a call that ends with an error; None for none."""
    after_ms = error.retry_after_ms
    if after_ms is None:
        return None
    return (("grpc-retry-pushback-ms", str(after_ms)), ("retry-after", str(-(-after_ms // 1000))))
