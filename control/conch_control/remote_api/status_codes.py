"""Maps errors to gRPC statuses and back."""

from __future__ import annotations

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
    """Ends a call with an error.

    Args:
        context: The `grpc.ServicerContext`.
        error: The error.
        transient: Marks the error as transient; see `is_transient`.
    """
    metadata = ((ERROR_KEY, error.code), (TRANSIENT_KEY, "1"))
    context.set_trailing_metadata(metadata if transient else metadata[:1])
    context.abort(STATUSES[error.grpc_status], status_details(error.message).decode())


def error_of(call: Any, target: str) -> ConchError:
    """The error of a failed call.

    Args:
        call: The `grpc.RpcError`, which is also the call.
        target: Server address, for texts.

    Returns:
        The agent's error, with a cause if transient; or an error about the connection.
    """
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
