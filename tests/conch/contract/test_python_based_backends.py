"""`--backend-directory`: one model.py for all models of a backend."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.servers import CONCH, ServerProcess, client_of, serving_process, started

pytestmark = pytest.mark.process

BACKEND = """
import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from shared import scaled

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "B", "data_type": "TYPE_FP32", "dims": [1]})
        return config

    def initialize(self, args):
        directory = Path(args["model_repository"]) / args["model_version"]
        assert pb_utils.get_model_dir() == str(directory)
        self.factor = json.loads((directory / "model.json").read_text())["factor"]

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("B", scaled(request.inputs()[0].as_numpy(), self.factor))
            ])
            for request in requests
        ]
"""

SHARED = "def scaled(array, factor):\n    return (array * factor).astype(array.dtype)\n"


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    directory = tmp_path / "backends/scaling"
    directory.mkdir(parents=True)
    (directory / "model.py").write_text(BACKEND)
    (directory / "shared.py").write_text(SHARED)
    return directory.parent


def write_model(root: Path, name: str, factor: float, config: str = "") -> Path:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(f'backend: "scaling"\n{config}')
    (root / name / "1/model.json").write_text(json.dumps({"factor": factor}))
    return root / name


def infer(server: ServerProcess, name: str) -> float:
    tensor = triton.InferInput("A", [1], "FP32")
    tensor.set_data_from_numpy(np.ones(1, np.float32))
    with client_of(server) as client:
        result: Any = client.infer(name, [tensor]).as_numpy("B")
    return float(result[0])


def test_models_share_the_code_and_have_their_own_files(
    tmp_path: Path, backends: Path, placement: str
) -> None:
    models = tmp_path / "models"
    write_model(models, "half", 0.5)
    write_model(models, "triple", 3, 'runtime: "model.py"')
    # One that brings code of its own, in either place.
    own = write_model(models, "own", 5)
    (own / "1/model.py").write_text(BACKEND.replace("self.factor)", "self.factor + 1)"))
    beside = write_model(models, "beside", 5)
    (beside / "model.py").write_text(BACKEND.replace("self.factor)", "self.factor + 2)"))
    for directory in (own / "1", beside):
        (directory / "shared.py").write_text(SHARED)
    # A backend by the model's name, and a file of the model's by that of the backend.
    named = write_model(models, "named.scaling", 7)
    (named / "config.pbtxt").unlink()
    (named / "1/model.scaling").write_text("weights, which are no Python")
    flags = [f"--backend-directory={backends}"]
    with serving_process(models, flags=[*flags, placement.replace("python", "scaling")]) as server:
        results = [infer(server, name) for name in ("half", "triple", "own", "beside", "named.scaling")]
        with client_of(server) as client:
            configs: list[Any] = [
                client.get_model_config(name, as_json=True)["config"] for name in ("half", "named.scaling")
            ]
    assert results == [0.5, 3, 6, 7, 7]
    assert [(each["backend"], each.get("default_model_filename", "")) for each in configs] == [
        ("scaling", ""),
        ("scaling", "model.scaling"),
    ]
    command = [str(CONCH), "check", *flags, "--json", "--run-code", str(models)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", ["nothing", "../scaling", "{scaling}"])
def test_other_backends_are_not_found(tmp_path: Path, backends: Path, name: str) -> None:
    model = write_model(tmp_path / "models", "m", 1)
    (model / "config.pbtxt").write_text(f'backend: "{name}"')
    flags = f"--model-repository={model.parent}", f"--backend-directory={backends}", "--grpc-port=0"
    with started(*flags) as server:
        assert server.wait() == 1
        assert f"unable to find backend library for backend '{name}', try specifying runtime" in server.errors
