"""Connections on which something goes wrong, or another protocol is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.raw_http import Response, head, infer_body, raw_http, request
from tests.support.servers import ServerProcess, eventually, serving, write_probe

INFER = "/v2/models/probe/infer"
GENERATE = "/v2/models/probe/generate"
LIVE = request("GET", "/v2/health/live")
UPGRADE = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server with one model."""
    write_probe(tmp_path / "models")
    with serving(tmp_path / "models") as server:
        yield server


def values(response: Response | None) -> list[float]:
    """What a model has answered."""
    assert response is not None and response.status == 200, response
    found: list[float] = response.json()["outputs"][0]["data"]
    return found


@pytest.mark.parametrize("chunked", [False, True])
def test_another_protocol_is_not_spoken(server: ServerProcess, chunked: bool) -> None:
    """A request that asks for one is answered as any other, body and all, and so is what comes behind it."""
    body = infer_body("IN", "FP32", [2.5])
    with raw_http(server.http_address) as connection:
        one = request("POST", INFER, body, *UPGRADE)
        if chunked:
            one = head("POST", INFER, "Transfer-Encoding: chunked", *UPGRADE)
            one += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        connection.send((one + LIVE) * 20)
        for _ in range(20):
            assert values(connection.response()) == [2.5]
            live = connection.response()
            assert live is not None and live.status == 200
        split = len(one) - 5
        connection.send(one[:split])
        connection.send(one[split:])
        assert values(connection.response()) == [2.5]


def test_tunnels_are_refused(server: ServerProcess) -> None:
    with raw_http(server.http_address) as connection:
        connection.send(b"CONNECT conch:443 HTTP/1.1\r\nHost: conch\r\n\r\n" + LIVE)
        assert [response.status for response in connection.responses()] == [400]


@pytest.mark.parametrize("path", [INFER, GENERATE])
@pytest.mark.parametrize(
    "wrong",
    [
        b"\0\r\n\r\n",
        head("POST", INFER, "Transfer-Encoding: chunked") + b"zero\r\n\r\n",
        LIVE + head("POST", INFER, "Transfer-Encoding: chunked") + b"zero\r\n\r\n",
        head("GET", "/v2", "X: " + 1_000_000 * "y"),
    ],
)
def test_what_came_before_an_error_is_answered_first(
    server: ServerProcess, tmp_path: Path, path: str, wrong: bytes
) -> None:
    """Or the client would take the error for the answer to it."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    parameters = {"started": str(begun), "wait_for": str(go)}
    body = json.dumps({"IN": 1.5, **parameters}).encode()
    if path == INFER:
        body = infer_body("IN", "FP32", [1.5], parameters=parameters)
    with raw_http(server.http_address) as connection:
        connection.send_while_taken(request("POST", path, body) + wrong)
        eventually(begun.exists, "the model runs")
        go.touch()
        responses = list(connection.responses())
    assert responses[0].status == 200 and b"1.5" in responses[0].body
    later = [response.status for response in responses[1:]]
    assert later in ([], [400], [200]) if wrong.startswith(LIVE) else later in ([], [400])
