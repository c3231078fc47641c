"""Imports and checks the installed grpcio, for the whole adapter."""

from __future__ import annotations

import os

# With the event-engine listener, threads of the C core read sockets and wake the poller for each event.
# Without it the polling thread reads: about 60 µs less latency and a third less CPU for a small request.
# The C core reads the variable once, so this has no effect if grpc is in use already.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")

import grpc
from grpc._cython import cygrpc

from conch.frontends.grpc.rpc_calls import IncompatibleGrpcError

__all__ = ["check_grpcio", "cygrpc", "grpc"]

TESTED_GRPCIO = ((1, 81), (1, 86))
"""The tested range of grpcio: from the first version up to, not including, the second."""

_NEEDED = (
    "BatchOperationEvent",
    "CompletionQueue",
    "CompletionType",
    "ReceiveCloseOnServerOperation",
    "ReceiveMessageOperation",
    "SendInitialMetadataOperation",
    "SendMessageOperation",
    "SendStatusFromServerOperation",
    "Server",
    "auth_context",
)


def check_grpcio() -> None:
    """Checks that the installed grpcio fits.

    Raises:
        IncompatibleGrpcError: It does not; the text says which versions do.
    """
    version = tuple(int(part) for part in grpc.__version__.split(".")[:2])
    first, last = TESTED_GRPCIO
    missing = [name for name in _NEEDED if not hasattr(cygrpc, name)]
    if not first <= version < last or missing:
        because = f" (it lacks {', '.join(missing)})" if missing else ""
        raise IncompatibleGrpcError(
            f"grpcio {grpc.__version__} does not fit conch's gRPC front end{because}; install "
            f"'grpcio>={first[0]}.{first[1]},<{last[0]}.{last[1]}'"
        )
