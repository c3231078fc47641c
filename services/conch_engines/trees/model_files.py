"""Types of model files of tree libraries: default names, the search in a version directory, skops files.

Parsers of these libraries are C++ and trust their input, so a file is recognised before any of them opens it.
skops opens a file without running its code: types that are not known to be harmless are refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from conch.core import file_formats
from conch.core.errors import InternalError, InvalidArgumentError, UnavailableError
from conch.core.file_formats import FileFormat, describe, identify
from conch_engines.trees.trusted_types import HARMLESS_TYPES

XGBOOST = "xgboost"
XGBOOST_JSON = "xgboost_json"
XGBOOST_UBJ = "xgboost_ubj"
LIGHTGBM = "lightgbm"
CHECKPOINT = "treelite_checkpoint"
SKLEARN = "sklearn"
CATBOOST = "catboost"

FILE_NAMES = {
    XGBOOST: "xgboost.model",
    XGBOOST_JSON: "xgboost.json",
    XGBOOST_UBJ: "xgboost.ubj",
    LIGHTGBM: "model.txt",
    CHECKPOINT: "checkpoint.tl",
    SKLEARN: "model.skops",
    CATBOOST: "model.cbm",
}
"""Default file by model type. The types are Triton's, ``sklearn`` and ``catboost``."""

OF_XGBOOST = frozenset({XGBOOST, XGBOOST_JSON, XGBOOST_UBJ})
"""Types of XGBoost, any of which a file may have: XGBoost 3.1 writes UBJSON to all names but ``.json``."""

_FORMATS = {
    XGBOOST: file_formats.XGBOOST_BINARY,
    XGBOOST_JSON: file_formats.XGBOOST_JSON,
    XGBOOST_UBJ: file_formats.XGBOOST_UBJ,
    LIGHTGBM: file_formats.LIGHTGBM,
    CHECKPOINT: file_formats.TREELITE,
    SKLEARN: file_formats.SKOPS,
    CATBOOST: file_formats.CATBOOST,
}
_REFUSED_SUFFIXES = (".joblib", ".pickle", ".pkl")


class DamagedError(ValueError):
    """A file contradicts its own format; the text says where."""


def find_model(
    directory: Path, file_name: str, kinds: Iterable[str], model: str, also: Iterable[str] = ()
) -> tuple[Path, str]:
    """The file and its type; a folder is searched for the names of `kinds`, in this order, and of `also`."""
    path = directory / file_name
    if path.is_dir():
        names = (*(FILE_NAMES[kind] for kind in kinds), *also)
        found = next((path / name for name in names if (path / name).is_file()), None)
        if found is None:
            for other in sorted(path.iterdir()):
                if other.suffix in _REFUSED_SUFFIXES:
                    recognize(other, model)  # says why it is not served
            others = f"; nor is there {', '.join(names[1:])}: name the file in default_model_filename"
            raise UnavailableError(
                f"unable to find '{path / names[0]}' for model instance '{model}'"
                f"{others if len(names) > 1 else ''}"
            )
        path = found
    if not path.is_file():
        raise UnavailableError(f"unable to find '{path}' for model instance '{model}'")
    return path, recognize(path, model)


def recognize(path: Path, model: str) -> str:
    """The type of a file, by its first bytes."""
    try:
        found: FileFormat | None = identify(path)
    except OSError as error:
        raise UnavailableError(f"unable to read '{path}' for model '{model}': {error.strerror}") from error
    for kind, form in _FORMATS.items():
        if found is form:
            return kind
    what = describe(path) or "is of a kind that no tree backend reads"
    raise InvalidArgumentError(f"unable to load model '{model}': the file '{path}' {what}")


def wrong_kind(path: Path, kind: str, model: str, fix: str) -> InvalidArgumentError:
    """The error for a file of a type that the config does not allow."""
    return InvalidArgumentError(f"unable to load model '{model}': '{path}' is {text_of(kind)}, {fix}")


def unreadable(path: Path, kind: str, model: str, reason: str) -> InternalError:
    """The error for a file that its parser, or a check before it, rejects."""
    return InternalError(
        f"unable to load model '{model}': '{path}' can't be read as {text_of(kind)}: {reason}"
    )


def text_of(kind: str) -> str:
    """Description of a file's type, with its article, for error texts."""
    return _FORMATS[kind].what


def hint_of(kind: str) -> str:
    """The backend that serves a file of a type, for error texts."""
    return _FORMATS[kind].advice


TRUSTED_TYPES = "CONCH_TRUSTED_TYPES"
"""Parameter of backend `sklearn`: types that a config trusts, with commas between them."""


def open_estimator(path: Path, model: str, trusted: str | None = None) -> Any:
    """Opens an estimator.

    Args:
        path: The file.
        model: The model's name.
        trusted: The parameter `TRUSTED_TYPES`; None where the backend does not read it.
    """
    try:
        import skops.io
    except ModuleNotFoundError as error:
        raise missing_package(error, model, "a scikit-learn model") from error
    untrusted = _untrusted(skops.io, path, model)
    foreign = sorted(set(untrusted) - HARMLESS_TYPES - set(re.split(r"[,\s]+", trusted or "")))
    if foreign:
        names = ", ".join(foreign)
        way = (
            "" if trusted is None else f", or name them in parameter '{TRUSTED_TYPES}' if you trust the file"
        )
        raise InvalidArgumentError(
            f"unable to load model '{model}': '{path}' has types that could run code when they are loaded: "
            f"{names}; save a model of scikit-learn's own types{way}"
        )
    try:
        with warnings.catch_warnings(record=True):  # other versions of scikit-learn, which mostly work
            warnings.simplefilter("always")
            return skops.io.load(path, trusted=untrusted)
    except Exception as error:  # of skops, which raises whatever the types raise
        raise unreadable(path, SKLEARN, model, _text(error)) from error


def _untrusted(skops_io: Any, path: Path, model: str) -> list[str]:
    try:
        return list(skops_io.get_untrusted_types(file=path))
    except Exception as error:  # of skops: the file may be anything
        raise unreadable(path, SKLEARN, model, _text(error)) from error


def missing_package(
    error: ModuleNotFoundError, model: str, purpose: str, install: str = "'conch[trees]'"
) -> UnavailableError:
    """The error for a package that only some models need."""
    return UnavailableError(
        f"unable to load model '{model}': {purpose} needs the Python package '{error.name}', which is not "
        f"installed; install it with `pip install {install}`"
    )


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
