"""Drives grpcio's C core directly; the only package that uses grpcio's private layer.

`grpc.server` uses the same layer (``grpc._cython.cygrpc``) but passes each call through a thread pool and
several objects. Here completion-queue events call handlers on the polling thread, handlers receive and
return bytes, and a unary answer is one batch of operations, started by the thread that has it. Handlers
return at once; models with new requests run inline later, see `conch.frontends.grpc.pollers`.
"""

from __future__ import annotations

from conch.frontends.grpc.adapter.batch_operations import Metadata
from conch.frontends.grpc.adapter.calls import StreamCall, UnaryCall
from conch.frontends.grpc.adapter.grpc_server import (
    ChannelArguments,
    Server,
    StreamHandler,
    TlsOptions,
    UnaryHandler,
)
from conch.frontends.grpc.adapter.library import IncompatibleGrpcError, check_grpcio

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
