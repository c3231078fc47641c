"""MLflow's own server and client, and the deployment plug-in in MLflow's command line."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.certificates import Authority
from tests.support.draining import Load
from tests.support.loading import model_text
from tests.support.servers import (
    IN_PROCESS,
    ROOT,
    WAIT_S,
    ServerProcess,
    client_of,
    eventually,
    free_port,
    started,
)

MLFLOW = Path(os.environ.get("CONCH_MLFLOW", Path.home() / ".cache/conch-tests/mlflow"))
START_S = 240.0
ROWS = np.array([[5.1, 3.5], [6.2, 1.0], [0.5, 7.5]])
PROBE = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""

pytestmark = [
    pytest.mark.mlflow,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MLFLOW / ".ready").exists(), reason="tests/setup_mlflow.sh makes its environment"
    ),
]


@contextmanager
def mlflow_server(directory: Path, environment: dict[str, str]) -> Iterator[str]:
    """MLflow's server with a registry in SQLite; gives its URL."""
    port = free_port()
    flags = [
        f"--backend-store-uri=sqlite:///{directory}/registry.sqlite",
        f"--artifacts-destination={directory}/artifacts",
        f"--port={port}",
        "--workers=1",
    ]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [MLFLOW / "bin/mlflow", "server", *flags],
            env={**environment, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        assert process.poll() is None, (directory / "log").read_text()
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=WAIT_S) as answer:
                return bool(answer.read() == b"OK")
        except OSError:
            return False

    try:
        eventually(healthy, "MLflow listens", START_S)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Registry:
    """A registry with models, and MLflow's command line with the plug-in.

    Attributes:
        url: The server's.
        authority: Issues certificates that the plug-in trusts.
        predicted: Predictions of the versions of the estimator for `ROWS`.
    """

    def __init__(self, url: str, environment: dict[str, str], authority: Authority) -> None:
        self.url = url
        self.authority = authority
        self.predicted: list[Any] = []
        trusted = {"REQUESTS_CA_BUNDLE": str(authority.root)}
        self._environment = {**environment, **trusted, "MLFLOW_TRACKING_URI": url}

    def move(self, model: str, alias: str, version: int) -> None:
        """Moves an alias."""
        body = {"name": model, "alias": alias, "version": str(version)}
        httpx.post(
            f"{self.url}/api/2.0/mlflow/registered-models/alias", json=body, timeout=60
        ).raise_for_status()

    def deployments(self, *arguments: str) -> str:
        """Runs ``mlflow deployments``; gives what it prints."""
        return self._run([MLFLOW / "bin/mlflow", "deployments", *arguments])

    def run(self, script: str, *arguments: str) -> Any:
        """Runs a script of `tests/support`; gives the JSON that it prints."""
        printed = self._run([MLFLOW / "bin/python", ROOT / "tests/support" / script, *arguments])
        return json.loads(printed.splitlines()[-1])

    def _run(self, command: list[str | Path]) -> str:
        ended = subprocess.run(command, capture_output=True, text=True, env=self._environment, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout


def plugin_environment(directory: Path) -> dict[str, str]:
    """The environment of MLflow's programs, with the plug-in as if it was installed."""
    project = tomllib.loads((ROOT / "services/conch_mlflow/pyproject.toml").read_text())["project"]
    metadata = directory / f"conch_mlflow-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("".join(lines))
    places = [directory, ROOT / "services/conch_mlflow", ROOT / "services", ROOT / "control"]
    return {
        **os.environ,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONPATH": ":".join(map(str, places)),
    }


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    directory = tmp_path_factory.mktemp("mlflow")
    environment = plugin_environment(directory)
    with mlflow_server(directory, environment) as url:
        probes = []
        for number in (1, 2):
            probes.append(directory / f"probe{number}")
            (probes[-1] / "1").mkdir(parents=True)
            (probes[-1] / "1/model.py").write_text(model_text(number))
            (probes[-1] / "config.pbtxt").write_text(PROBE)
        made = Registry(url, environment, Authority(directory / "authority"))
        made.predicted = made.run("mlflow_log.py", url, *map(str, probes))
        yield made


@contextmanager
def serving(registry: Registry, cache: Path, query: str, *flags: str) -> Iterator[ServerProcess]:
    """A conch with the registry's models."""
    common = [
        f"--model-repository=mlflow+{registry.url}{query}",
        f"--model-cache-directory={cache}",
        "--model-control-mode=poll",
        "--repository-poll-secs=0.5",
        "--repository-settle-secs=0.1",
        "--mlflow-allow-code",
        "--grpc-port=0",
    ]
    with started(*common, *flags) as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.errors


def infer(client: triton.InferenceServerClient, model: str, **arrays: np.ndarray) -> triton.InferResult:
    inputs = []
    for name, array in arrays.items():
        kind = {"f": "FP64", "O": "BYTES"}[array.dtype.kind]
        inputs.append(triton.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)
    return client.infer(model, inputs)


def version_of(address: str, model: str, body: Any) -> str:
    found = httpx.post(f"http://{address}/v2/models/{model}/infer", json=body).json()
    return str(found.get("model_version", found))


def labels_of(url: str, trusted: ssl.SSLContext | bool = True) -> dict[str, list[str]]:
    """Labels of the probe, by version."""
    index = httpx.post(f"{url}/v2/repository/index", verify=trusted).json()
    return {each["version"]: each.get("labels", []) for each in index if each["name"] == "probe"}


def test_models_of_a_real_registry(registry: Registry, tmp_path: Path) -> None:
    flags = [
        f"--backend-config=python,environment={MLFLOW}",
        "--backend-config=python,build-environments=ignore",
    ]
    with serving(registry, tmp_path, "", *flags) as server, client_of(server) as client:
        first = infer(client, "estimator", input=ROWS)
        assert np.array_equal(first.as_numpy("predict_proba"), registry.predicted[0])
        names = np.array([b"x", "ü".encode()], object)
        when = np.array([b"2026-01-01", b"1999-05-05T10:00:00"], object)
        texts = infer(client, "text", a=np.array([1.0, 2.0]), when=when, name=names, factor=np.array([10.0]))
        assert texts.as_numpy("total").tolist() == [2036.0, 2019.0]
        assert texts.as_numpy("text").tolist() == [b"<x>", "<ü>".encode()]
        # The same by MLflow's own protocol.
        url = f"http://{server.http_address}/v2/models"
        scored = httpx.post(f"{url}/estimator/invocations", json={"inputs": ROWS.tolist()})
        assert np.array_equal(scored.json()["predictions"], registry.predicted[0])
        frame = {"columns": ["name", "a", "when"], "data": [["x", 1, "2026-01-01"], ["ü", 2, "1999-05-05"]]}
        body = {"dataframe_split": frame, "params": {"factor": 10.0}}
        records = httpx.post(f"{url}/text/invocations", json=body).json()["predictions"]
        assert records == [{"total": 2036.0, "text": "<x>"}, {"total": 2019.0, "text": "<ü>"}]
        assert "failed to run warmup sample" not in server.errors


def test_aliases_are_moved_under_load_also_by_deployments(registry: Registry, tmp_path: Path) -> None:
    policy = tmp_path / "access.toml"
    policy.write_text(
        '[[principal]]\nname = "all"\nanonymous = true\ninfer = ["*"]\nread = ["*"]\ncontrol = ["*"]\n'
    )
    flags = (IN_PROCESS, f"--access-policy={policy}")  # says who may change rollouts in this mode
    with serving(registry, tmp_path, "?alias=champion,canary", *flags) as server:
        target = ["-t", f"conch://{server.http_address}"]
        body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
        load = Load(server.address, "probe", polite=False, http_address=server.http_address)
        try:
            arguments = ["--name", "probe", "-m", "models:/probe/2", "-C", "alias=canary"]
            assert "deployment probe is created" in registry.deployments("create", *target, *arguments)
            assert labels_of(f"http://{server.http_address}")["2"] == ["canary"]
            for version in (2, 1, 2, 1):
                registry.move("probe", "champion", version)
                eventually(
                    lambda version=version: version_of(server.http_address, "probe", body) == str(version),  # type: ignore[misc]
                    "moved",
                )
            # A rollout begins without a load by name, which this mode refuses.
            by_steps = registry.deployments("update", *target, *arguments, "-C", "steps=20% 1h")
            assert "Deployment probe is updated" in by_steps
            url = f"http://{server.http_address}/v2/repository/models/probe/rollout"
            rollout = httpx.get(url).json()
            assert (rollout["stable"], rollout["candidate"]) == (1, 2)
            assert "20% 1h" in rollout["steps"]
        finally:
            load.enough.set()
            load.join()
        assert load.failures == []
        assert load.completed > 100


def test_deployments_of_files_and_by_rollouts_over_tls(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "rows.json").write_text(json.dumps([{"0": a, "1": b} for a, b in ROWS.tolist()]))
    key, certificate = registry.authority.issue("server")
    trusted = ssl.create_default_context(cafile=str(registry.authority.root))
    flags = [
        "--http-use-ssl",
        f"--http-server-key={key}",
        f"--http-server-cert={certificate}",
        f"--model-repository={tmp_path}/models",
        f"--model-repository=mlflow+{registry.url}?alias=champion,challenger",
        f"--model-cache-directory={tmp_path}/cache",
        "--mlflow-allow-code",
        "--model-control-mode=explicit",
        "--allow-model-upload",
        "--load-model=probe",
        "--grpc-port=0",
        IN_PROCESS,
    ]
    with started(*flags) as server:
        server.wait_ready()
        target = ["-t", f"conchs://{server.http_address}"]
        url = f"https://{server.http_address}"
        made = registry.deployments("create", *target, "--name", "flowers", "-m", "models:/estimator/1")
        assert "sklearn deployment flowers is created" in made
        rows = ["-I", str(tmp_path / "rows.json")]
        answer = json.loads(registry.deployments("predict", *target, "--name", "flowers", *rows))
        assert np.array_equal(answer["predictions"], registry.predicted[0])
        told = registry.run("mlflow_deploy.py", target[1])
        steps = ["-m", "models:/probe/2", "-C", "steps=20% 1h, 50% 1h"]
        assert "deployment probe" in registry.deployments("create", *target, "--name", "probe", *steps)
        labels = labels_of(url, trusted)
        assert labels["1"] == ["champion", "stable"] and "challenger" in labels["2"]
        rollout = httpx.get(f"{url}/v2/repository/models/probe/rollout", verify=trusted).json()
        assert (rollout["steps"], rollout["stable"], rollout["candidate"]) == (["20% 1h", "50% 1h"], 1, 2)
    assert told["again"].startswith("RESOURCE_ALREADY_EXISTS: deployment 'flowers' exists")
    assert told["updated"] == {"name": "flowers", "flavor": "sklearn"}
    assert told["listed"] == ["flowers"] and told["left"] == ["probe"]
    assert told["got"] == [{"version": "1", "state": "READY"}]
    assert told["frame"] == told["array"] == registry.predicted[1]
    assert told["stream"] == [{"OUT": 1.0, "model_name": "probe", "model_version": "1"}]
    for name, reason in (
        ("wrong name", "'../flowers' can't be the name of a model"),
        ("wrong key", "config 'step' is not known here: known are alias"),
        ("wrong input", "INVALID_PARAMETER_VALUE"),
        ("missing", "RESOURCE_DOES_NOT_EXIST: there is no deployment 'other'"),
        ("no stream", "inputs of a stream are a dict"),
    ):
        assert reason in told[name]
