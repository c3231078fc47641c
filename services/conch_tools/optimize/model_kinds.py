"""Kinds of models: what a source is, and how conch serves a converted model of a kind."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from conch.core import file_formats
from conch.core.errors import InvalidArgumentError, NotFoundError
from conch.core.file_formats import describe, identify

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of models.

    Attributes:
        name: Its name in the table of steps.
        target: Its name for ``--to``; several kinds share one.
        backend: The backend that serves it; empty for a source that is only converted.
        file: Name of the file or folder in a version directory.
        platform: The config's platform, where the backend needs one.
        parameters: Parameters of the config.
    """

    name: str
    target: str
    backend: str
    file: str
    platform: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


_ONNX = ("onnx", "onnxruntime", "model.onnx")
_OPENVINO = ("openvino", "openvino", "model.xml")
_TENSORRT = ("tensorrt", "tensorrt", "model.plan", "tensorrt_plan")
_TFLITE = ("tflite", "tflite", "model.tflite")
_PYTORCH = ("pytorch", "model.pt2")
_FULL, _BF16 = {"INFERENCE_PRECISION_HINT": "f32"}, {"INFERENCE_PRECISION_HINT": "bf16"}

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("torch", "torch", "", ""),
        Kind("torchscript", "torchscript", "pytorch", "model.pt", "pytorch_libtorch"),
        Kind("exported_program", "exported_program", *_PYTORCH),
        Kind("aot_inductor", "aot_inductor", *_PYTORCH, "torch_aoti"),
        Kind("onnx", *_ONNX),
        Kind("onnx_optimized", *_ONNX),
        Kind("onnx_slim", *_ONNX),
        Kind("onnx_fp16", *_ONNX),
        Kind("onnx_int8", *_ONNX),
        Kind("onnx_qdq", *_ONNX),
        Kind("onnx_trees", *_ONNX),
        Kind("openvino", *_OPENVINO, parameters=_FULL),
        Kind("openvino_f16", *_OPENVINO, parameters=_FULL),
        Kind("openvino_int8", *_OPENVINO, parameters=_FULL),
        Kind("openvino_bf16", *_OPENVINO, parameters=_BF16),
        Kind("sklearn", "sklearn", "sklearn", "model.skops"),
        Kind("xgboost_json", "xgboost", "xgboost", "model.json"),
        Kind("xgboost_ubj", "xgboost", "xgboost", "model.ubj"),
        Kind("lightgbm", "lightgbm", "lightgbm", "model.txt"),
        Kind("treelite", "treelite", "fil", "checkpoint.tl"),
        Kind("saved_model", "saved_model", "tensorflow", "model.savedmodel", "tensorflow_savedmodel"),
        Kind("tflite", *_TFLITE),
        Kind("tflite_f16", *_TFLITE),
        Kind("tflite_int8", *_TFLITE),
        Kind("tensorrt", *_TENSORRT),
        Kind("tensorrt_fp16", *_TENSORRT),
        Kind("tensorrt_bf16", *_TENSORRT),
        Kind("tensorrt_int8", *_TENSORRT),
    )
}

_SOURCES = {
    file_formats.ONNX.key: "onnx",
    file_formats.TORCHSCRIPT.key: "torchscript",
    file_formats.EXPORTED_PROGRAM.key: "exported_program",
    file_formats.SKOPS.key: "sklearn",
    file_formats.XGBOOST_JSON.key: "xgboost_json",
    file_formats.XGBOOST_UBJ.key: "xgboost_ubj",
    file_formats.LIGHTGBM.key: "lightgbm",
    file_formats.SAVED_MODEL.key: "saved_model",
}
_READ = (
    "ONNX, TorchScript, an exported program of PyTorch, a Python file and function that returns a module "
    "(net.py:make), scikit-learn (model.skops), XGBoost, LightGBM, or a SavedModel"
)


@dataclass(frozen=True, slots=True)
class Source:
    """File or folder that is converted.

    Attributes:
        path: The file or folder.
        kind: Its kind.
        digest: Hash of its contents.
        function: The function of a Python file that returns the module.
    """

    path: Path
    kind: Kind
    digest: str
    function: str = ""

    @property
    def name(self) -> str:
        """A name for the model."""
        text = (self.function if self.path.suffix == ".py" else self.path.stem) or "model"
        return "".join(each if each.isalnum() or each in "_-." else "_" for each in text)


def find_source(text: str) -> Source:
    """Finds out what a source is.

    Raises:
        ConchError: There is none, or it is of a kind that is not converted.
    """
    path, function = Path(text), ""
    if not path.exists() and ":" in text:
        place, _, function = text.rpartition(":")
        path = Path(place)
    if not path.exists():
        raise NotFoundError(f"there is no '{text}'")
    path = Path(os.path.abspath(path))
    if path.suffix == ".py":
        if not function.isidentifier():
            raise InvalidArgumentError(
                f"'{text}' does not name a function; write '{path.name}:FUNCTION', which returns a module"
            )
        return Source(path, KINDS["torch"], digest_of(path), function)
    found = identify(path)
    if found is None or found.key not in _SOURCES:
        is_what = describe(path) or "is of a kind that is not known"
        raise InvalidArgumentError(f"'{text}' {is_what}; a source is {_READ}")
    return Source(path, KINDS[_SOURCES[found.key]], digest_of(path))


def is_source(path: Path) -> bool:
    """True if a file or folder is of a kind that is converted."""
    found = identify(path)
    return found is not None and found.key in _SOURCES


def digest_of(path: Path) -> str:
    """Hash of a file, or of all files of a folder with their names."""
    hashed = hashlib.sha256()
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    for each in files:
        if each != path:
            hashed.update(str(each.relative_to(path)).encode() + b"\0")
        with each.open("rb") as file:
            while data := file.read(_CHUNK):
                hashed.update(data)
    return hashed.hexdigest()[:32]
