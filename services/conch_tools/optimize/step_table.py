"""The steps: one row for each conversion. A further conversion is a row and a function in ``steps/``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from conch_tools.optimize.judging import Accuracy

_TORCH = ("torch>=2.6,<2.15",)
_TORCH_ONNX = (*_TORCH, "onnx>=1.17")
_DYNAMO = (*_TORCH_ONNX, "onnxscript>=0.5")
_TORCH_OPENVINO = (*_TORCH, "openvino>=2026.0", "packaging")  # which its reader of PyTorch imports
_ONNX, _ORT, _OPENVINO = ("onnx>=1.17",), ("onnxruntime>=1.18",), ("openvino>=2026.0",)
_ONNX_ORT, _SLIM = (*_ONNX, *_ORT), (*_ONNX, "onnxslim>=0.1.60")
_STATIC = (*_ONNX_ORT, "sympy>=1.12")  # which ONNX Runtime imports to infer shapes, and does not require
_SKLEARN, _XGBOOST, _LIGHTGBM = (
    ("scikit-learn>=1.4", "skops>=0.13"),
    ("xgboost-cpu>=2.1",),
    ("lightgbm>=4.3",),
)
_TENSORFLOW, _TRT = ("tensorflow-cpu>=2.16",), ("tensorrt-cu12>=10.3",)
_TREELITE, _SKL2ONNX = ("treelite>=4.4",), ("skl2onnx>=1.19",)
_ONNXMLTOOLS = ("onnxmltools>=1.14", "packaging")  # which it imports and does not require
_XGBOOST_FILES = ("xgboost_json", "xgboost_ubj")
_PYTORCH_FILES = ("torchscript", "exported_program")
_TREES = ("sklearn", "lightgbm", *_XGBOOST_FILES)

Need = Literal["data", "gpu"]


@dataclass(frozen=True, slots=True)
class Step:
    """A conversion.

    Attributes:
        name: Its name in chains and folders.
        sources: Kinds that it converts.
        result: The kind that it makes.
        requires: Packages that its environment has.
        function: ``onnx:keep`` for a function of ``steps/onnx_steps.py``, or ``/path/file.py:function``.
        accuracy: Class of the allowed differences of outputs from the original's.
        options: Options of the function.
        needs: The user's ``data``, where samples have a part in the result; a ``gpu``.
        first: True if it converts the source alone, and not the results of other steps.
    """

    name: str
    sources: tuple[str, ...]
    result: str
    requires: tuple[str, ...]
    function: str
    accuracy: Accuracy = "exact"
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[Need, ...] = ()
    first: bool = False


@dataclass(frozen=True, slots=True)
class Opener:
    """Function that runs an original in its own framework, and its environment.

    Attributes:
        requires: Packages that its environment has.
        function: As of a `Step`.
        float32: True if values of the samples are rounded to FP32 first, as thresholds of trees are FP32 in
            most formats.
    """

    requires: tuple[str, ...]
    function: str
    float32: bool = False


OPENERS: Mapping[str, Opener] = {
    "torch": Opener(_TORCH, "torch:open_module"),
    "torchscript": Opener(_TORCH, "torch:open_script"),
    "exported_program": Opener(_TORCH, "torch:open_program"),
    "onnx": Opener(_ORT, "onnx:open_model"),
    "sklearn": Opener(_SKLEARN, "tree:open_sklearn", float32=True),
    **dict.fromkeys(_XGBOOST_FILES, Opener(_XGBOOST, "tree:open_xgboost", float32=True)),
    "lightgbm": Opener(_LIGHTGBM, "tree:open_lightgbm", float32=True),
    "saved_model": Opener(_TENSORFLOW, "tensorflow:open_saved_model"),
}
"""Openers by the kind of the source."""

_DATA: tuple[Need, ...] = ("data",)
_GPU: tuple[Need, ...] = ("gpu",)
_SCRIPT, _PROGRAM, _SAVED = ("torchscript",), ("exported_program",), ("saved_model",)
STEPS: tuple[Step, ...] = (
    *(Step(kind, (kind,), kind, (), "torch:keep", first=True) for kind in _PYTORCH_FILES),
    Step("torch-onnx-dynamo", ("torch",), "onnx", _DYNAMO, "torch:export_onnx"),
    Step("torch-onnx-trace", ("torch",), "onnx", _TORCH_ONNX, "torch:trace_onnx"),
    Step("torch-script", ("torch",), "torchscript", _TORCH, "torch:trace"),
    Step("torch-export", ("torch",), "exported_program", _TORCH, "torch:export"),
    Step("script-onnx", _SCRIPT, "onnx", _TORCH_ONNX, "torch:script_to_onnx", first=True),
    Step("script-openvino", _SCRIPT, "openvino", _TORCH_OPENVINO, "torch:script_to_openvino", first=True),
    Step("export-onnx", _PROGRAM, "onnx", _DYNAMO, "torch:program_to_onnx", first=True),
    Step("export-openvino", _PROGRAM, "openvino", _TORCH_OPENVINO, "torch:program_to_openvino"),
    Step("aot-inductor", _PROGRAM, "aot_inductor", _TORCH, "torch:compile_program"),
    Step("saved_model", _SAVED, "saved_model", _TENSORFLOW, "tensorflow:keep", first=True),
    Step("saved-onnx", _SAVED, "onnx", (*_TENSORFLOW, *_ONNX, "tf2onnx>=1.16"), "tensorflow:to_onnx"),
    Step("saved-openvino", _SAVED, "openvino", _OPENVINO, "tensorflow:to_openvino"),
    Step("tflite", _SAVED, "tflite", _TENSORFLOW, "tensorflow:to_tflite"),
    Step("tflite-f16", _SAVED, "tflite_f16", _TENSORFLOW, "tensorflow:to_tflite_half", "reduced"),
    Step("tflite-int8", _SAVED, "tflite_int8", _TENSORFLOW, "tensorflow:to_tflite_int8", "quantised"),
    Step("onnx", ("onnx",), "onnx", _ONNX, "onnx:keep", first=True),
    Step("ort-optimize", ("onnx",), "onnx_optimized", _ORT, "onnx:optimize_graph"),
    Step("onnx-slim", ("onnx",), "onnx_slim", _SLIM, "onnx:slim"),
    Step("onnx-fp16", ("onnx",), "onnx_fp16", _ONNX_ORT, "onnx:to_fp16", "reduced"),
    Step("ort-int8-dynamic", ("onnx",), "onnx_int8", _ONNX_ORT, "onnx:quantize_dynamic", "quantised"),
    Step("ort-int8-static", ("onnx",), "onnx_qdq", _STATIC, "onnx:quantize_static", "quantised", needs=_DATA),
    Step("openvino", ("onnx",), "openvino", _OPENVINO, "openvino:convert"),
    Step("openvino-f16", ("onnx",), "openvino_f16", _OPENVINO, "openvino:convert_half", "reduced"),
    Step("openvino-bf16", ("openvino",), "openvino_bf16", _OPENVINO, "openvino:keep_bf16", "reduced"),
    Step("openvino-int8", ("onnx_qdq",), "openvino_int8", _OPENVINO, "openvino:convert", "quantised"),
    Step("tensorrt", ("onnx",), "tensorrt", _TRT, "tensorrt:build", needs=_GPU),
    Step("tensorrt-fp16", ("onnx_fp16",), "tensorrt_fp16", _TRT, "tensorrt:build", "reduced", needs=_GPU),
    Step("tensorrt-bf16", ("onnx",), "tensorrt_bf16", _TRT, "tensorrt:build_bf16", "reduced", needs=_GPU),
    Step("tensorrt-int8", ("onnx_qdq",), "tensorrt_int8", _TRT, "tensorrt:build", "quantised", needs=_GPU),
    *(Step(kind, (kind,), kind, (), "tree:keep", first=True) for kind in _TREES),
    Step("sklearn-treelite", ("sklearn",), "treelite", (*_TREELITE, *_SKLEARN), "tree:sklearn_to_treelite"),
    Step("xgboost-treelite", _XGBOOST_FILES, "treelite", _TREELITE, "tree:xgboost_to_treelite"),
    Step("lightgbm-treelite", ("lightgbm",), "treelite", _TREELITE, "tree:lightgbm_to_treelite"),
    Step("sklearn-onnx", ("sklearn",), "onnx_trees", (*_SKL2ONNX, *_SKLEARN), "tree:sklearn_to_onnx"),
    Step("xgboost-onnx", _XGBOOST_FILES, "onnx_trees", (*_ONNXMLTOOLS, *_XGBOOST), "tree:xgboost_to_onnx"),
    Step("lightgbm-onnx", ("lightgbm",), "onnx_trees", (*_ONNXMLTOOLS, *_LIGHTGBM), "tree:lightgbm_to_onnx"),
)
"""Steps in the order in which they run. A step whose source and result are one kind keeps the original."""


def function_of(text: str) -> str:
    """The function with the absolute path of its file."""
    place, _, name = text.rpartition(":")
    if place.endswith(".py"):
        return text
    return f"{Path(__file__).parent / 'steps' / place}_steps.py:{name}"
