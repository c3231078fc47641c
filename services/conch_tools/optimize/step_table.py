"""The steps: one row for each conversion. A further conversion is a row and a function in ``steps/``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conch_tools.optimize.judging import Accuracy

_ONNX, _ORT, _OPENVINO, _SLIM = "onnx>=1.17", "onnxruntime>=1.18", "openvino>=2026.0", "onnxslim>=0.1.60"
_TORCH, _ONNXSCRIPT = "torch>=2.6,<2.15", "onnxscript>=0.5"
_SKLEARN, _SKOPS = "scikit-learn>=1.4", "skops>=0.13"
_XGBOOST, _LIGHTGBM, _TREELITE = "xgboost-cpu>=2.1", "lightgbm>=4.3", "treelite>=4.4"
_SKL2ONNX, _ONNXMLTOOLS = "skl2onnx>=1.19", "onnxmltools>=1.14"
_TENSORFLOW, _TF2ONNX = "tensorflow-cpu>=2.16", "tf2onnx>=1.16"
_XGBOOST_FILES = ("xgboost_json", "xgboost_ubj")


@dataclass(frozen=True, slots=True)
class Step:
    """A conversion.

    Attributes:
        name: Its name in chains and folders.
        sources: Kinds that it converts.
        result: The kind that it makes.
        requires: Packages that its environment has.
        function: ``file.py:function``; a relative path is one of ``steps/``.
        accuracy: How far outputs may differ from the original's.
        options: Options of the function.
        needs_data: Whether the samples have a part in the result.
    """

    name: str
    sources: tuple[str, ...]
    result: str
    requires: tuple[str, ...]
    function: str
    accuracy: Accuracy = "exact"
    options: Mapping[str, Any] = field(default_factory=dict)
    needs_data: bool = False


@dataclass(frozen=True, slots=True)
class Opener:
    """How an original runs in its own framework.

    Attributes:
        requires: Packages that its environment has.
        function: As of a `Step`.
        float32: Whether values of the samples are rounded to FP32 first, as thresholds of trees are FP32 in
            most formats.
    """

    requires: tuple[str, ...]
    function: str
    float32: bool = False


OPENERS: Mapping[str, Opener] = {
    "onnx": Opener((_ORT,), "onnx_steps.py:open_model"),
}
"""By the kind of the source."""

STEPS: tuple[Step, ...] = (
    Step("onnx", ("onnx",), "onnx", (_ONNX,), "onnx_steps.py:keep"),
    Step("ort-optimize", ("onnx",), "onnx_optimized", (_ORT,), "onnx_steps.py:optimize_graph"),
    Step("onnx-slim", ("onnx",), "onnx_slim", (_ONNX, _SLIM), "onnx_steps.py:slim"),
    Step("onnx-fp16", ("onnx",), "onnx_fp16", (_ONNX, _ORT), "onnx_steps.py:to_fp16", "reduced"),
    Step(
        "ort-int8-dynamic",
        ("onnx",),
        "onnx_int8",
        (_ONNX, _ORT),
        "onnx_steps.py:quantize_dynamic",
        "quantised",
    ),
    Step(
        "ort-int8-static",
        ("onnx",),
        "onnx_int8",
        (_ONNX, _ORT),
        "onnx_steps.py:quantize_static",
        "quantised",
        needs_data=True,
    ),
    Step("openvino", ("onnx",), "openvino", (_OPENVINO,), "openvino_steps.py:convert"),
    Step(
        "openvino-f16", ("onnx",), "openvino_f16", (_OPENVINO,), "openvino_steps.py:convert_half", "reduced"
    ),
    Step(
        "openvino-bf16",
        ("openvino",),
        "openvino_bf16",
        (_OPENVINO,),
        "openvino_steps.py:keep_bf16",
        "reduced",
    ),
)
"""In the order in which they run. A step whose source and result are one kind keeps the original."""


def function_of(text: str) -> str:
    """The function with the absolute path of its file."""
    path, _, name = text.rpartition(":")
    return f"{Path(__file__).parent / 'steps' / path}:{name}"
