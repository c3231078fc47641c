"""The transports of the gRPC port."""

from __future__ import annotations

TRANSPORTS: dict[str, tuple[str, ...]] = {"grpcio": ()}
"""The flags that choose each. The transport of our own joins here, as `own`."""
