"""The text of an unknown exception is in the log alone: the client gets a plain sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest
from tests.support.servers import FRONT_ENDS, AnyServer, RawClient, simple_request
from tritonclient.grpc import service_pb2

from conch.core.admission import Admission
from conch.core.model_version import Model
from conch.frontends.grpc.response_encoder import ResponseEncoder
from conch.frontends.http.generate import generate_route
from conch.frontends.http.infer.infer_response import ResponseEncoder as JsonEncoder
from conch.fronts.decoded_requests import FrontEncoder
from conch_control.lifecycle.agent import Agent

SECRET = "the text of an unknown exception"
ID = "r1"


def unary(raw: RawClient, message: Any) -> str:
    with pytest.raises(grpc.RpcError) as raised:
        raw.unary(message)
    return str(raised.value.details())


def over_grpc(server: AnyServer, raw: RawClient) -> str:
    return unary(raw, simple_request(id=ID))


def over_a_stream(server: AnyServer, raw: RawClient) -> str:
    (response,) = raw.stream([simple_request(id=ID)])
    return str(response.error_message)


def posted(server: AnyServer, path: str, body: object) -> str:
    response = httpx.post(f"http://{server.http_address}/v2/{path}", json=body)
    assert response.status_code == 500, response.text
    return str(response.json()["error"])


def over_http(server: AnyServer, raw: RawClient) -> str:
    row = {"datatype": "INT32", "shape": [1, 16], "data": [0] * 16}
    return posted(
        server, "models/simple/infer", {"id": ID, "inputs": [{"name": name} | row for name in NAMES]}
    )


def generated(server: AnyServer, raw: RawClient) -> str:
    return posted(server, "models/simple/generate", {"id": ID} | dict.fromkeys(NAMES, [0] * 16))


def indexed(server: AnyServer, raw: RawClient) -> str:
    return unary(raw, service_pb2.RepositoryIndexRequest())


def indexed_over_http(server: AnyServer, raw: RawClient) -> str:
    return posted(server, "repository/index", {})


NAMES = ("INPUT0", "INPUT1")
PURE = pytest.mark.pure("the caller is compiled too, and calls the method itself")
REQUESTS = (over_grpc, over_a_stream, over_http, generated)


@pytest.mark.parametrize(
    ("place", "method", "ask"),
    [
        *(pytest.param(Admission, "admit", ask, marks=PURE) for ask in (over_grpc, over_http)),
        *((Admission, "admit", ask) for ask in (over_a_stream, generated)),
        *((Model, "submit", ask) for ask in REQUESTS),
        pytest.param(
            ResponseEncoder if FRONT_ENDS == "0" else FrontEncoder, "message", over_grpc, marks=PURE
        ),
        (ResponseEncoder, "parts", over_a_stream),
        pytest.param(JsonEncoder, "__call__", over_http, marks=PURE),
        (generate_route, "answer_object", generated),
        (Agent, "index", indexed),
        (Agent, "index", indexed_over_http),
    ],
)
def test_an_unknown_text_stays_in_the_log(
    server: AnyServer,
    raw: RawClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: Any,
    method: str,
    ask: Callable[[AnyServer, RawClient], str],
) -> None:
    def fail(*arguments: object, **keywords: object) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(place, method, fail)
    text = ask(server, raw)
    assert "could not be" in text and SECRET not in text, text
    assert SECRET in caplog.text
    caplog.clear()  # the tracebacks keep the requests
