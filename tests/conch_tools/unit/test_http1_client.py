"""Responses of HTTP as the load's client reads them, however they arrive."""

from __future__ import annotations

import json
import socket
from contextlib import closing

import pytest

from conch_tools.connection import Endpoint
from conch_tools.perf.load.calls import LoadCall
from conch_tools.perf.load.http1_client import ERROR_EVENT, MALFORMED, Http1Client
from conch_tools.perf.load.ready_requests import ReadyRequest


class _Peer(Endpoint):
    """The other end of a pair of sockets."""

    def connect(self, timeout_s: float) -> socket.socket:
        ours, theirs = socket.socketpair()
        object.__setattr__(self, "end", theirs)
        return ours


class _Ended:
    def __init__(self) -> None:
        self.errors: list[str] = []
        self.times: list[int] = []
        self.texts: list[str] = []

    def call_ended(self, call: LoadCall, error: str, now_ns: int) -> None:
        self.errors.append(error)

    def explained(self, error: str, text: str) -> None:
        self.texts.append(text)

    def responded(self, call: LoadCall, now_ns: int) -> None:
        self.times.append(now_ns)


def _chunked(*contents: bytes, kind: bytes = b"text/event-stream; charset=utf-8") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in (*contents, b""))


def _sized(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


_EVENTS = [b"data: one\n\ndata: t", b"wo\n\n:\n\n", b"event: x\r\ndata: three\r\n\r\n"]


def _chunk(**member: object) -> bytes:
    choices = [] if "usage" in member else [{"index": 0, **member}]
    return b"data: " + json.dumps({"object": "chat.completion.chunk", "choices": choices}).encode()


_ROLE = _chunk(delta={"role": "assistant", "content": ""})
_TEXT, _THOUGHT = _chunk(delta={"content": " "}), _chunk(delta={"reasoning_content": "hm"})
_LEGACY = _chunk(text="a")
_MARKS = [_chunk(delta={}, finish_reason="stop"), _chunk(usage=1), _chunk(text="")]


@pytest.mark.parametrize("piece", [1, 2, 5, 64, 1000])
@pytest.mark.parametrize(
    ("response", "error", "kept"),
    [
        (_chunked(*_EVENTS, b"data: [DONE]\n\n"), "", [b"data: one", b"data: two", b"event: x\ndata: three"]),
        (_chunked(*_EVENTS[:2], b'data: {"error":"no"}\n\n'), ERROR_EVENT, [b"data: one", b"data: two"]),
        (
            _chunked(*(each + b"\n\n" for each in (_ROLE, _THOUGHT, _TEXT, _LEGACY, *_MARKS))),
            "",
            [_THOUGHT, _TEXT, _LEGACY],
        ),
        (_chunked(b"abc", b"0\r\n\r\n", kind=b"text/plain"), "", [b"abc0\r\n\r\n"]),
        (_sized(b"abcdef"), "", [b"abcdef"]),
        (_sized(b'{"error": "no"}').replace(b"200 OK", b"400 Bad Request"), "HTTP 400", []),
        (_chunked(b"").replace(b"\r\n\r\n0", b"\r\n\r\nx"), MALFORMED, []),
    ],
    ids=["events", "error", "chat", "chunks", "length", "refusal", "malformed"],
)
def test_reads_a_response_in_any_pieces(response: bytes, error: str, kept: list[bytes], piece: int) -> None:
    peer, ended = _Peer("http", "", 0), _Ended()
    client = Http1Client(peer, "/", ended)
    with closing(peer.end), closing(client):  # type: ignore[attr-defined]
        call = LoadCall(ReadyRequest(b"{}"), 0, keeps=True)
        client.send(call, 1)
        client.flush(1)
        for now_ns, at in enumerate(range(0, len(response), piece), 2):
            peer.end.sendall(response[at : at + piece])  # type: ignore[attr-defined]
            client.read(now_ns)
        assert ended.errors == [error]
        assert ended.texts == (["no"] if error and error != MALFORMED else [])
        assert call.kept is not None
        assert [each.body for each in call.kept] == kept
        assert call.responses == len(kept)
        if response.find(b"event-stream") > 0 and kept:
            assert len(ended.times) == len(kept)
            assert ended.times == sorted(ended.times)
            assert call.last_ns == ended.times[-1]
        assert client.takes(-1) is (error != MALFORMED)
