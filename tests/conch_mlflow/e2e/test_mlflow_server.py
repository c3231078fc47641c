"""MLflow's own server and client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.servers import ROOT, client_of, eventually, free_port, started

MLFLOW = Path(os.environ.get("CONCH_MLFLOW", Path.home() / ".cache/conch-tests/mlflow"))
START_S = 240.0
ROWS = np.array([[5.1, 3.5], [6.2, 1.0], [0.5, 7.5]])

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MLFLOW / ".ready").exists(), reason="tests/setup_mlflow.sh makes its environment"
    ),
]


@contextmanager
def mlflow_server(directory: Path) -> Iterator[str]:
    """MLflow's server with a registry in SQLite; gives its URL."""
    port = free_port()
    environment = {
        **os.environ,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    flags = [
        f"--backend-store-uri=sqlite:///{directory}/registry.sqlite",
        f"--artifacts-destination={directory}/artifacts",
        f"--port={port}",
        "--workers=1",
    ]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [MLFLOW / "bin/mlflow", "server", *flags],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        assert process.poll() is None, (directory / "log").read_text()
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
                return bool(answer.read() == b"OK")
        except OSError:
            return False

    try:
        eventually(healthy, "MLflow listens", START_S)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def infer(client: triton.InferenceServerClient, model: str, **arrays: np.ndarray) -> triton.InferResult:
    inputs = []
    for name, array in arrays.items():
        kind = {"f": "FP64", "O": "BYTES"}[array.dtype.kind]
        inputs.append(triton.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)
    return client.infer(model, inputs)


def test_models_of_a_real_registry(tmp_path: Path) -> None:
    with mlflow_server(tmp_path) as url:
        log = [str(MLFLOW / "bin/python"), str(ROOT / "tests/support/mlflow_log.py"), url]
        variables = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
        logged = subprocess.run(log, check=True, capture_output=True, text=True, env=variables)
        first, second = json.loads(logged.stdout.splitlines()[-1])
        flags = [
            f"--model-repository=mlflow+{url}",
            f"--model-cache-directory={tmp_path / 'cache'}",
            "--model-control-mode=poll",
            "--repository-poll-secs=0.5",
            "--repository-settle-secs=0.1",
            "--mlflow-allow-code",
            f"--backend-config=python,environment={MLFLOW}",
            "--backend-config=python,build-environments=ignore",
            "--grpc-port=0",
        ]
        with started(*flags) as server:
            server.wait_ready()
            with client_of(server) as client:
                assert np.array_equal(infer(client, "estimator", input=ROWS).as_numpy("predict_proba"), first)
                names = np.array([b"x", "ü".encode()], object)
                when = np.array([b"2026-01-01", b"1999-05-05T10:00:00"], object)
                texts = infer(
                    client, "text", a=np.array([1.0, 2.0]), when=when, name=names, factor=np.array([10.0])
                )
                assert texts.as_numpy("total").tolist() == [2036.0, 2019.0]
                assert texts.as_numpy("text").tolist() == [b"<x>", "<ü>".encode()]
                body = json.dumps({"name": "estimator", "alias": "champion", "version": "2"}).encode()
                move = urllib.request.Request(
                    f"{url}/api/2.0/mlflow/registered-models/alias",
                    body,
                    {"Content-Type": "application/json"},
                )
                with urllib.request.urlopen(move, timeout=30):
                    pass
                eventually(
                    lambda: infer(client, "estimator", input=ROWS).get_response().model_version == "2",
                    "swapped",
                )
                assert np.array_equal(
                    infer(client, "estimator", input=ROWS).as_numpy("predict_proba"), second
                )
            assert server.stop() == 0
            assert "Traceback" not in server.errors
