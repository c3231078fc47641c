"""A server with more models than fit in memory: its start, and clients that choose models by popularity."""

from __future__ import annotations

import itertools
import os
import random
import threading
from bisect import bisect
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx
import numpy as np
import psutil
import pytest
from tests.support.attacks import cpu_s
from tests.support.onnx_graphs import ADD_SUB
from tests.support.servers import WAIT_S, ServerProcess, client_of, eventually, serving_process, tensor

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient

pytestmark = [pytest.mark.process, pytest.mark.slow]
MODELS, RESIDENT, CLIENTS, REQUESTS = 10_000, 50, 20, 40
BUDGET = 300_000_000
ON_DEMAND = "--model-control-mode=on-demand"


class Held(NamedTuple):
    """Resources of a server at one moment."""

    memory: int
    threads: int
    descriptors: int


def write_models(repository: Path, count: int) -> Path:
    """Writes models that share one file."""
    first = repository / "m00000" / "1" / "model.onnx"
    first.parent.mkdir(parents=True)
    first.write_bytes(ADD_SUB)
    for number in range(1, count):
        directory = repository / f"m{number:05}" / "1"
        directory.mkdir(parents=True)
        os.link(first, directory / "model.onnx")
    return repository


def metric(server: ServerProcess, name: str) -> float:
    text = httpx.get(server.metrics_url, timeout=WAIT_S).text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


def by_grpc(client: InferenceServerClient, name: str) -> float:
    inputs = [tensor(each, np.ones((1, 2), np.float32)) for each in "AB"]
    return float(client.infer(name, inputs, client_timeout=WAIT_S).as_numpy("SUM")[0][0])


def by_http(client: httpx.Client, name: str) -> float:
    inputs = [{"name": each, "shape": [1, 2], "datatype": "FP32", "data": [1, 1]} for each in "AB"]
    answer = client.post(f"/v2/models/{name}/infer", json={"inputs": inputs})
    assert answer.status_code == 200, answer.text
    return float(answer.json()["outputs"][0]["data"][0])


def test_ten_thousand_models_hardly_delay_the_start(tmp_path: Path) -> None:
    """Less than a second of processor time more than with one model."""
    one, many = write_models(tmp_path / "one", 1), write_models(tmp_path / "many", MODELS)
    with serving_process(one, flags=[ON_DEMAND]) as server:
        usual_s = cpu_s(server.process.pid)
    with serving_process(many, flags=[ON_DEMAND]) as server:
        assert cpu_s(server.process.pid) < usual_s + 1.0
        assert metric(server, "conch_catalogue_models") == MODELS
        with client_of(server) as client:
            assert by_grpc(client, "m09999") == 2.0
        assert metric(server, "conch_resident_models") == 1


def held(server: ServerProcess) -> Held:
    process = psutil.Process(server.process.pid)
    return Held(process.memory_info().rss, process.num_threads(), process.num_fds())


def test_a_soak_of_ten_thousand_models_and_a_restart(tmp_path: Path) -> None:
    """Clients choose models by Zipf's law; a restart brings back those that were in memory."""
    sums = list(itertools.accumulate(rank**-1.1 for rank in range(1, MODELS + 1)))
    failures: list[Exception] = []
    samples: list[Held] = []
    flags = [
        ON_DEMAND,
        f"--resident-memory={BUDGET}",
        f"--resident-models={RESIDENT}",
        "--min-resident-secs=0",
        f"--state-directory={tmp_path / 'state'}",
    ]

    def send(server: ServerProcess, number: int, halves: threading.Barrier) -> None:
        chance = random.Random(number)
        try:
            with (
                client_of(server) as grpc,
                httpx.Client(base_url=f"http://{server.http_address}", timeout=WAIT_S) as http,
            ):
                for place in range(REQUESTS):
                    name = f"m{bisect(sums, chance.random() * sums[-1]):05}"
                    assert (by_grpc(grpc, name) if number % 2 else by_http(http, name)) == 2.0
                    if place == REQUESTS // 2:
                        halves.wait(2 * WAIT_S)
        except Exception as error:  # shown below
            failures.append(error)
            halves.abort()

    repository = write_models(tmp_path / "models", MODELS)
    with serving_process(repository, flags=flags) as server:
        before = held(server)
        halves = threading.Barrier(CLIENTS, lambda: samples.append(held(server)))
        clients = [threading.Thread(target=send, args=(server, number, halves)) for number in range(CLIENTS)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        assert failures == []
        (half,) = samples
        assert held(server).memory - before.memory < BUDGET * 1.1
        assert metric(server, "conch_resident_models") == RESIDENT
        assert metric(server, 'conch_resident_bytes{device="cpu"}') <= BUDGET
        assert metric(server, 'conch_evictions_total{reason="room"}') > RESIDENT
        assert metric(server, "conch_cold_requests") == 0
        # Threads of evicted models end, and so do the connections of gone clients. A model in memory has one
        # thread more once a request had a time limit, as those over gRPC have.
        eventually(lambda: held(server).threads <= half.threads + RESIDENT, "no more threads than before")
        eventually(lambda: held(server).descriptors <= half.descriptors, "no more descriptors than before")
    with serving_process(repository, flags=flags) as server:
        restored = RESIDENT * 8 // 10
        eventually(lambda: metric(server, "conch_resident_models") == restored, "they are in memory again")
        assert metric(server, 'conch_cold_starts_total{result="loaded"}') == 0
        with client_of(server) as client:
            assert by_grpc(client, "m00000") == 2.0, "the most popular one"
        assert metric(server, 'conch_cold_starts_total{result="loaded"}') == 0
