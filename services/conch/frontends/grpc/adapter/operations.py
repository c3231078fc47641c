"""Operations of the C core that calls of both kinds need."""

from __future__ import annotations

from typing import Any

from conch.frontends.grpc.adapter.library import cygrpc

OK = 0
UNIMPLEMENTED = 12

# Without metadata or details these two hold nothing of a call, so all calls share them.
SEND_NO_METADATA = cygrpc.SendInitialMetadataOperation(None, 0)
SEND_OK = cygrpc.SendStatusFromServerOperation(None, OK, b"", 0)

_MOST_DETAILS = 4096


def ignore(event: Any) -> None:
    """The tag of operations whose end nobody waits for."""


def error_operations(status: int, details: str) -> tuple[Any, ...]:
    """The operations that end a call with an error."""
    return (SEND_NO_METADATA, cygrpc.SendStatusFromServerOperation(None, status, shown(details), 0))


def abort(call: Any, status: int, details: str) -> None:
    """Ends a call of which nothing has been read or sent."""
    operations = (*error_operations(status, details), cygrpc.ReceiveCloseOnServerOperation(0))
    call.start_server_batch(operations, ignore)


def shown(details: str) -> bytes:
    """Status details as they can be sent: clients refuse trailers of more than some kilobytes."""
    encoded = details.encode(errors="replace")
    if len(encoded) > _MOST_DETAILS:
        encoded = encoded[:_MOST_DETAILS].decode(errors="ignore").encode() + " …".encode()
    return encoded
