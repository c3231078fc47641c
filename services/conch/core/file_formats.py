"""Recognises model files by their first bytes, so that errors name what a file is and what serves it.

Reads little and runs nothing of the file.
"""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

_HEAD = 4096


@dataclass(frozen=True, slots=True)
class FileFormat:
    """The recognised format of a file.

    Attributes:
        key: A short name for code.
        what: The format with its article, as error texts name it.
        advice: The backend that serves it, or the way to convert it.
    """

    key: str
    what: str
    advice: str


def _served(key: str, what: str, by: str) -> FileFormat:
    return FileFormat(key, what, f"{by} serves it")


TORCHSCRIPT = _served(
    "torchscript", "a TorchScript module", 'backend "pytorch" with platform "pytorch_libtorch"'
)
EXPORTED_PROGRAM = _served(
    "exported_program",
    "an exported program of PyTorch (torch.export.save)",
    'backend "pytorch" with platform "torch_aoti", in a file model.pt2,',
)
AOT_INDUCTOR = _served(
    "aot_inductor",
    "an AOTInductor package of PyTorch",
    'backend "pytorch" with platform "torch_aoti", in a file model.pt2,',
)
TORCH_SAVE = FileFormat(
    "torch_save",
    "a file of torch.save, which holds Python objects",
    "export the model with torch.jit.save or torch.export.save, or put its class into a model.py beside it "
    'and set runtime: "model.py"',
)
PICKLE = FileFormat(
    "pickle",
    "a Python pickle, which can run any code when it is loaded",
    "`conch convert` makes a model of one of scikit-learn or of a booster; save PyTorch models with "
    "torch.export.save",
)
_PICKLES = (".joblib", ".pickle", ".pkl")
ONNX = _served("onnx", "an ONNX model", 'backend "onnxruntime" or "openvino"')
OPENVINO_IR = _served("openvino_ir", "an OpenVINO IR model", 'backend "openvino"')
SAVED_MODEL = _served("saved_model", "a TensorFlow SavedModel", 'backend "tensorflow" or "openvino"')
TFLITE = _served("tflite", "a TF-Lite model", 'backend "tflite" or "openvino"')
TENSORRT = _served("tensorrt", "a TensorRT plan", 'backend "tensorrt"')
XGBOOST_JSON = _served(
    "xgboost_json", "an XGBoost model in JSON", 'backend "fil" with model_type "xgboost_json"'
)
XGBOOST_UBJ = _served(
    "xgboost_ubj", "an XGBoost model in UBJSON", 'backend "fil" with model_type "xgboost_ubj"'
)
XGBOOST_BINARY = _served(
    "xgboost_binary", "an XGBoost model in its legacy binary form", 'backend "fil" with model_type "xgboost"'
)
LIGHTGBM = _served("lightgbm", "a LightGBM model", 'backend "fil" with model_type "lightgbm"')
TREELITE = _served("treelite", "a treelite checkpoint", 'backend "fil" with model_type "treelite_checkpoint"')
SKOPS = _served("skops", "a scikit-learn model saved by skops", 'backend "sklearn"')
CATBOOST = _served("catboost", "a CatBoost model", 'backend "catboost"')
TREE_FORMATS = frozenset({XGBOOST_JSON, XGBOOST_UBJ, XGBOOST_BINARY, LIGHTGBM, TREELITE, SKOPS, CATBOOST})
"""Formats of the backends of trees and of scikit-learn."""

SAFETENSORS = FileFormat(
    "safetensors",
    "a safetensors file, which holds weights without a model",
    'put the model\'s class into a model.py beside it and use backend "pytorch" with runtime: "model.py"',
)
GGUF = FileFormat("gguf", "a GGUF file", "it holds weights for llama.cpp; serve it from a Python model")
KERAS = FileFormat("keras", "a Keras model file", "export it as a SavedModel with model.export(...)")
HDF5 = FileFormat("hdf5", "an HDF5 file", "if it is a Keras model, export it as a SavedModel")
PYTHON = _served("python", "Python code", 'backend "python"')
LFS_POINTER = FileFormat("lfs_pointer", "a pointer of Git LFS, not the file itself", "run `git lfs pull`")
HTML = FileFormat("html", "an HTML page", "it was probably saved by a download that failed; fetch it again")
ARCHIVE = FileFormat("archive", "an archive", "unpack it into the version directory")
EMPTY = FileFormat("empty", "empty", "copy it again")

