"""The gRPC transport on grpcio: drives its C core directly; the only package that uses its private layer.

`grpc.server` uses the same layer (``grpc._cython.cygrpc``) but passes each call through a thread pool and
several objects. Here completion-queue events call handlers on the polling thread, handlers receive and
return bytes, and a unary answer is one batch of operations, started by the thread that has it. Handlers
return at once; models with new requests run inline later, see `pollers`.
"""

from __future__ import annotations

from conch.frontends.grpc.adapter.grpc_server import (
    ChannelArguments,
    Server,
    StreamHandler,
    UnaryHandler,
)
from conch.frontends.grpc.adapter.grpcio_calls import StreamCall, UnaryCall
from conch.frontends.grpc.adapter.library import check_grpcio

__all__ = [
    "ChannelArguments",
    "Server",
    "StreamCall",
    "StreamHandler",
    "UnaryCall",
    "UnaryHandler",
    "check_grpcio",
]
