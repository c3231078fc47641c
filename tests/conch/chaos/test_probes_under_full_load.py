"""Probes of a server whose instances and queues are full, while clients send all the time."""

from __future__ import annotations

import http.client
import threading
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.attacks import cpu_s
from tests.support.draining import SERVING, Client, request_for
from tests.support.servers import WAIT_S, ServerProcess, eventually, serving_process
from tests.support.steered import Steering
from tritonclient.grpc import service_pb2

MOST_S = 0.5
"""Processor time of the server while all probes are asked once; Kubernetes waits 1 s for each."""
QUEUE = 64
ROUNDS = 20


def refused_clients(
    server: ServerProcess, enough: threading.Event, refused: list[int]
) -> list[threading.Thread]:
    """Clients of both protocols that send one request after the other, all of them refused."""

    def over_grpc(number: int) -> None:
        with closing(Client(server.address)) as client:
            while not enough.is_set():
                error = client.send("m").exception(WAIT_S)
                assert error.code().name in ("RESOURCE_EXHAUSTED", "UNAVAILABLE"), error
                refused[number] += 1

    def over_http(number: int) -> None:
        body = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[1.0]}]}'
        with closing(http.client.HTTPConnection(server.http_address, timeout=WAIT_S)) as connection:
            while not enough.is_set():
                connection.request("POST", "/v2/models/m/infer", body)
                response = connection.getresponse()
                response.read()
                assert response.status in (429, 503)
                refused[number] += 1

    work = [over_grpc, over_grpc, over_http, over_http]
    threads = [threading.Thread(target=each, args=(number,)) for number, each in enumerate(work)]
    for thread in threads:
        thread.start()
    return threads


def probe_all(server: ServerProcess, client: Client) -> None:
    """Asks each probe, over the connection that is open and over new ones."""
    with closing(Client(server.address)) as fresh:
        for each in (client, fresh):
            check = each.channel.unary_unary("/grpc.health.v1.Health/Check")
            assert check(b"", timeout=WAIT_S) == SERVING
            watch = each.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=WAIT_S)
            assert next(watch) == SERVING
            watch.cancel()
            ready = each.channel.unary_unary(
                "/inference.GRPCInferenceService/ServerReady",
                request_serializer=service_pb2.ServerReadyRequest.SerializeToString,
                response_deserializer=service_pb2.ServerReadyResponse.FromString,
            )
            assert ready(service_pb2.ServerReadyRequest(), timeout=WAIT_S).ready
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/m/ready"):
        with closing(http.client.HTTPConnection(server.http_address, timeout=WAIT_S)) as connection:
            connection.request("GET", path)
            assert connection.getresponse().status == 200


@pytest.mark.parametrize("placement", ["worker", "in_process"])
def test_probes_answer_while_everything_is_full(tmp_path: Path, grpc_is_warm: None, placement: str) -> None:
    (at := tmp_path / "steering").mkdir()
    steering = Steering(at)
    steering.write(tmp_path / "models", "m", 1)
    flags = [f"--max-queue-size={QUEUE}", f"--backend-config=python,placement={placement}"]
    enough, refused = threading.Event(), [0] * 4
    with (
        serving_process(tmp_path / "models", flags=flags) as server,
        closing(Client(server.address)) as client,
    ):
        steering.hold("run", 1)
        accepted = [client.send("m")]
        steering.wait_held("run", 1)
        stream = client.stream([request_for("m")] * (QUEUE // 2))
        accepted += [client.send("m") for _ in range(QUEUE)]
        eventually(lambda: any(each.done() for each in accepted), "the queue is full")
        threads = refused_clients(server, enough, refused)
        try:
            eventually(lambda: all(refused), "all clients are refused")
            for _ in range(ROUNDS):
                before = cpu_s(server.process.pid)
                probe_all(server, client)
                assert cpu_s(server.process.pid) - before < MOST_S
        finally:
            enough.set()
            for thread in threads:
                thread.join(WAIT_S)
            steering.let_go()
        answered = [each.exception(WAIT_S) for each in accepted]
        assert answered.count(None) + len(list(stream)) >= QUEUE + 1
