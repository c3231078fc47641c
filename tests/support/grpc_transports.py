"""The transports of the gRPC port."""

from __future__ import annotations

TRANSPORTS: dict[str, tuple[str, ...]] = {
    "own": ("--grpc-transport=own",),
    "grpcio": ("--grpc-transport=grpcio",),
}
"""The flags that choose each."""
