"""Call metadata: restricted protocols and forwarded headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.core import make_request

from conch.access.access_guard import AccessGuard, PortRules
from conch.core.errors import ConchError, InvalidArgumentError
from conch.door.operation_table import ENDPOINTS
from conch.frontends.access_policy import parse_restricted_protocols
from conch.frontends.grpc.guarded_rpcs import guard_streams, guard_unary
from conch.frontends.header_forwarding import HeaderForwarder
from conch.protocol import inference_pb2

SERVICE = "/inference.GRPCInferenceService/"
HEALTH = "/grpc.health.v1.Health/Check"


def test_every_rpc_is_in_the_table_once() -> None:
    names = [each.rpc for each in ENDPOINTS if each.rpc and "/" not in each.rpc]
    assert sorted(names) == sorted(
        inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    )


@pytest.mark.parametrize(
    ("specifications", "restrictions"),
    [
        ([], {}),
        (["health:key=value"], {"health": ("triton-grpc-protocol-key", "value")}),
        (
            ["health,model-config:Key=a=b:c,d", "trace:k="],
            {
                "health": ("triton-grpc-protocol-key", "a=b:c,d"),
                "model-config": ("triton-grpc-protocol-key", "a=b:c,d"),
                "trace": ("triton-grpc-protocol-k", ""),
            },
        ),
    ],
)
def test_parse(specifications: list[str], restrictions: dict[str, tuple[str, str]]) -> None:
    assert parse_restricted_protocols(specifications) == restrictions


@pytest.mark.parametrize(
    ("specifications", "text"),
    [
        *(
            ([bad], f"'{bad}' is not of the form '<protocol>,<protocol>:<key>=<value>'")
            for bad in ("", "health", "health:key", ":key=value", "health:=value", "health=key:value")
        ),
        (["nonsense:key=value"], "unknown restricted protocol 'nonsense'"),
        (["health,:key=value"], "unknown restricted protocol ''"),
        (
            ["health:a=b", "trace,health:c=d"],
            "restricted protocol 'health' can not be specified in multiple config groups",
        ),
    ],
)
def test_parse_refuses(specifications: list[str], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_restricted_protocols(specifications)
    assert str(caught.value) == text


class Call:
    peer = "somewhere"

    def __init__(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self.metadata = metadata
        self.events: list[object] = []

    def header_values(self, name: str) -> list[str]:
        return [value for key, value in self.metadata if key == name and isinstance(value, str)]

    def abort(self, status: int, details: str, trailing: object) -> None:
        self.events.append((status, details))

    refuse = abort


def not_logged(error: ConchError, call: object) -> None:
    """Only refused inferences are logged."""
    raise AssertionError("this is no inference")


REFUSED = [(14, "This protocol is restricted, expecting header 'triton-grpc-protocol-key'")]


@pytest.mark.parametrize(
    ("method", "metadata", "events"),
    [
        ("ServerLive", [("triton-grpc-protocol-key", "value")], ["handled"]),
        ("ServerLive", [("other", "x"), ("triton-grpc-protocol-key", "value")], ["handled"]),
        ("ServerLive", [], REFUSED),
        ("ServerLive", [("triton-grpc-protocol-key", "wrong")], REFUSED),
        ("ServerLive", [("triton-grpc-protocol-key", "välue")], REFUSED),
        ("ServerLive", [("triton-grpc-protocol-key", b"value")], REFUSED),
        ("ServerLive", [("key", "value")], REFUSED),
        ("ModelInfer", [], ["handled"]),
        (HEALTH, [], REFUSED),
    ],
)
def test_restricted_calls(method: str, metadata: list[tuple[str, str | bytes]], events: list[object]) -> None:
    restrictions = parse_restricted_protocols(["health:key=value"])
    text = "This protocol is restricted, expecting header '{key}'"
    guard = AccessGuard(None, "grpc", PortRules(restrictions, text))
    path = method if method.startswith("/") else SERVICE + method
    call: Any = Call(metadata)
    if all(admit(call) for admit in guard_unary([path], guard, not_logged).values()):
        call.events.append("handled")
    assert call.events == events
    stream: Any = Call(metadata)
    guard_streams({path: lambda call: call.events.append("handled")}, guard, not_logged)[path](stream)  # type: ignore[attr-defined]
    assert stream.events == events


@pytest.mark.parametrize(
    ("pattern", "metadata", "parameters"),
    [
        (".*", [("a", "1"), ("b-bin", b"2")], {"a": "1"}),
        ("^x-", [("x-a", "1"), ("not-x-a", "2")], {"x-a": "1"}),
        ("AUTH", [("x-auth-y", "1"), ("other", "2")], {"x-auth-y": "1"}),
        ("nothing", [("a", "1")], None),
    ],
)
def test_forwarding(
    pattern: str, metadata: list[tuple[str, str | bytes]], parameters: dict[str, str] | None
) -> None:
    request = make_request()
    HeaderForwarder(pattern).forward(request, metadata)
    assert request.parameters == parameters


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("(?-i)^X-A|b$", ["X-A", "x-b"]),
        ("^x(?-i)-A|-b$", ["x-A", "X-A", "x-b"]),
        ("^(?:(?-i)x-a|X-B)$", ["x-a", "X-B"]),
        ("^((?-i)x)-A$", ["x-A", "x-a"]),
        (r"^[[:alpha:]]-[^[:digit:]b]\z", ["X-A", "x-A", "x-a"]),
        (r"^[\]|(?i)](?-i)$", ["("]),
    ],
)
def test_patterns_are_read_as_re2_reads_them(pattern: str, found: list[str]) -> None:
    request = make_request()
    HeaderForwarder(pattern).forward(
        request, [(key, "") for key in ("(", "X-A", "X-B", "x-A", "x-a", "x-b", "x-1")]
    )
    assert sorted(request.parameters or ()) == sorted(found)


def test_forwarding_keeps_the_parameters_of_the_request() -> None:
    request = make_request(parameters={"own": 1})
    HeaderForwarder("a").forward(request, [("a", "x")])
    assert request.parameters == {"own": 1, "a": "x"}


@pytest.mark.parametrize("key", ["sequence_id", "priority", "timeout", "headers", "triton_anything"])
def test_reserved_keys_are_not_forwarded(key: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        HeaderForwarder(".*").forward(make_request(), [(key, "1")])
    assert caught.value.message == f"Header '{key}' is reserved for Triton usage and cannot be forwarded."
    HeaderForwarder("^x").forward(make_request(), [(key, "1")])  # not forwarded, not refused


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        HeaderForwarder("(")
    with pytest.raises(ValueError, match=r"'\[:words:\]' is not a class of characters"):
        HeaderForwarder("[[:words:]]")
