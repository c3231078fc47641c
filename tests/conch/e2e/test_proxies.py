"""The ports behind proxies (Envoy, nginx, HAProxy): nothing is lost, changed or held back on the way."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.grpc_transports import TRANSPORTS
from tests.support.proxies import HTTP_NGINX, PROXIES, proxy_to
from tests.support.servers import (
    WAIT_S,
    ServerProcess,
    check_simple,
    copy_example,
    eventually,
    past_deadline,
    probe,
    probe_inputs,
    serving_process,
    simple_inputs,
    tensor,
    write_model,
    write_probe,
    write_steps,
)
from tritonclient.utils import InferenceServerException

pytestmark = [pytest.mark.slow, pytest.mark.process]

_CONFIG = """
    backend: "identity"
    input { name: "INPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }
    output { name: "OUTPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }
"""
_AGE_MS = 300
_CALLS = 2_000
_LARGE = 20_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "identity", _CONFIG)
    copy_example(repository, "simple")
    write_probe(repository)
    write_steps(repository)
    flags = [*TRANSPORTS["own"], f"--grpc-max-connection-age={_AGE_MS}"]
    with serving_process(repository, flags=flags) as started:
        yield started


@pytest.fixture(scope="module", params=PROXIES)
def address(
    request: pytest.FixtureRequest, server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Address of a proxy."""
    proxy = PROXIES[request.param]
    program = proxy.program()
    if program is None:
        pytest.skip(f"{request.param} is not installed; run tests/setup_proxies.sh")
    with proxy_to(program, proxy, server.port, tmp_path_factory.mktemp(request.param)) as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def client(address: str) -> Iterator[triton.InferenceServerClient]:
    limits = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with closing(
        triton.InferenceServerClient(address, channel_args=[("grpc.use_local_subchannel_pool", 1), *limits])
    ) as client:
        yield client


@pytest.mark.parametrize("size", [1, 16_384, 70_000, _LARGE])
def test_tensors_of_all_sizes(client: triton.InferenceServerClient, size: int) -> None:
    data = np.arange(size, dtype=np.uint32).astype(np.uint8)
    answer = client.infer("identity", [tensor("INPUT0", data, "UINT8")], client_timeout=WAIT_S)
    assert np.array_equal(answer.as_numpy("OUTPUT0"), data)


@pytest.mark.parametrize("size", [1, 5_000_000])
def test_errors(client: triton.InferenceServerClient, size: int) -> None:
    """Also of a message that is still being sent."""
    with pytest.raises(InferenceServerException) as raised:
        client.infer("nothing", [tensor("IN", np.zeros(size, np.uint8), "UINT8")], client_timeout=WAIT_S)
    assert raised.value.status() == "StatusCode.NOT_FOUND"
    assert raised.value.message().startswith("Request for unknown model: 'nothing' ")


def test_streams(client: triton.InferenceServerClient) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for _ in range(10):
        inputs = [tensor("IN", np.zeros(1, np.int32), "INT32")]
        client.async_stream_infer("steps", inputs, parameters={"steps": "ok ok err ok final"})
    outcomes = [answers.get(timeout=WAIT_S) for _ in range(40)]
    client.stop_stream()
    assert [error is None for _, error in outcomes] == [True, True, False, True] * 10


def test_deadlines_and_cancellation_reach_the_model(
    client: triton.InferenceServerClient, tmp_path: Path
) -> None:
    started, cancelled, go = tmp_path / "started", tmp_path / "cancelled", tmp_path / "go"
    # The model sees the deadline a moment before the port ends the call: it must not answer in between.
    orders = {"started": str(started), "until_cancelled": str(cancelled), "then_wait_for": str(go)}

    def late(deadline_s: float) -> str:
        with pytest.raises(InferenceServerException) as raised:
            client.infer("probe", probe_inputs(), parameters=orders, client_timeout=deadline_s)
        return str(raised.value.status())

    assert past_deadline(late, started.exists, first_s=1.0) == "StatusCode.DEADLINE_EXCEEDED"
    eventually(cancelled.exists, "the model sees the end of the deadline")
    go.touch()
    cancelled.unlink()
    started.unlink()
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
    call = client.async_infer(
        "probe", probe_inputs(), lambda result, error: outcomes.put(error), parameters=orders
    )
    eventually(started.exists, "the model has begun")
    call.cancel()
    assert outcomes.get(timeout=WAIT_S).status() == "StatusCode.CANCELLED"
    eventually(cancelled.exists, "the model sees the cancellation")
    assert probe(client)["ids"] == [""]


def test_no_call_is_lost_while_connections_age(address: str, client: triton.InferenceServerClient) -> None:
    """The server asks for new connections every 300 ms; the clients of the proxy notice nothing."""

    def calls(seed: int) -> int:
        with closing(triton.InferenceServerClient(address)) as client:
            for number in range(_CALLS // 4):
                start = seed + number
                result = client.infer("simple", simple_inputs(start), client_timeout=WAIT_S)
                check_simple(result, start)
        return _CALLS // 4

    data = np.zeros(_LARGE, np.uint8)
    with ThreadPoolExecutor(4) as threads:
        small = threads.map(calls, range(4))
        for _ in range(10):  # some end while their connection is drained
            answer = client.infer("identity", [tensor("INPUT0", data, "UINT8")], client_timeout=WAIT_S)
            assert answer.as_numpy("OUTPUT0").nbytes == _LARGE
        assert sum(small) == _CALLS


def test_what_is_no_grpc(address: str) -> None:
    """A proxy passes the HTTP status on, from which gRPC's clients make their own."""
    with closing(grpc.insecure_channel(address)) as channel:
        call = channel.unary_unary("/no.Such/Method")
        with pytest.raises(grpc.RpcError) as raised:
            call(json.dumps({}).encode(), timeout=WAIT_S)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_nginx_passes_events_on_at_once(server: ServerProcess, tmp_path: Path) -> None:
    program, go = HTTP_NGINX.program(), tmp_path / "go"
    if program is None:
        pytest.skip("nginx is not installed; run tests/setup_proxies.sh")
    body = {"IN": [1], "steps": f"ok wait:{go} ok final"}
    with proxy_to(program, HTTP_NGINX, int(server.http_address.rpartition(":")[2]), tmp_path) as port:
        url = f"http://127.0.0.1:{port}/v2/models/steps/generate_stream"
        with httpx.stream("POST", url, json=body, timeout=WAIT_S) as response:
            events = (line for line in response.iter_lines() if line.startswith("data:"))
            first = json.loads(next(events).removeprefix("data:"))["OUT"]
            go.touch()
            assert [first, *(json.loads(line.removeprefix("data:"))["OUT"] for line in events)] == [0, 2]
