"""Requests and answers: contract tests check them on conch, differential tests ask a real Triton too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from tests.support.servers import RawClient


@dataclass(frozen=True)
class Case:
    """A gRPC message and its outcome: the answer as plain data, or an error's code and text."""

    message: Any
    expected: Any


def refusal(message: Any, text: str, code: str = "INVALID_ARGUMENT") -> Case:
    """A message that is answered with an error."""
    return Case(message, (code, text))


def outcome(call: Callable[[], Any]) -> Any:
    """The answer as plain data, or the error's code and text."""
    try:
        return MessageToDict(call(), preserving_proto_field_name=True)
    except grpc.RpcError as error:
        return error.code().name, error.details()


def check(raw: RawClient, case: Case) -> None:
    """Sends a case's message to conch, which must answer as expected."""
    assert outcome(lambda: raw.unary(case.message)) == case.expected
