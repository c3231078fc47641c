"""Recognises model files of tree libraries by their content, and finds them in a version directory.

Parsers of these libraries are C++ and trust their input, so a file is named before any of them opens it, and
one of another kind is refused with the way to serve it. Threads and locks: none. Used by: all tree backends.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path

from conch.core.errors import InternalError, InvalidArgumentError, UnavailableError

XGBOOST = "xgboost"
XGBOOST_JSON = "xgboost_json"
XGBOOST_UBJ = "xgboost_ubj"
LIGHTGBM = "lightgbm"
CHECKPOINT = "treelite_checkpoint"
SKLEARN = "sklearn"

FILE_NAMES = {
    XGBOOST: "xgboost.model",
    XGBOOST_JSON: "xgboost.json",
    XGBOOST_UBJ: "xgboost.ubj",
    LIGHTGBM: "model.txt",
    CHECKPOINT: "checkpoint.tl",
    SKLEARN: "model.skops",
}
"""Default file by model type. The types are Triton's, and ``sklearn``."""

OF_XGBOOST = frozenset({XGBOOST, XGBOOST_JSON, XGBOOST_UBJ})
"""Types of XGBoost, any of which a file may have: XGBoost 3.1 writes UBJSON to all names but ``.json``."""

_TEXTS = {
    XGBOOST: "a model in XGBoost's old binary format",
    XGBOOST_JSON: "an XGBoost model in JSON",
    XGBOOST_UBJ: "an XGBoost model in UBJSON",
    LIGHTGBM: "a LightGBM model",
    CHECKPOINT: "a treelite checkpoint",
    SKLEARN: "a scikit-learn model saved by skops",
}

_HEAD_BYTES = 512
_PICKLED = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_COMPRESSED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda", b"BZh", b"\xfd7zXZ")
_REFUSED_SUFFIXES = (".cbm", ".joblib", ".pickle", ".pkl")
_ZIP = b"PK\x03\x04"
_CATBOOST = b"CBM1"
_SKOPS_SCHEMA = "schema.json"
_OLD_HEADER = 136
"""Bytes of numbers before the names of objective and booster in XGBoost's old format."""

_PICKLE_ADVICE = (
    "which runs code when it is opened. Save a scikit-learn model with skops.io.dump(model, 'model.skops'), "
    "a forest also with treelite.sklearn.import_model(model).serialize('checkpoint.tl'), and an XGBoost or "
    "LightGBM model with its own save_model"
)
_CATBOOST_ADVICE = (
    "which has no engine here; export it with model.save_model('model.onnx', format='onnx') and serve it "
    "with backend 'onnxruntime'"
)


class DamagedError(ValueError):
    """A file contradicts its own format; the text says where."""


def find_model(
    directory: Path, file_name: str, kinds: Iterable[str], model: str, also: Iterable[str] = ()
) -> tuple[Path, str]:
    """Finds a model's file, and recognises it.

    Args:
        directory: The version directory.
        file_name: The config's name of the file or of a folder with it; empty for the version directory.
        kinds: Types whose default names are looked for in a folder, in this order.
        model: Name of the model, for messages.
        also: Further default names.

    Returns:
        The file and its type, which may be any.

    Raises:
        UnavailableError: There is no such file.
        InvalidArgumentError: The file is of no type.
    """
    path = directory / file_name
    if path.is_dir():
        names = (*(FILE_NAMES[kind] for kind in kinds), *also)
        found = next((path / name for name in names if (path / name).is_file()), None)
        if found is None:
            for other in sorted(path.iterdir()):
                if other.suffix in _REFUSED_SUFFIXES:
                    sniff(other, model)  # says why it is not served
            path = path / names[0]
        else:
            path = found
    if not path.is_file():
        raise UnavailableError(f"unable to find '{path}' for model instance '{model}'")
    return path, sniff(path, model)


def sniff(path: Path, model: str) -> str:
    """The type of a file, by its first bytes.

    Raises:
        InvalidArgumentError: It has none; the text says what the file is and how to serve it.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise UnavailableError(f"unable to read '{path}' for model '{model}': {error.strerror}") from error
    kind = _recognized(path, head)
    if kind is not None:
        return kind
    if head.startswith(_CATBOOST) or path.suffix == ".cbm":
        raise InvalidArgumentError(_unservable(path, model, "a CatBoost model", _CATBOOST_ADVICE))
    if head.startswith(_PICKLED):
        raise InvalidArgumentError(_unservable(path, model, "a Python pickle", _PICKLE_ADVICE))
    if head.startswith(_COMPRESSED):
        what = "a compressed file, probably a Python pickle of joblib"
        raise InvalidArgumentError(_unservable(path, model, what, _PICKLE_ADVICE))
    if head.startswith(_ZIP):
        what = f"a zip archive without '{_SKOPS_SCHEMA}'"
        raise InvalidArgumentError(_unservable(path, model, what, "so skops has not written it"))
    what = "a file of unknown kind" if head else "an empty file"
    raise InvalidArgumentError(_unservable(path, model, what, "which no tree backend reads"))


def _recognized(path: Path, head: bytes) -> str | None:
    if head.startswith((b"tree\n", b"tree\r\n")):
        return LIGHTGBM
    if head.startswith(b"{") and not head[1:].lstrip().startswith((b'"', b"}")):
        return XGBOOST_UBJ
    if head.lstrip().startswith(b"{"):
        return XGBOOST_JSON
    if _is_old_xgboost(head):
        return XGBOOST
    if len(head) >= 12:
        major, minor, patch = struct.unpack_from("<iii", head)
        if 1 <= major <= 99 and 0 <= minor <= 999 and 0 <= patch <= 999:
            return CHECKPOINT
    if head.startswith(_ZIP):
        try:
            with zipfile.ZipFile(path) as archive:
                return SKLEARN if _SKOPS_SCHEMA in archive.namelist() else None
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
            return None
    return None


def _is_old_xgboost(head: bytes) -> bool:
    """True for a head with a length and a name where the old format has those of objective and booster."""
    at = _OLD_HEADER + (4 if head.startswith(b"binf") else 0)
    for _ in range(2):
        if len(head) < at + 8:
            return False
        (length,) = struct.unpack_from("<Q", head, at)
        name = head[at + 8 : at + 8 + length]
        if (
            not 0 < length < 100
            or len(name) != length
            or not name.isascii()
            or not name.decode().isprintable()
        ):
            return False
        at += 8 + length
    return True


def wrong_kind(path: Path, kind: str, model: str, fix: str) -> InvalidArgumentError:
    """The error for a file of a type that the config does not allow."""
    return InvalidArgumentError(_unservable(path, model, text_of(kind), fix))


def unreadable(path: Path, kind: str, model: str, reason: str) -> InternalError:
    """The error for a file that its parser, or a check before it, rejects."""
    return InternalError(
        f"unable to load model '{model}': '{path}' can't be read as {text_of(kind)}: {reason}"
    )


def text_of(kind: str) -> str:
    """What a file of a type is, with its article."""
    return _TEXTS[kind]


def _unservable(path: Path, model: str, what: str, advice: str) -> str:
    return f"unable to load model '{model}': '{path}' is {what}, {advice}"
