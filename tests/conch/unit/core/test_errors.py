"""The tree of errors: codes, labels and statuses as Triton maps them."""

from __future__ import annotations

import grpc
import pytest

from conch.core.errors import (
    ERRORS_BY_CODE,
    ConchError,
    InternalError,
    NotFoundError,
    as_conch_error,
    error_text,
)


@pytest.mark.parametrize(
    ("code", "label", "grpc_status", "http_status"),
    [
        ("UNKNOWN", "Unknown", "UNKNOWN", 400),
        ("INTERNAL", "Internal", "INTERNAL", 500),
        ("NOT_FOUND", "Not found", "NOT_FOUND", 404),
        ("INVALID_ARG", "Invalid argument", "INVALID_ARGUMENT", 400),
        ("UNAVAILABLE", "Unavailable", "UNAVAILABLE", 503),
        ("RESOURCE_EXHAUSTED", "Resource exhausted", "RESOURCE_EXHAUSTED", 429),
        ("UNSUPPORTED", "Unsupported", "UNIMPLEMENTED", 501),
        ("FAILED_PRECONDITION", "Failed precondition", "FAILED_PRECONDITION", 409),
        ("ALREADY_EXISTS", "Already exists", "ALREADY_EXISTS", 400),
        ("DEADLINE_EXCEEDED", "Deadline exceeded", "DEADLINE_EXCEEDED", 504),
        ("CANCELLED", "Cancelled", "CANCELLED", 400),
        ("OUT_OF_RANGE", "Out of range", "OUT_OF_RANGE", 400),
        ("UNAUTHENTICATED", "Unauthenticated", "UNAUTHENTICATED", 401),
        ("PERMISSION_DENIED", "Permission denied", "PERMISSION_DENIED", 403),
    ],
)
def test_each_code(code: str, label: str, grpc_status: str, http_status: int) -> None:
    error = ERRORS_BY_CODE[code]("text")
    assert isinstance(error, ConchError)
    assert (error.code, error.label, error.http_status) == (code, label, http_status)
    assert error.grpc_status == grpc.StatusCode[grpc_status].value[0]
    assert error.message == str(error) == "text"
    assert error_text(error) == f"{label} - text"


def test_there_are_no_other_codes() -> None:
    assert len(ERRORS_BY_CODE) == 14
    assert set(ConchError.__subclasses__()) == set(ERRORS_BY_CODE.values())


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad"), "bad"),
        (ValueError(), "ValueError"),
        (SystemExit(1), "1"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_foreign_errors_become_internal_with_their_message(error: BaseException, text: str) -> None:
    shown = as_conch_error(error)
    assert type(shown) is InternalError
    assert shown.message == text


def test_own_errors_stay_themselves() -> None:
    error = NotFoundError("gone")
    assert as_conch_error(error) is error
