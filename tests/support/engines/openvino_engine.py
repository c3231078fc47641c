"""OpenVINO for the contract suite, on ONNX files: a file alone, as the suite replaces it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.support.engines.onnx_engine import OnnxEngine

from conch.core.tensor import Array


class OpenVinoEngine(OnnxEngine):
    """OpenVINO."""

    name = "openvino"
    backend = "openvino"
    packages = ("onnx", "openvino")
    platform = ""
    tolerance = 1e-5

    def config(self, name: str, more: str = "") -> str:
        return super().config(name, f'default_model_filename: "{self.file}"\n{more}')

    def opened(self, version: Path) -> Callable[[Array], dict[str, Array]]:
        from conch_engines.openvino.openvino_engine import import_openvino

        core = import_openvino().Core()
        compiled = core.compile_model(version / self.file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        return lambda rows: {"y": np.array(compiled({0: rows})[0])}
