"""Airflow's hook, operators and sensor of conch, in Airflow's environment, against a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc as triton
from tests.support.airflow_runs import WITH_AIRFLOW, AirflowTasks, TaskError, airflow_tasks
from tests.support.loading import BROKEN, config_json, model_text, write_number
from tests.support.servers import LocalServer, client_of, eventually, free_port, serving

pytestmark = WITH_AIRFLOW

SWAP, ROLLOUT = "ConchModelSwapOperator", "ConchRolloutOperator"
KEY = "a-key-of-sixteen-characters"
POLICY = """
[[principal]]
name = "airflow"
key_file = "key"
control = ["m"]
infer = ["m"]
"""
SLOW = """
import os, time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        while not os.path.exists({release!r}):
            time.sleep(0.01)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
CONFIG = json.loads(config_json())
INPUTS = [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [0.0]}]


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AirflowTasks]:
    with airflow_tasks(tmp_path_factory.mktemp("airflow")) as tasks:
        yield tasks


@pytest.fixture
def server(tmp_path: Path, airflow: AirflowTasks) -> Iterator[LocalServer]:
    """A server with version 1 of a model that answers with its version's number."""
    write_number(tmp_path / "models", "m")
    flags = ("--model-control-mode=explicit", "--load-model=m")
    with serving(tmp_path / "models", flags=flags) as local:
        airflow.connection = f"conch://{local.http_address}"
        yield local


def add(models: Path, version: int, text: str | bytes | None = None) -> None:
    """Adds a version, which answers with its number unless another model is given."""
    directory = models / "m" / str(version)
    directory.mkdir(exist_ok=True)
    content = model_text(version) if text is None else text
    (directory / "model.py").write_bytes(content if isinstance(content, bytes) else content.encode())


def answers(number: float) -> dict[str, Any]:
    return {"inputs": INPUTS, "outputs": {"OUT": [number]}, "atol": 0.5}


def states(client: triton.InferenceServerClient, model: str = "m") -> dict[str, str]:
    """The state of each version."""
    lines = client.get_model_repository_index().models
    return {line.version: line.state for line in lines if line.name == model}


def ready(server: LocalServer, model: str = "m") -> list[int]:
    """The versions that serve."""
    with client_of(server) as client:
        return [int(version) for version, state in states(client, model).items() if state == "READY"]