_MAGIC = (
    (b"ptrt", TENSORRT),
    (b"ftrt", TENSORRT),
    (b"GGUF", GGUF),
    (b"CBM1", CATBOOST),
    (b"\x89HDF\r\n", HDF5),
    (b"version https://git-lfs", LFS_POINTER),
    (b"tree\n", LIGHTGBM),
    (b"binf", XGBOOST_BINARY),
    (b"bs64", XGBOOST_BINARY),
    (b"\x1f\x8b", ARCHIVE),
    (b"{L\x00", XGBOOST_UBJ),
)


def identify(path: Path) -> FileFormat | None:
    """The format of a file or folder; None if it is not recognised.

    Raises:
        OSError: It can't be read.
    """
    if path.is_dir():
        return SAVED_MODEL if (path / "saved_model.pb").is_file() else None
    with path.open("rb") as file:
        head = file.read(_HEAD)
    found = _identified(path, head)
    # joblib compresses its pickles in many ways.
    return PICKLE if found in (None, ARCHIVE) and path.suffix in _PICKLES else found


def _identified(path: Path, head: bytes) -> FileFormat | None:
    if not head:
        return EMPTY
    if head.startswith(b"PK\x03\x04"):
        return _zip_format(path)
    for magic, found in _MAGIC:
        if head.startswith(magic):
            return found
    if head[4:8] == b"TFL3":
        return TFLITE
    return _structured(path, head)


def describe(path: Path) -> str:
    """Format of a file and advice for it, as a clause ``is ...; ...``; empty if it is not recognised."""
    try:
        found = identify(path)
    except OSError:
        return ""
    return "" if found is None else f"is {found.what}; {found.advice}"


def hint(path: Path) -> str:
    """`describe` as the end of an engine's error text about a file."""
    found = describe(path)
    return f" (the file {found})" if found else ""


def _structured(path: Path, head: bytes) -> FileFormat | None:
    """Formats without magic bytes."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if re.match(rb"\{[\$iIlUL]", head):
        return XGBOOST_UBJ
    if text.startswith(b"{"):
        return XGBOOST_JSON if b'"learner"' in head or b'"version"' in head else None
    if text.lower().startswith((b"<!doctype html", b"<html")):
        return HTML
    if text.startswith((b"<?xml", b"<net")):
        return OPENVINO_IR if b"<net" in head else None
    if re.match(rb"\x80[\x02-\x05]", head):
        return PICKLE
    if _is_old_xgboost(head):
        return XGBOOST_BINARY
    if re.match(rb"[\x03-\x09]\0\0\0[\0-\x40]\0\0\0[\0-\x40]\0\0\0", head):
        return TREELITE
    if _is_safetensors(path, head):
        return SAFETENSORS
    # Field 1 of a ModelProto is the small number of the IR version; producer, graph or opsets follow.
    if re.match(rb"\x08[\x01-\x20][\x12\x1a\x22\x32\x3a\x42\x72\x28]", head):
        return ONNX
    if path.suffix == ".py":
        return PYTHON
    return None


def _is_old_xgboost(head: bytes) -> bool:
    """True for a model of XGBoost before 0.80, without magic: 136 bytes of numbers, objective, booster."""
    pattern = rb".{136}(?P<length>.)\0{7}(?P<objective>[a-z:]+).\0{7}gb(tree|linear)"
    match = re.match(pattern, head, re.DOTALL)
    return match is not None and match["length"][0] == len(match["objective"])


def _is_safetensors(path: Path, head: bytes) -> bool:
    length = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and 2 <= length <= path.stat().st_size - 8


def _zip_format(path: Path) -> FileFormat | None:
    """The format of a zip archive by its members; those of PyTorch lie in one folder of any name."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if "config.json" in names and "model.weights.h5" in names:
                return KERAS
            if "schema.json" in names:
                return SKOPS if "__module__" in json.loads(archive.read("schema.json")) else None
    except Exception:  # boundary: a file of the user, which can fail in any way
        return None
    tails = [name.partition("/")[2] for name in names]
    if any(re.match(r"models/.*\.json", tail) for tail in tails):
        return EXPORTED_PROGRAM
    if any(re.match(r"data/aotinductor/.*\.(so|pyd)$", tail) for tail in tails):
        return AOT_INDUCTOR
    if "constants.pkl" in tails and any(tail.startswith("code/") for tail in tails):
        return TORCHSCRIPT
    if "data.pkl" in tails:
        return TORCH_SAVE
    return ARCHIVE
