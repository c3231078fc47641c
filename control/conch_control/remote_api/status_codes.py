"""Errors of the agent to gRPC statuses, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from conch.core.details import shown
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
)

ERROR_KEY = "conch-error"
"""Trailing metadata of an error that the service has answered with: Triton's name of the code."""

TRANSIENT_KEY = "conch-may-pass"
"""Trailing metadata of an error that may be gone at the next try although its code does not say so."""

STATUSES: Mapping[int, Any] = {status.value[0]: status for status in grpc.StatusCode}
"""gRPC's status codes by number."""

_BY_STATUS = {error.grpc_status: error for error in ERRORS_BY_CODE.values()}


class UnreachableError(UnavailableError):
    """There was no answer: nobody listens there, or not in the way we speak."""


def abort(context: Any, error: ConchError, transient: bool = False) -> None:
    """Ends a call with an error.

    Args:
        context: The call's `grpc.ServicerContext`.
        error: The error.
        passing: Whether it may be gone at the next try; see `may_pass`.
    """
    metadata = ((ERROR_KEY, error.code), (TRANSIENT_KEY, "1"))
    context.set_trailing_metadata(metadata if transient else metadata[:1])
    context.abort(STATUSES[error.grpc_status], shown(error.message).decode())


def error_of(call: Any, target: str) -> ConchError:
    """The error that a call has ended with.

    Args:
        call: The `grpc.RpcError`, which is the call too.
        target: Where it went to, for people.

    Returns:
        The agent's own error where it answered, with a cause if it may pass; else one that says what is wrong
        with the connection.
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