def test_swaps_go_back_if_the_answer_is_wrong(
    server: LocalServer, airflow: AirflowTasks, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    add(models, 2)
    swapped = airflow(SWAP, model="m", verify=answers(2.4))
    assert (swapped["from"], swapped["to"], ready(server)) == (1, 2, [2])
    # A version that fails its load is refused by the server, in the server's words.
    add(models, 3, BROKEN)
    with pytest.raises(TaskError, match=r"ConchError: load failed for model 'm': .*told to"):
        airflow(SWAP, model="m")
    assert ready(server) == [2]
    add(models, 3)
    expected = "version 3 of 'm' fails the golden request: output 'OUT' has 3.0 at 0, expected 4"
    with pytest.raises(TaskError, match=f"{expected}; version 2 serves again"):
        airflow(SWAP, model="m", verify=answers(4))
    assert ready(server) == [2]
    # A newer version is taken; an older one is by its number.
    add(models, 4)
    assert airflow(SWAP, model="m", verify=answers(4))["from"] == 2
    assert airflow(SWAP, model="m", version="1", verify=answers(1))["to"] == 1
    assert ready(server) == [1]
    # A model's request that fails is a wrong answer, too.
    wrong = {"inputs": [], "outputs": {"OUT": [1]}}
    with pytest.raises(
        TaskError, match=r"version 4 of 'm' fails the golden request: .*; version 1 serves again"
    ):
        airflow(SWAP, model="m", version=4, verify=wrong)
    assert ready(server) == [1]
    with pytest.raises(TaskError, match="at least one version must be available"):
        airflow(SWAP, model="m", version=9)
    assert ready(server) == [1]


def test_going_back_without_a_former_version(
    server: LocalServer, airflow: AirflowTasks, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    write_number(models, "new")
    with pytest.raises(TaskError, match="expected 2; the model is unloaded again"):
        airflow(SWAP, model="new", verify=answers(2))
    with pytest.raises(
        TaskError, match=r"version 7 of 'new' is not ready .* does not select it; the model is un"
    ):
        airflow(SWAP, model="new", version=7)
    assert ready(server, "new") == []
    add(models, 1, model_text(7))
    with pytest.raises(TaskError, match="version 1 was served before, too"):
        airflow(SWAP, model="m", verify=answers(1))
    # Another config for the same version can be taken back.
    with pytest.raises(TaskError, match="version 1 serves again"):
        airflow(SWAP, model="m", config={**CONFIG, "max_batch_size": 4}, verify=answers(1))
    with client_of(server) as client:
        assert client.get_model_config("m").config.max_batch_size == 0


def test_a_load_without_an_answer_is_taken_back(
    server: LocalServer, airflow: AirflowTasks, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    add(tmp_path / "models", 2, SLOW.format(release=str(release)))
    try:
        with pytest.raises(TaskError, match=r"Read timed out.*; going back has no answer"):
            airflow(SWAP, model="m", timeout=0.5)
    finally:
        release.touch()
    # The server stops the load for the newer one that goes back.
    with client_of(server) as client:
        eventually(lambda: "LOADING" not in states(client).values(), "the loads end")
        assert states(client) == {"1": "READY", "2": "UNAVAILABLE"}


def test_swaps_are_refused_where_a_load_moves_no_request(server: LocalServer, airflow: AirflowTasks) -> None:
    httpx.put(f"http://{server.http_address}/v2/repository/models/m/labels/stable", json={"version": 1})
    with pytest.raises(TaskError, match="version 1, which has the label 'stable'"):
        airflow(SWAP, model="m")
    with pytest.raises(TaskError, match="version: must be the number"):
        airflow(SWAP, model="m", version="newest")
    for wrong, text in (
        ("{}", "must be a dictionary"),
        ({"inputs": INPUTS, "outputs": {}, "rtol": 1}, "unknown field 'rtol'"),
        ({"inputs": INPUTS}, "the field 'outputs' is missing"),
    ):
        with pytest.raises(TaskError, match=text):
            airflow(SWAP, model="m", verify=wrong)


@pytest.mark.parametrize("deferrable", [False, True])
def test_rollouts_are_followed_to_their_end(
    server: LocalServer, airflow: AirflowTasks, tmp_path: Path, deferrable: bool
) -> None:
    quick = {"model": "m", "poll_interval": 0.05, "deferrable": deferrable, "options": {"keep": "10ms"}}
    add(tmp_path / "models", 2)
    ended = airflow(ROLLOUT, candidate="2", steps=["50% 10ms"], **quick)
    assert (ended["state"], ended["previous"], ended["stable"]) == ("DONE", 1, 2)
    add(tmp_path / "models", 3, BROKEN)
    with pytest.raises(TaskError, match=r"rollout 2 of 'm' is FAILED, version 2 serves: .*told to"):
        airflow(ROLLOUT, candidate=3, steps=["50% 10ms"], **quick)
    add(tmp_path / "models", 4)
    begun = airflow(ROLLOUT, candidate="newest", steps=["50% 1h"], wait=False, **quick)
    if not deferrable:  # the triggerer keeps the time of a task that waits there
        with pytest.raises(TaskError, match=r"has not ended within 0\.3 s; it goes on"):
            airflow(ROLLOUT, candidate=4, timeout=0.3, **quick)
    rollout = f"http://{server.http_address}/v2/repository/models/m/rollout"

    def abort() -> None:
        eventually(lambda: httpx.get(rollout).json()["state"] == "STEP", "the candidate serves")
        httpx.post(f"{rollout}/abort")

    # A task that is tried again follows the rollout that runs.
    aborting = threading.Thread(target=abort)
    aborting.start()
    with pytest.raises(TaskError, match=f"rollout {begun['id']} of 'm' is ABORTED, version 2 serves: "):
        airflow(ROLLOUT, candidate=4, **quick)
    aborting.join()


def test_sensors_wait_for_models_and_servers(server: LocalServer, airflow: AirflowTasks) -> None:
    assert [airflow("poke", model="m", version=version) for version in (None, 1, 2)] == [True, True, False]
    airflow.connection = f"conch://127.0.0.1:{free_port()}"
    assert not airflow("poke", model="m")


def test_connections_have_an_address_and_a_token(airflow: AirflowTasks, tmp_path: Path) -> None:
    write_number(tmp_path / "models", "m")
    policy = tmp_path / "access.toml"
    (tmp_path / "key").write_text(KEY)
    policy.write_text(POLICY)
    flags = (f"--access-policy={policy}", "--model-control-mode=explicit")
    with serving(tmp_path / "models", flags=flags) as server:
        airflow.connection = f"conch://:{KEY}@{server.http_address}/http"
        works, text = airflow("test_connection")
        assert works and text.startswith(f"http://{server.http_address} answers")
        assert airflow(SWAP, model="m", verify=answers(1))["to"] == 1
        assert airflow(SWAP, model="m", version=1, verify=answers(1))["to"] == 1
        airflow.connection = f"conch://{server.http_address}"
        works, text = airflow("test_connection")
        assert not works, text
        with pytest.raises(TaskError, match="ConchError"):
            airflow("poke", model="m")
    works, text = airflow("test_connection")
    assert not works and server.http_address in text
