"""A model whose loads, warm-ups and requests can be held up at any point, by files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from tests.support.servers import WAIT_S, eventually, tensor, write_model

_MODEL = """
import json, time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self._at = Path(json.loads(args["model_config"])["parameters"]["at"]["string_value"])
        self._version = args["model_version"]
        self._weights = Path(__file__).with_name("weights").read_bytes()
        self._ran = 0
        self._wait("load")

    def execute(self, requests):
        answers = []
        for request in requests:
            asked = request.inputs()[0].as_numpy()[0]
            self._wait("run" if asked else "warm-up")
            self._ran += asked > 0
            answer = pb_utils.Tensor("OUT", np.array([self._weights[0]], np.float32))
            answers.append(pb_utils.InferenceResponse([answer]))
        return answers

    def finalize(self):
        with (self._at / "ran").open("a") as file:
            file.write(f"{int(self._ran)}\\n")

    def _wait(self, what):
        if (self._at / f"hold-{what}-{self._version}").exists():
            (self._at / f"held-{what}-{self._version}").touch()
            while (self._at / f"hold-{what}-{self._version}").exists():
                time.sleep(0.005)
"""
_CONFIG = """
    backend: "python"
    input {{ name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }}
    output {{ name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }}
    parameters {{ key: "at" value {{ string_value: "{at}" }} }}
    model_warmup {{ name: "first" batch_size: 1 inputs {{
        key: "IN" value {{ data_type: TYPE_FP32 dims: [ 1 ] zero_data: true }}
    }} }}
"""
_WEIGHTS = 1 << 16


class Steering:
    """A directory with the files that let such models wait, and that say that they do.

    Args:
        at: Directory of the files; it must exist.
    """

    def __init__(self, at: Path) -> None:
        self._at = at

    def write(self, repository: Path, name: str, version: int, answer: int | None = None) -> Path:
        """Writes a version of a model, which answers with its number or another one; returns the model."""
        weights = bytes([version if answer is None else answer]) * _WEIGHTS
        files: dict[str, str | bytes] = {"model.py": _MODEL, "weights": weights}
        config = _CONFIG.format(at=self._at)
        if (repository / name / "config.pbtxt").exists():
            return write_model(repository, name, None, files, (version,))
        return write_model(repository, name, config, files, (version,))

    def hold(self, what: str, version: int) -> None:
        """Has ``load``, ``warm-up`` or ``run`` of a version wait."""
        (self._at / f"hold-{what}-{version}").touch()

    def wait_held(self, what: str, version: int) -> None:
        """Waits until it does."""
        eventually((self._at / f"held-{what}-{version}").exists, f"{what} of version {version} is held up")

    def let_go(self) -> None:
        """Has everything go on."""
        for path in self._at.glob("hold-*"):
            path.unlink()

    def ran(self) -> int:
        """Number of requests that all unloaded ones have run."""
        path = self._at / "ran"
        return sum(map(int, path.read_text().split())) if path.exists() else 0


def steered_inputs() -> list[triton.InferInput]:
    """Inputs of such a model."""
    return [tensor("IN", np.ones(1, np.float32))]


def answer_of(client: triton.InferenceServerClient, name: str) -> int:
    """Answer of such a model."""
    result = client.infer(name, steered_inputs(), client_timeout=WAIT_S)
    return int(result.as_numpy("OUT")[0])
