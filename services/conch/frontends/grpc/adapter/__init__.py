"""grpcio's C core, driven directly: the only package that touches grpcio's private layer.

`grpc.server` is written on the same layer (``grpc._cython.cygrpc``) but hands every call through a thread
pool and several objects. Here completion-queue events call their handler on the polling thread, handlers
take and give bytes, and a unary answer is one batch of operations started by whichever thread has it.

Handlers return at once; a model that has got requests is led later, see `conch.frontends.grpc.pollers`.
"""

from __future__ import annotations

from conch.frontends.grpc.adapter.batch_operations import Metadata
from conch.frontends.grpc.adapter.calls import StreamCall, UnaryCall
from conch.frontends.grpc.adapter.library import IncompatibleGrpcError, check_grpcio
from conch.frontends.grpc.adapter.server import (
    ChannelArguments,
    Server,
    StreamHandler,
    TlsOptions,
    UnaryHandler,
)

__all__ = [
    "ChannelArguments",
    "IncompatibleGrpcError",
    "Metadata",
    "Server",
    "StreamCall",
    "StreamHandler",
    "TlsOptions",
    "UnaryCall",
    "UnaryHandler",
    "check_grpcio",
]
