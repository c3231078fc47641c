"""`conch serve --reload`: a model is loaded again when a file of it is saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.servers import ServerProcess, client_of, eventually, serving_process, started

pytestmark = pytest.mark.process

MODEL = """
import triton_python_backend_utils as pb_utils
import helper

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("B", request.inputs()[0].as_numpy() + helper.ADDED)])
            for request in requests
        ]
"""

CONFIG = """
    backend: "python"
    input { name: "A" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "B" data_type: TYPE_INT32 dims: [ 1 ] }
"""


def save(path: Path, text: str) -> None:
    """As editors do: a new file takes the place of the old one."""
    new = path.with_name(path.name + "~")
    new.write_text(text)
    os.replace(new, path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "models/m"
    (directory / "1").mkdir(parents=True)
    (directory / "1/model.py").write_text(MODEL)
    (directory / "1/helper.py").write_text("ADDED = 1\n")
    (directory / "config.pbtxt").write_text(CONFIG)
    return directory


def added(client: triton.InferenceServerClient) -> int:
    tensor = triton.InferInput("A", [1], "INT32")
    tensor.set_data_from_numpy(np.zeros(1, np.int32))
    result: Any = client.infer("m", [tensor]).as_numpy("B")
    return int(result[0])


def messages(server: ServerProcess, start: str) -> list[str]:
    return [line["message"] for line in server.logs() if line["message"].startswith(start)]


def test_saved_files_are_served(model: Path) -> None:
    with serving_process(model.parent, flags=["--reload"]) as server, client_of(server) as client:
        assert added(client) == 1
        save(model / "1/model.py", MODEL.replace("helper.ADDED", "5"))
        eventually(lambda: added(client) == 5, "the model is loaded again")
        eventually(lambda: messages(server, "reloaded 'm' in "), "it is logged")
        (line,) = messages(server, "reloaded 'm' in ")
        assert line.endswith(" s: 1/model.py")
        # A module beside it too, and without the old one.
        (model / "1/model.py").write_text(MODEL)
        save(model / "1/helper.py", "ADDED = 7\n")
        eventually(lambda: added(client) == 7, "the module is loaded again")
        # What editors leave beside it is nothing to load.
        loads = len(messages(server, "loading: m"))
        (model / "1/.model.py.swp").write_text("edited")
        save(model / "1/helper.py", "ADDED = 8\n")
        eventually(lambda: added(client) == 8, "the module is loaded again")
        changed = messages(server, "model 'm' is new or has changed: loading it")
        assert changed[-1].endswith("(1/helper.py)")
        assert len(messages(server, "loading: m")) == loads + 1


def test_an_error_keeps_the_old_model_serving(model: Path) -> None:
    with serving_process(model.parent, flags=["--reload"]) as server, client_of(server) as client:
        save(model / "1/model.py", MODEL.replace("import helper", "import helper)"))
        eventually(lambda: messages(server, "failed to load 'm', what served before goes on"), "it fails")
        (line,) = (line for line in server.logs() if line["message"] == "model 'm' can't be imported")
        assert f'File "{model}/1/model.py", line 3' in line["exception"]
        assert line["exception"].endswith("SyntaxError: unmatched ')'")
        assert added(client) == 1
        save(model / "1/model.py", MODEL.replace("helper.ADDED", "2"))
        eventually(lambda: added(client) == 2, "it is mended")


def test_a_model_that_is_broken_at_the_start_can_be_mended(model: Path) -> None:
    (model / "1/model.py").write_text("import nothing_of_that_name\n")
    with serving_process(model.parent, flags=["--reload"]) as server, client_of(server) as client:
        assert not client.is_model_ready("m")
        save(model / "1/model.py", MODEL)
        eventually(lambda: client.is_model_ready("m"), "it is mended")
        assert added(client) == 1


@pytest.mark.parametrize("mode", ["explicit", "poll"])
def test_it_decides_what_is_loaded(model: Path, mode: str) -> None:
    flags = f"--model-repository={model.parent}", "--reload", f"--model-control-mode={mode}"
    with started(*flags) as server:
        assert server.wait() == 1
        assert f"not for --model-control-mode={mode}" in server.errors
