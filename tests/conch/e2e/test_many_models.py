"""A server with more models than fit in memory: its start, and clients that choose models by popularity."""

from __future__ import annotations

import itertools
import os
import random
import threading
from bisect import bisect
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from tests.support.onnx_graphs import ADD_SUB
from tests.support.servers import WAIT_S, ServerProcess, client_of, eventually, serving_process, tensor

pytestmark = [pytest.mark.process, pytest.mark.slow]
MODELS, RESIDENT, CLIENTS, REQUESTS = 1_000, 50, 8, 60
ON_DEMAND = "--model-control-mode=on-demand"


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


def cpu_s(server: ServerProcess) -> float:
    times = psutil.Process(server.process.pid).cpu_times()
    return times.user + times.system


def metric(server: ServerProcess, name: str) -> float:
    text = httpx.get(server.metrics_url, timeout=WAIT_S).text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


def by_grpc(server: ServerProcess, name: str) -> float:
    with client_of(server) as client:
        inputs = [tensor(each, np.ones((1, 2), np.float32)) for each in "AB"]
        return float(client.infer(name, inputs, client_timeout=WAIT_S).as_numpy("SUM")[0][0])


def by_http(server: ServerProcess, name: str) -> float:
    inputs = [{"name": each, "shape": [1, 2], "datatype": "FP32", "data": [1, 1]} for each in "AB"]
    url = f"http://{server.http_address}/v2/models/{name}/infer"
    answer = httpx.post(url, json={"inputs": inputs}, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return float(answer.json()["outputs"][0]["data"][0])


def test_ten_thousand_models_hardly_delay_the_start(tmp_path: Path) -> None:
    """Less than a second of processor time more than with one model."""
    one, many = write_models(tmp_path / "one", 1), write_models(tmp_path / "many", 10_000)
    with serving_process(one, flags=[ON_DEMAND]) as server:
        usual_s = cpu_s(server)
    with serving_process(many, flags=[ON_DEMAND]) as server:
        assert cpu_s(server) < usual_s + 1.0
        assert metric(server, "conch_catalogue_models") == 10_000
        assert by_grpc(server, "m09999") == 2.0
        assert metric(server, "conch_resident_models") == 1


def test_clients_of_a_thousand_models_get_no_error(tmp_path: Path) -> None:
    sums = list(itertools.accumulate(rank**-1.1 for rank in range(1, MODELS + 1)))
    failures: list[Exception] = []

    def send(server: ServerProcess, number: int) -> None:
        chance, ask = random.Random(number), by_grpc if number % 2 else by_http
        try:
            for _ in range(REQUESTS):
                assert ask(server, f"m{bisect(sums, chance.random() * sums[-1]):05}") == 2.0
        except Exception as error:  # shown below
            failures.append(error)

    flags = [ON_DEMAND, f"--resident-models={RESIDENT}", "--min-resident-secs=0"]
    with serving_process(write_models(tmp_path / "models", MODELS), flags=flags) as server:
        clients = [threading.Thread(target=send, args=(server, number)) for number in range(CLIENTS)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        assert failures == []
        assert metric(server, "conch_resident_models") == RESIDENT
        assert metric(server, 'conch_evictions_total{reason="room"}') > RESIDENT
        assert metric(server, "conch_cold_requests") == 0
        # Models share what they are made of; threads of evicted ones are gone.
        process = psutil.Process(server.process.pid)
        eventually(lambda: process.num_threads() < 3 * RESIDENT, "the threads of evicted models have ended")
        assert process.num_fds() < 3 * RESIDENT
