"""Headers and trailers of calls."""

from __future__ import annotations

import base64
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.frontends.grpc.transport.metadata import (
    HEAD,
    RefusedRequestError,
    RequestHead,
    error_head,
    trailers,
)

CALL = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/package.Service/Method"),
    (b":authority", b"host"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)


def test_what_a_call_says() -> None:
    head = RequestHead(
        (
            *CALL,
            (b"grpc-timeout", b"20m"),
            (b"grpc-encoding", b"gzip"),
            (b"grpc-accept-encoding", b"identity,gzip"),
            (b"user-agent", b"test"),
            (b"key", b"one"),
            (b"key", b" two\t"),
            (b"raw-bin", base64.b64encode(b"\0\1").rstrip(b"=") + b"," + base64.b64encode(b"more")),
            (b"latin", b"\xe9"),
        )
    )
    assert head.path == "/package.Service/Method"
    assert head.timeout_ns == 20_000_000
    assert head.encoding == "gzip"
    assert head.accepts == {"identity", "gzip"}
    assert head.metadata == (
        ("user-agent", "test"),
        ("key", "one"),
        ("key", "two"),
        ("raw-bin", b"\0\1"),
        ("raw-bin", b"more"),
        ("latin", "é"),
    )


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ((b":method", b"GET"), b"405"),
        ((b"content-type", b"application/json"), b"415"),
        ((b"content-type", b"application/grpcish"), b"415"),
    ],
)
def test_what_is_no_call(changed: tuple[bytes, bytes], status: bytes) -> None:
    pairs = tuple(changed if name == changed[0] else (name, value) for name, value in CALL)
    with pytest.raises(RefusedRequestError) as raised:
        RequestHead(pairs)
    assert raised.value.answer[0] == (b":status", status)


@pytest.mark.parametrize(
    ("pair", "status", "text"),
    [
        ((b"grpc-timeout", b"5"), b"13", b"grpc-timeout"),
        ((b"grpc-timeout", b"123456789S"), b"13", b"grpc-timeout"),
        ((b"grpc-timeout", "٣S".encode()), b"13", b"grpc-timeout"),
        ((b"key-bin", b"%%%"), b"13", b"base64"),
        ((b"grpc-encoding", b"snappy"), b"12", b"snappy"),
    ],
)
def test_malformed_headers(pair: tuple[bytes, bytes], status: bytes, text: bytes) -> None:
    with pytest.raises(RefusedRequestError) as raised:
        RequestHead((*CALL, pair))
    answer = dict(raised.value.answer)
    assert answer[b"grpc-status"] == status
    assert text in answer[b"grpc-message"]


@pytest.mark.parametrize(
    "kind", [b"application/grpc+proto", b"application/grpc;charset=utf-8", b"Application/GRPC"]
)
def test_content_types(kind: bytes) -> None:
    RequestHead((*CALL[:-1], (b"content-type", kind)))


@given(st.text(), st.integers(1, 16))
def test_a_status_message_arrives_as_it_was(details: str, status: int) -> None:
    pairs = dict(trailers(status, details, (("key", "a\nb"), ("raw-bin", b"\xff\0"))))
    message = pairs.get(b"grpc-message", b"")
    assert all(0x20 <= byte < 0x7F for byte in message)
    assert pairs[b"key"] == b"a b"
    assert base64.b64decode(pairs[b"raw-bin"] + b"==") == b"\xff\0"
    if len(details) < 1000:
        assert unquote_to_bytes(message) == details.encode(errors="replace")
    assert error_head(status, details, None)[: len(HEAD)] == HEAD
