"""The backend ``xgboost``: predictions, probabilities, margins, leaves and contributions of boosters."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec
from conch.core.tensor import Array
from conch_engines.trees.boosters import (
    SMALL_ROWS,
    file_content,
    matrix_of,
    open_xgboost,
    xgboost_contributions,
)
from conch_engines.trees.feature_columns import xgboost_columns
from conch_engines.trees.fil_parameters import BEST_ITERATION, CPU_THREADS, boolean
from conch_engines.trees.model_files import XGBOOST_JSON, XGBOOST_UBJ, DamagedError, unreadable
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
from conch_engines.trees.xgboost_file import choose_iterations, read_xgboost
from conch_frames.column_rules import COLUMNS_PARAMETER

BASE_MARGIN = "base_margin"


class XgboostBackend(NamedOutputsBackend):
    """Boosters of trees and linear ones."""

    kinds = (XGBOOST_JSON, XGBOOST_UBJ)
    file_names = ("xgboost.model", "model.json", "model.ubj", "model.xgb", "model.bst")
    parameters = (CPU_THREADS, BEST_ITERATION)

    def __init__(self) -> None:
        # Imported late, and here so that a missing package is an error of the backend.
        import xgboost  # noqa: F401

    def describe(self, path: Path, kind: str, model: str, parameters: Mapping[str, str]) -> Offer:
        """Reads and checks the file."""
        try:
            found = read_xgboost(file_content(path, model), kind)
        except DamagedError as error:
            raise unreadable(path, kind, model, str(error)) from error
        if found.has_old_vectors:
            raise InvalidArgumentError(
                f"unable to load model '{model}': XGBoost before 3.2 wrote the trees of '{path}', whose "
                f"leaves hold a value for each output; train it with a later one, or without multi_strategy "
                f"'multi_output_tree'"
            )
        iterations, warnings = choose_iterations(found, boolean(parameters, BEST_ITERATION), path, model)
        outputs: dict[str, tuple[str, tuple[int, ...]]] = {
            # Several targets and quantiles have a value each, as has each label of several.
            PREDICT: ("INT64", (1,)) if found.classifies else ("FP32", (found.outputs,)),
            MARGIN: ("FP32", (found.outputs,)),
        }
        if not found.has_vectors:  # of which XGBoost has neither
            outputs[CONTRIBUTIONS] = "FP32", contribution_dims(found.outputs, found.features)
            if not found.linear:
                outputs[LEAF] = "INT32", (found.best_trees if iterations else found.trees,)
        if found.classifies:
            outputs[PREDICT_PROBA] = "FP32", (max(found.outputs, 2),)
        optional = {BASE_MARGIN: ("FP32", (found.outputs,))}
        return Offer(
            found.features,
            "FP32",
            outputs,
            optional,
            iterations=iterations,
            warnings=warnings,
            features_by_name=()
            if COLUMNS_PARAMETER in parameters
            else xgboost_columns(found.document, found.features, model),
        )

    def open_model(self, path: Path, kind: str, spec: ModelSpec, threads: int, offer: Offer) -> NamedFunction:
        """Opens one booster, or one for small batches and one for large ones, as each has fixed threads."""
        small = open_xgboost(path, kind, spec.name, 1)
        large = small if threads == 1 else open_xgboost(path, kind, spec.name, threads)
        if PREDICT_PROBA in offer.outputs and offer.outputs[MARGIN][1] != (1,):
            for booster in {id(each): each for each in (small, large)}.values():
                # `multi:softmax` returns class ids, of which no probabilities can be made.
                booster.set_param({"objective": "multi:softprob"})
        linear = json.loads(small.save_config())["learner"]["gradient_booster"]["name"] == "gblinear"
        return (_LinearFunction if linear else _XgboostFunction)(small, large, threads, offer)


class _XgboostFunction:
    def __init__(self, small: Any, large: Any, threads: int, offer: Offer) -> None:
        self._small = small
        self._large = large
        self._threads = threads
        self._range = (0, offer.iterations)
        self._classifies = PREDICT_PROBA in offer.outputs
        self._dims = offer.outputs[CONTRIBUTIONS][1] if CONTRIBUTIONS in offer.outputs else ()
        self._contributions = xgboost_contributions(large, threads, offer.iterations)

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        rows = inputs[INPUT]
        base = inputs.get(BASE_MARGIN)
        booster = self._small if len(rows) <= SMALL_ROWS else self._large
        found: dict[str, Array] = {}
        if PREDICT in outputs or PREDICT_PROBA in outputs:
            values = self._predict(booster, rows, "value", base)
            found = classes_and_probabilities(values) if self._classifies else {PREDICT: values}
        if MARGIN in outputs:
            found[MARGIN] = self._predict(booster, rows, "margin", base)
        if LEAF in outputs:
            matrix = matrix_of(rows, self._threads)
            leaves = booster.predict(
                matrix,
                pred_leaf=True,
                strict_shape=True,
                validate_features=False,
                iteration_range=self._range,
            )
            found[LEAF] = leaves.reshape(len(rows), -1).astype(np.int32)
        if CONTRIBUTIONS in outputs:
            found[CONTRIBUTIONS] = self._contributions(rows).reshape(len(rows), *self._dims)
        return found

    def _predict(self, booster: Any, rows: Array, kind: str, base: Array | None) -> Array:
        found: Array = booster.inplace_predict(
            rows,
            predict_type=kind,
            base_margin=base,
            validate_features=False,
            strict_shape=True,
            iteration_range=self._range,
        )
        return found


class _LinearFunction(_XgboostFunction):
    """A `gblinear`, which XGBoost predicts from its own matrices only, and safely on one thread only."""

    def __init__(self, small: Any, large: Any, threads: int, offer: Offer) -> None:
        super().__init__(small, large, threads, offer)
        self._lock = threading.Lock()

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        with self._lock:
            return super().__call__(inputs, outputs)

    def _predict(self, booster: Any, rows: Array, kind: str, base: Array | None) -> Array:
        matrix = matrix_of(rows, self._threads)
        if base is not None:
            matrix.set_base_margin(base)
        found: Array = booster.predict(
            matrix, output_margin=kind == "margin", validate_features=False, strict_shape=True
        )
        return found
