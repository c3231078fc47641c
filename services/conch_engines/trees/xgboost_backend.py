"""The backend ``xgboost``: predictions, probabilities, margins, leaves and contributions of boosters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from conch.core.tensor import Array
from conch_engines.trees.boosters import SMALL_ROWS, matrix_of, open_xgboost, xgboost_contributions
from conch_engines.trees.forest import TreeliteEngine
from conch_engines.trees.model_files import XGBOOST_JSON, XGBOOST_UBJ
from conch_engines.trees.named_outputs import (
    CONTRIBUTIONS,
    INPUT,
    LEAF,
    MARGIN,
    PREDICT,
    PREDICT_PROBA,
    NamedFunction,
    NamedOutputsBackend,
    Offer,
    classes_and_probabilities,
    contribution_dims,
)

BASE_MARGIN = "base_margin"
_PROBABILITIES = ("sigmoid", "softmax")
"""treelite's names of transforms whose results are probabilities."""


class XgboostBackend(NamedOutputsBackend):
    """Boosters of trees; treelite checks their files, as XGBoost's parsers trust them."""

    kinds = (XGBOOST_JSON, XGBOOST_UBJ)
    file_names = ("xgboost.model", "model.json", "model.ubj", "model.xgb", "model.bst")

    def __init__(self) -> None:
        # Imported late, and here so that a missing package is an error of the backend.
        import xgboost  # noqa: F401

        self._engine = TreeliteEngine()

    def describe(self, path: Path, kind: str, model: str) -> Offer:
        """Reads the file with treelite."""
        forest = self._engine.open(path, kind, model, allow_unknown_field=True)
        classes, features = forest.classes, forest.features
        classifies = forest.is_classifier and forest.transform in _PROBABILITIES
        outputs: dict[str, tuple[str, tuple[int, ...]]] = {
            PREDICT: ("INT64" if classifies else "FP32", (1,)),
            MARGIN: ("FP32", (classes,)),
            LEAF: ("INT32", (forest.trees,)),
            CONTRIBUTIONS: ("FP32", contribution_dims(classes, features)),
        }
        if classifies:
            outputs[PREDICT_PROBA] = "FP32", (max(classes, 2),)
        return Offer(features, "FP32", outputs, {BASE_MARGIN: ("FP32", (classes,))})

    def open_model(self, path: Path, kind: str, model: str, threads: int, offer: Offer) -> NamedFunction:
        """Opens one booster, or one for small batches and one for large ones, as each has fixed threads."""
        small = open_xgboost(path, kind, model, 1)
        large = small if threads == 1 else open_xgboost(path, kind, model, threads)
        if PREDICT_PROBA in offer.outputs and offer.outputs[MARGIN][1] != (1,):
            for booster in {id(each): each for each in (small, large)}.values():
                # `multi:softmax` returns class ids, of which no probabilities can be made.
                booster.set_param({"objective": "multi:softprob"})
        return _XgboostFunction(small, large, threads, offer)


class _XgboostFunction:
    def __init__(self, small: Any, large: Any, threads: int, offer: Offer) -> None:
        self._small = small
        self._large = large
        self._threads = threads
        self._classifies = PREDICT_PROBA in offer.outputs
        self._dims = offer.outputs[CONTRIBUTIONS][1]
        self._contributions = xgboost_contributions(large, threads)

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        rows = inputs[INPUT]
        base = inputs.get(BASE_MARGIN)
        booster = self._small if len(rows) <= SMALL_ROWS else self._large
        found: dict[str, Array] = {}
        if PREDICT in outputs or PREDICT_PROBA in outputs:
            values = _predict(booster, rows, "value", base)
            found = classes_and_probabilities(values) if self._classifies else {PREDICT: values}
        if MARGIN in outputs:
            found[MARGIN] = _predict(booster, rows, "margin", base)
        if LEAF in outputs:
            matrix = matrix_of(rows, self._threads)
            leaves = booster.predict(matrix, pred_leaf=True, strict_shape=True, validate_features=False)
            found[LEAF] = leaves.reshape(len(rows), -1).astype(np.int32)
        if CONTRIBUTIONS in outputs:
            found[CONTRIBUTIONS] = self._contributions(rows).reshape(len(rows), *self._dims)
        return found


def _predict(booster: Any, rows: Array, kind: str, base: Array | None) -> Array:
    found: Array = booster.inplace_predict(
        rows, predict_type=kind, base_margin=base, validate_features=False, strict_shape=True
    )
    return found
