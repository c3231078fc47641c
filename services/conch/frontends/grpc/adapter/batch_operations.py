"""Batch operations of the C core for unary calls and streams."""

from __future__ import annotations

from typing import Any

from conch.core.errors import status_details
from conch.frontends.grpc.adapter.library import cygrpc
from conch.frontends.grpc.rpc_calls import Metadata

OK = 0
RESOURCE_EXHAUSTED = 8
UNIMPLEMENTED = 12

_ENTRY_BYTES = 32

# Without metadata or details these two hold no state of a call, so all calls share them.
SEND_NO_METADATA = cygrpc.SendInitialMetadataOperation(None, 0)
SEND_OK = cygrpc.SendStatusFromServerOperation(None, OK, b"", 0)
# For calls that are being answered; shared, as its result is not read.
RECEIVE_CLOSE = cygrpc.ReceiveCloseOnServerOperation(0)


def send_metadata(compression: str | None) -> Any:
    """Returns the operation that sends headers and sets the compression of messages."""
    if compression is None:
        return SEND_NO_METADATA
    return cygrpc.SendInitialMetadataOperation((("grpc-internal-encoding-request", compression),), 0)


def metadata_bytes(metadata: Metadata) -> int:
    """Returns the size of metadata as HTTP/2 counts it."""
    return sum(len(key) + len(value) + _ENTRY_BYTES for key, value in metadata)


def ignore(event: Any) -> None:
    """The tag of operations whose completion is ignored."""


def error_operations(status: int, details: str, trailing: Metadata | None = None) -> tuple[Any, ...]:
    """Returns the operations that end a call with an error and trailing metadata."""
    send_status = cygrpc.SendStatusFromServerOperation(trailing, status, status_details(details), 0)
    return (SEND_NO_METADATA, send_status)


def abort(call: Any, status: int, details: str, trailing: Metadata | None = None) -> None:
    """Ends a call before anything was read or sent."""
    call.start_server_batch((*error_operations(status, details, trailing), RECEIVE_CLOSE), ignore)
