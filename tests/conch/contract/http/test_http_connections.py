"""Connections on which something goes wrong, or another protocol is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.raw_http import Response, head, infer_body, raw_http, request
from tests.support.server_fixtures import server_fixture
from tests.support.servers import AnyServer, eventually, serving, write_probe

INFER = "/v2/models/probe/infer"
GENERATE = "/v2/models/probe/generate"
LIVE = request("GET", "/v2/health/live")
UPGRADE = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_probe(tmp_path / "models")
    return tmp_path / "models"


server = server_fixture(scope="function")
"""A server with one model."""


def values(response: Response | None) -> list[float]:
    """Values that a model has answered."""
    assert response is not None and response.status == 200, response
    found: list[float] = response.json()["outputs"][0]["data"]
    return found


@pytest.mark.parametrize("chunked", [False, True])
def test_another_protocol_is_not_spoken(server: AnyServer, chunked: bool) -> None:
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


def test_tunnels_are_refused(server: AnyServer) -> None:
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
    server: AnyServer, tmp_path: Path, path: str, wrong: bytes
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


def binary_body(count: int) -> tuple[bytes, str]:
    """A body with so many bytes of a binary tensor, which also the answer is to have; and its header."""
    tensor = {
        "name": "IN",
        "datatype": "FP32",
        "shape": [1, count],
        "parameters": {"binary_data_size": 4 * count},
    }
    output = {"name": "OUT", "parameters": {"binary_data": True}}
    text = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
    return text + np.arange(
        count, dtype=np.float32
    ).tobytes(), f"Inference-Header-Content-Length: {len(text)}"


@pytest.mark.parametrize("restricted", [False, True])
def test_a_long_answer_and_what_comes_behind_it(tmp_path: Path, restricted: bool) -> None:
    """It is sent in pieces, as its client reads; the next request, which has come already, waits for it."""
    write_probe(tmp_path / "models")
    flags = ["--http-restricted-api=inference:key=secret"] if restricted else []
    body, length = binary_body(3 << 20)
    infer = request("POST", INFER, body, length, "key: secret")
    with (
        serving(tmp_path / "models", flags=flags) as server,
        raw_http(server.http_address, receive_buffer=64 << 10) as connection,
    ):
        for _ in range(2):
            connection.send(infer + LIVE)
            answer, live = connection.response(), connection.response()
            assert answer is not None and answer.status == 200
            assert answer.body.endswith(body[-(12 << 20) :])
            assert live is not None and live.status == 200
        connection.send(infer)  # whose answer is not read


def test_a_client_may_leave_in_the_middle_of_a_long_answer(server: AnyServer) -> None:
    body, length = binary_body(3 << 20)
    with raw_http(server.http_address, receive_buffer=64 << 10) as connection:
        connection.send(request("POST", INFER, body, length))
        assert connection.socket.recv(100).startswith(b"HTTP/1.1 200")
    with raw_http(server.http_address) as connection:
        connection.send(LIVE)
        live = connection.response()
        assert live is not None and live.status == 200


@pytest.mark.parametrize("coding", ["gzip, chunked", "deflate,chunked", "x-own, chunked"])
def test_transfer_codings_but_chunks_are_not_known(
    server: AnyServer, coding: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = infer_body("IN", "FP32", [2.5])
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with raw_http(server.http_address) as connection:
        connection.send(LIVE)
        assert connection.response() is not None
        connection.send(head("POST", INFER, f"Transfer-Encoding: {coding}") + chunks + LIVE)
        (only,) = connection.responses()
        assert (only.status, b"chunked" in only.body) == (501, True)
    with raw_http(server.http_address) as connection:
        connection.send(head("POST", INFER, f"Transfer-Encoding: {coding}") + chunks)
        assert [response.status for response in connection.responses()] == [501]
        assert "Traceback" not in caplog.text


def test_a_client_without_chunks_gets_events_until_the_connection_ends(server: AnyServer) -> None:
    body = json.dumps({"IN": [1.5]}).encode()
    asked = request("POST", GENERATE + "_stream", body, "Connection: keep-alive")
    with raw_http(server.http_address) as connection:
        connection.send(asked.replace(b"HTTP/1.1", b"HTTP/1.0"))
        fields, _, events = connection.rest().partition(b"\r\n\r\n")
    assert fields.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in fields.lower() and b"connection: close" in fields
    assert b"text/event-stream" in fields
    assert events.startswith(b"data: {") and events.endswith(b"}\n\n")
    assert json.loads(events.removeprefix(b"data: "))["OUT"] == 1.5
