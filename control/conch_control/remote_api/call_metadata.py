"""Metadata and statuses of ModelControl calls: bearer tokens, errors to gRPC statuses and back."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any

import grpc

from conch.core.errors import (
    ERRORS_BY_CODE,
    CancelledError,
    ConchError,
    DeadlineExceededError,
    InternalError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
    status_details,
)

AUTHORIZATION = "authorization"
SCHEME = "Bearer "

_MISSING = "no token: the metadata 'authorization: Bearer TOKEN' is expected (--token-file of conch models)"
_WRONG = "wrong token: it is not the one in the server's --control-token-file"


class TokenGuard:
    """Method handlers for authenticated calls; a `grpc.GenericRpcHandler`."""

    def __init__(self, handlers: Any, token: str) -> None:
        self._handlers = handlers
        self._expected = (SCHEME + token).encode()

    def service(self, details: Any) -> Any:
        """The handler of a call, before any message is read."""
        shown = [value for key, value in details.invocation_metadata if key == AUTHORIZATION]
        if len(shown) == 1 and hmac.compare_digest(shown[0].encode(), self._expected):
            return self._handlers.service(details)
        error = UnauthenticatedError(_WRONG if shown else _MISSING)
        # A stream handler reads no message before it asks for one.
        return grpc.stream_stream_rpc_method_handler(lambda _, context: abort(context, error))


ERROR_KEY = "conch-error"
"""Trailing metadata with Triton's name of the error code."""

TRANSIENT_KEY = "conch-may-pass"
"""Trailing metadata that marks an error as transient although its code does not."""

STATUSES: Mapping[int, Any] = {status.value[0]: status for status in grpc.StatusCode}
"""gRPC status codes by number."""

_BY_STATUS = {error.grpc_status: error for error in ERRORS_BY_CODE.values()}


class UnreachableError(UnavailableError):
    """No answer: no server, or not a ModelControl server."""


def abort(context: Any, error: ConchError, transient: bool = False) -> None:
    """Ends a call with an error."""
    metadata = ((ERROR_KEY, error.code), (TRANSIENT_KEY, "1"))
    context.set_trailing_metadata(metadata if transient else metadata[:1])
    context.abort(STATUSES[error.grpc_status], status_details(error.message).decode())


def error_of(call: Any, target: str) -> ConchError:
    """The error of a failed call: the agent's, with a cause if transient, or one about the connection."""
    number = call.code().value[0]
    text = call.details() or call.code().name
    metadata = dict(call.trailing_metadata() or ())
    code = metadata.get(ERROR_KEY)
    if code is not None:
        error = ERRORS_BY_CODE.get(code, _BY_STATUS.get(number, InternalError))(text)
        if TRANSIENT_KEY in metadata:
            error.__cause__ = UnavailableError(f"{target} says that another try may succeed")
        return error
    if number == UnavailableError.grpc_status:
        return UnreachableError(f"{target} can't be reached: {text}")
    if number == UnsupportedError.grpc_status:
        return UnsupportedError(f"{target} has no control service: is it the control port?")
    if number == DeadlineExceededError.grpc_status:
        return UnreachableError(f"{target} has not answered in time")
    if number in (
        CancelledError.grpc_status,
        ResourceExhaustedError.grpc_status,
        UnauthenticatedError.grpc_status,
    ):
        return _BY_STATUS[number](text)
    return InternalError(f"{target} has answered as no control service does: {text}")
