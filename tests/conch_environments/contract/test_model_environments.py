"""Python models with environments of their own, in workers of a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.environments import make_venv, numpy_wheel, packed, wheel
from tests.support.servers import ServerProcess, client_of, eventually, serving_process, tensor, write_model
from tritonclient.grpc import InferenceServerClient as Client
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.process

MODEL = """
import os

import conch_tiny
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_INT32", "dims": [1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_INT32", "dims": [2]})
        return config

    def execute(self, requests):
        answer = np.array([conch_tiny.VERSION, int(os.environ.get("CONCH_TEST_NUMBER", "0"))], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", answer)]) for _ in requests]
"""

BUILD_S = 120.0
"""Longest time to build an environment on a machine that has much else to do."""


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder of wheels: numpy, and a package in two versions."""
    folder = tmp_path / "wheels"
    numpy_wheel(folder)
    for version in (1, 2):
        wheel(folder, "conch_tiny", f"{version}.0", {"conch_tiny.py": f"VERSION = {version}\n"})
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def server(repository: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that loads models on request."""
    flags = ["--model-control-mode=explicit", f"--backend-config=python,environment-cache={tmp_path}/cache"]
    with serving_process(repository, flags=flags, environment={"PATH": "/usr/bin:/bin"}) as server:
        yield server


def requirements(wheels: Path, version: int) -> str:
    return f"--no-index\n--find-links {wheels}\nconch_tiny=={version}\n"


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def answer(client: Client, name: str = "m") -> list[int]:
    array = client.infer(name, [tensor("IN", np.zeros(1, np.int32), "INT32")]).as_numpy("OUT")
    assert array is not None
    return [int(value) for value in array]


def why_not(client: Client, name: str = "m") -> str:
    with pytest.raises(InferenceServerException) as caught:
        client.load_model(name)
    return str(caught.value.message())


def test_packages_are_there_from_the_completion_of_the_config_on(
    repository: Path, wheels: Path, server: ServerProcess
) -> None:
    number = parameter("CONCH_ENV_CONCH_TEST_NUMBER", "7")
    directory = write_model(repository, "m", number, {"model.py": MODEL})
    (directory / "requirements.txt").write_text(requirements(wheels, 1))
    with client_of(server) as client:
        client.load_model("m")
        assert answer(client) == [1, 7]
        client.unload_model("m")


def test_a_packed_environment(repository: Path, tmp_path: Path, server: ServerProcess) -> None:
    site = make_venv(tmp_path / "venv")
    (site / "conch_tiny.py").write_text("VERSION = 3\n")
    path = parameter("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    directory = write_model(repository, "m", path, {"model.py": MODEL})
    packed(tmp_path / "venv", directory / "env.tar.gz")
    with client_of(server) as client:
        client.load_model("m")
        assert answer(client) == [3, 0]


def test_loads_that_fail_say_why(repository: Path, wheels: Path, server: ServerProcess) -> None:
    directory = write_model(repository, "m", parameter("CONCH_PLACEMENT", "in_process"), {"model.py": MODEL})
    (directory / "requirements.txt").write_text(requirements(wheels, 9))
    with client_of(server) as client:
        # And not that the package is not there, which the completion of its config in process would say.
        assert "requirements.txt' asks for an environment of its own" in why_not(client)
        (directory / "config.pbtxt").write_text("")
        assert "No matching distribution found for conch_tiny==9" in why_not(client)
        (directory / "requirements.txt").unlink()
        (directory / "config.pbtxt").write_text(parameter("EXECUTION_ENV_PATH", "/no/such/environment"))
        assert "there is no '/no/such/environment', which parameter 'EXECUTION_ENV_PATH'" in why_not(client)


@pytest.mark.slow
def test_a_list_that_changes_reloads_the_model(repository: Path, wheels: Path, tmp_path: Path) -> None:
    flags = [
        "--model-control-mode=poll",
        "--repository-poll-secs=0.1",
        "--repository-settle-secs=0.5",
        f"--backend-config=python,environment-cache={tmp_path}/cache",
    ]
    with serving_process(repository, flags=flags) as server, client_of(server) as client:

        def answers(version: int) -> bool:
            try:
                return answer(client) == [version, 0]
            except InferenceServerException:
                return False

        (repository / "m").mkdir()
        (repository / "m" / "requirements.txt").write_text(requirements(wheels, 1))
        write_model(repository, "m", "", {"model.py": MODEL})
        eventually(lambda: answers(1), "the model has a version", BUILD_S)
        (repository / "m" / "requirements.txt").write_text(requirements(wheels, 2))
        eventually(lambda: answers(2), "the model has the other version", BUILD_S)
