"""The bytes of all requests that are not answered have one bound, over all protocols."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import grpc
import httpx
import pytest
from tests.support.grpc_transports import TRANSPORTS
from tests.support.raw_http import raw_http, request
from tests.support.servers import WAIT_S, LocalServer, RawClient, eventually, serving, write_probe
from tritonclient.grpc import service_pb2

MOST, SIZE = 400_000, 150_000
REFUSED = f"{MOST} (--grpc-max-received-bytes); repeat the call later"

Sender = Callable[[LocalServer, int, dict[str, str]], str]
"""Sends a request of a size with parameters; returns the error, empty for none."""


def message(size: int, parameters: dict[str, str], model: str = "probe") -> service_pb2.ModelInferRequest:
    made = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[bytes(size)])
    made.inputs.add(name="IN", datatype="FP32", shape=[1, size // 4])
    for name, given in parameters.items():
        made.parameters[name].string_param = given
    return made


def over_grpc(server: LocalServer, size: int, parameters: dict[str, str]) -> str:
    with closing(RawClient(server.address)) as client:
        try:
            client.infer(message(size, parameters))
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            return str(error.details())
    return ""


def over_a_stream(server: LocalServer, size: int, parameters: dict[str, str]) -> str:
    with closing(RawClient(server.address)) as client:
        (answer,) = client.stream([message(size, parameters)])
        return str(answer.error_message)


def http_request(size: int, parameters: dict[str, str]) -> tuple[bytes, bytes]:
    """The JSON and the binary tensor of a body."""
    tensor = {
        "name": "IN",
        "datatype": "FP32",
        "shape": [1, size // 4],
        "parameters": {"binary_data_size": size},
    }
    given = {"inputs": [tensor], "parameters": {**parameters, "binary_data_output": True}}
    return json.dumps(given).encode(), bytes(size)


def over_http(server: LocalServer, size: int, parameters: dict[str, str], packed: bool = False) -> str:
    head, binary = http_request(size, parameters)
    headers = {"inference-header-content-length": str(len(head))}
    body = head + binary
    if packed:
        headers["content-encoding"] = "gzip"
        body = gzip.compress(body)
    url = f"http://{server.http_address}/v2/models/probe/infer"
    answer = httpx.post(url, content=body, headers=headers, timeout=WAIT_S)
    assert answer.status_code in (200, 429)
    return "" if answer.status_code == 200 else str(answer.json()["error"])


def over_http_packed(server: LocalServer, size: int, parameters: dict[str, str]) -> str:
    return over_http(server, size, parameters, packed=True)


SENDERS = [over_grpc, over_a_stream, over_http, over_http_packed]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="one_process"),
        pytest.param(("--front-ends=2",), marks=pytest.mark.slow, id="fronts"),
        pytest.param(TRANSPORTS["grpcio"], marks=pytest.mark.slow, id="grpcio"),
    ],
)
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LocalServer]:
    repository = tmp_path_factory.mktemp("models")
    write_probe(repository, extra="instance_group { count: 3 }")
    with serving(repository, flags=[f"--grpc-max-received-bytes={MOST}", *request.param]) as server:
        yield server


@pytest.mark.parametrize("holder", SENDERS)
def test_requests_count_until_they_are_answered(server: LocalServer, holder: Sender, tmp_path: Path) -> None:
    go = tmp_path / "go"
    errors: list[str] = []

    def hold(started: Path) -> None:
        errors.append(holder(server, SIZE, {"started": str(started), "wait_for": str(go)}))

    begun = [tmp_path / "first", tmp_path / "second"]
    threads = [threading.Thread(target=hold, args=(path,)) for path in begun]
    try:
        for path, thread in zip(begun, threads, strict=True):
            thread.start()  # one by one: a front has its share for what it receives
            eventually(path.exists, "it runs")
        for sender in SENDERS:
            assert sender(server, SIZE, {}).endswith(REFUSED)
            assert not sender(server, 1000, {}), "there is room for a small one"
    finally:
        go.touch()
        for thread in threads:
            thread.join(WAIT_S)
    assert errors == ["", ""]
    with closing(RawClient(server.address)) as client, pytest.raises(grpc.RpcError):
        client.infer(message(SIZE, {}, "absent"))
    for sender in (over_grpc, over_http):
        assert not sender(server, 2 * MOST, {}), "alone it may be of any size"


@pytest.mark.parametrize(
    "server", [(), pytest.param(TRANSPORTS["grpcio"], marks=pytest.mark.slow)], indirect=True
)
def test_bodies_count_while_they_come(server: LocalServer) -> None:
    """Not with fronts, which keep the bodies of such requests until they are decoded."""
    head, body = http_request(2 * SIZE, {})
    length = f"inference-header-content-length: {len(head)}"
    sent = request("POST", "/v2/models/probe/infer", head + body, length)
    with raw_http(server.http_address) as first, raw_http(server.http_address) as second:
        first.send(sent[:-1])
        eventually(lambda: over_grpc(server, SIZE, {}).endswith(REFUSED), "it counts")
        second.send(sent[:SIZE])
        refused = second.response()
        first.send(sent[-1:])
        answered = first.response()
    assert refused is not None
    assert (refused.status, refused.json()["error"].endswith(REFUSED)) == (429, True)
    assert answered is not None
    assert answered.status == 200
    assert not over_grpc(server, 2 * MOST, {}), "nothing is left"
