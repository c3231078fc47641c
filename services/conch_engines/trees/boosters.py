"""Opens models in XGBoost and LightGBM themselves, and computes contributions of features (SHAP values).

treelite has no SHAP values, so they come from the library that trained the model. The functions here are safe
for concurrent calls on one booster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conch.core.engine_text import engine_text
from conch.core.errors import UnavailableError
from conch.core.tensor import Array
from conch_engines.trees.lightgbm_text import read_lightgbm
from conch_engines.trees.model_files import (
    LIGHTGBM,
    XGBOOST_JSON,
    XGBOOST_UBJ,
    DamagedError,
    missing_package,
    unreadable,
)

log = logging.getLogger(__name__)

Contributions = Callable[[Array], Array]
"""Maps rows to an array of shape [rows, classes, features + 1]; the last column is the bias."""

SMALL_ROWS = 64
"""Rows up to which one thread is faster than waking others."""


def open_xgboost(path: Path, kind: str, model: str, threads: int) -> Any:
    """Opens an `xgboost.Booster` with a fixed number of threads; the file was checked before."""
    try:
        import xgboost
    except ModuleNotFoundError as error:
        raise missing_package(error, model, "an XGBoost model") from error
    content = file_content(path, model)
    try:
        # From memory, as XGBoost judges a file by its name.
        booster = xgboost.Booster({"nthread": threads}, model_file=bytearray(content))
        booster.set_param({"nthread": threads})
    except xgboost.core.XGBoostError as error:
        raise unreadable(path, kind, model, engine_text(error).splitlines()[0]) from error
    return booster


def open_lightgbm(path: Path, model: str) -> Any:
    """Opens a `lightgbm.Booster`."""
    try:
        import lightgbm
    except ModuleNotFoundError as error:
        raise missing_package(error, model, "a LightGBM model") from error
    content = file_content(path, model)
    lightgbm.register_logger(log)  # it prints otherwise
    try:
        read_lightgbm(content)
        return lightgbm.Booster(model_str=content.decode())
    except (DamagedError, lightgbm.basic.LightGBMError) as error:
        raise unreadable(path, LIGHTGBM, model, engine_text(error).splitlines()[0]) from error


def open_contributions(
    path: Path, kind: str, model: str, threads: int, iterations: int
) -> Contributions | None:
    """The function for a model file; None for types that no library computes contributions for."""
    if kind in (XGBOOST_JSON, XGBOOST_UBJ):
        return xgboost_contributions(open_xgboost(path, kind, model, threads), threads, iterations)
    if kind == LIGHTGBM:
        return lightgbm_contributions(open_lightgbm(path, model), threads)
    return None


def has_contributions(kind: str) -> bool:
    """True if `open_contributions` has a function for a type."""
    return kind in (XGBOOST_JSON, XGBOOST_UBJ, LIGHTGBM)


def xgboost_contributions(booster: Any, threads: int, iterations: int) -> Contributions:
    """FP32 contributions to the margin, with the base score in the bias; 0 stands for all iterations."""

    def contributions(rows: Array) -> Array:
        found: Array = booster.predict(
            matrix_of(rows, threads),
            pred_contribs=True,
            strict_shape=True,
            validate_features=False,
            iteration_range=(0, iterations),
        )
        return found

    return contributions


def lightgbm_contributions(booster: Any, threads: int) -> Contributions:
    """FP64 contributions to the raw score."""

    def contributions(rows: Array) -> Array:
        found: Array = booster.predict(rows, pred_contrib=True, num_threads=threads_for(rows, threads))
        return found.reshape(len(rows), -1, rows.shape[1] + 1)

    return contributions


def matrix_of(rows: Array, threads: int) -> Any:
    """Rows as an `xgboost.DMatrix`, with NaN for missing values."""
    import xgboost

    return xgboost.DMatrix(rows, nthread=threads_for(rows, threads))


def threads_for(rows: Array, threads: int) -> int:
    """Threads for a batch."""
    return 1 if len(rows) <= SMALL_ROWS else threads


def file_content(path: Path, model: str) -> bytes:
    """A model file's bytes."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnavailableError(f"unable to read '{path}' for model '{model}': {error.strerror}") from error
