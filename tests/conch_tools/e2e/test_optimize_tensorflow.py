"""`conch optimize` of a SavedModel; TensorFlow comes from the environment of tests/setup_tensorflow.sh."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.support.optimize_models import OFFLINE, keep_environments

from conch import Server
from conch.cli import main
from conch_tools.optimize import OptimizeOptions, optimize

MODELS = Path(__file__).parents[2] / "support" / "tensorflow_models.py"
ENVIRONMENT = Path(os.environ.get("CONCH_TENSORFLOW", Path.home() / ".cache/conch-tests/tensorflow"))

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ENVIRONMENT / ".ready").exists(), reason="tests/setup_tensorflow.sh makes its environment"
    ),
]


def test_a_saved_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_environments(monkeypatch)
    subprocess.run([ENVIRONMENT / "bin" / "python", MODELS, tmp_path], check=True, capture_output=True)
    with np.load(tmp_path / "answers.npz") as arrays:
        answers = dict(arrays)
    np.savez(tmp_path / "data.npz", x=np.tile(answers["rows"], (8, 1)))
    options = OptimizeOptions(
        data=tmp_path / "data.npz", environments=[ENVIRONMENT], offline=OFFLINE, measure_s=0.05
    )
    result = optimize(str(tmp_path / "affine"), tmp_path / "out", options)
    found = {each["chain"][-1]: each for each in result.candidates}
    for name in ("saved_model", "saved-openvino", "tflite", "tflite-f16", "tflite-int8"):
        assert found[name]["status"] == "passed", found[name]["reason"]
    assert result.repository is not None
    assert main(["check", "--strict", str(result.repository)]) == 0
    with Server(result.repository, allow_grpc=False, allow_http=False, allow_metrics=False) as server:
        outputs = server.infer("affine", {"x": answers["rows"]})
    np.testing.assert_allclose(outputs["y"], answers["affine.y"], atol=0.1)
    np.testing.assert_allclose(outputs["total"][:, 0], answers["affine.total"], atol=0.1)
    if not found["saved-onnx"]["id"]:
        pytest.skip(found["saved-onnx"]["reason"])
    assert found["saved-onnx"]["status"] == "passed", found["saved-onnx"]["reason"]
