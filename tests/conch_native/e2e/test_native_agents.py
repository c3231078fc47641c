"""Repository agents compiled for Triton, with a library in C."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.support.native_builds import BACKENDS, run_compiler
from tests.support.servers import eventually

from conch import Server
from conch.cli import main
from conch.core.errors import ConchError

pytestmark = pytest.mark.process

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x + 1)])]
"""
CONFIG = """
backend: "python"
input {{ name: "IN" data_type: TYPE_INT32 dims: 1 }}
output {{ name: "OUT" data_type: TYPE_INT32 dims: 1 }}
parameters {{ key: "CONCH_PLACEMENT" value {{ string_value: "in_process" }} }}
model_repository_agents {{ agents {{
  name: "recorder"
  parameters {{ key: "log" value: "{log}" }}
  parameters {{ key: "do" value: "{what}" }}
}} }}
"""


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of agents with the recorder."""
    spec = importlib.util.find_spec("conch_native")
    if spec is None or spec.origin is None:
        pytest.skip("conch-native is not installed")
    folder = tmp_path_factory.mktemp("agents")
    (folder / "recorder").mkdir()
    library = folder / "recorder/libtritonrepoagent_recorder.so"
    run_compiler("-fPIC", "-shared", "-o", str(library), str(BACKENDS / "recorder_agent.c"))
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def server(repository: Path, agents: Path) -> Iterator[Server]:
    repository.mkdir()
    options = {"allow_grpc": False, "allow_http": False, "allow_metrics": False}
    with Server(repository, model_control_mode="explicit", repoagent_directory=agents, **options) as server:  # type: ignore[arg-type]
        yield server


def write_model(repository: Path, name: str, log: Path, what: str = "") -> None:
    (repository / name / "2").mkdir(parents=True)
    (repository / name / "2/model.py").write_text(MODEL)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(log=log, what=what))


def finalized(log: Path) -> bool:
    return "finalize" in log.read_text()


def test_an_agent_moves_a_model(server: Server, repository: Path, agents: Path, tmp_path: Path) -> None:
    write_model(repository, "a", tmp_path / "a.log", "move")
    write_model(repository, "b", tmp_path / "b.log")
    server.load("a")
    server.load("b")  # the same process: the library counts its models
    outputs = server.infer("a", {"IN": np.array([1], np.int32)}, version="7")
    assert outputs["OUT"].tolist() == [2]
    server.unload("a")
    server.unload("b")
    begin, end = ["initialize", "load", "load complete"], ["unload", "unload complete", "finalize"]
    for name, number in (("a", 1), ("b", 2)):
        log = tmp_path / f"{name}.log"
        eventually(partial(finalized, log), "the end of the agent's model")
        lines = log.read_text().splitlines()
        assert lines[:3] == [f"{call} {number}" for call in begin]
        assert [line.rsplit(" ", 1)[0] for line in lines[3:]] == end


def test_an_agent_refuses_a_model(server: Server, repository: Path, tmp_path: Path) -> None:
    write_model(repository, "m", tmp_path / "log", "fail")
    with pytest.raises(ConchError, match="failed to load 'm', failed to poll from model repository"):
        server.load("m")
    lines = [line.rsplit(" ", 1)[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert lines == ["initialize", "load", "load fail", "finalize"]


def test_a_crash_fails_one_load(
    server: Server, repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(repository, "bad", tmp_path / "bad.log", "crash")
    write_model(repository, "good", tmp_path / "good.log")
    with pytest.raises(ConchError):
        server.load("bad")
    assert "the process of repository agent 'recorder' has ended by signal 6" in caplog.text
    server.load("good")
    assert server.infer("good", {"IN": np.array([1], np.int32)})["OUT"].tolist() == [2]


def test_agents_that_are_not_there(
    server: Server, repository: Path, agents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(repository, "m", tmp_path / "log")
    config = repository / "m/config.pbtxt"
    assert main(["check", str(repository), f"--repoagent-directory={agents}"]) == 0
    assert "repository agent 'recorder' is not run" in capsys.readouterr().out
    config.write_text(config.read_text().replace('"recorder"', '"missing"'))
    assert main(["check", str(repository), f"--repoagent-directory={agents}"]) == 1
    assert (
        "unable to find 'libtritonrepoagent_missing.so' for repo agent 'missing'" in capsys.readouterr().out
    )
