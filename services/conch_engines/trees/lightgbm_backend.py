"""The backend ``lightgbm``: LightGBM's own results by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conch.core.spec import ModelSpec
from conch.core.tensor import Array
from conch_engines.trees.boosters import file_content, lightgbm_contributions, open_lightgbm, threads_for
from conch_engines.trees.fil_parameters import BEST_ITERATION, CPU_THREADS, boolean
from conch_engines.trees.lightgbm_text import read_lightgbm
from conch_engines.trees.model_files import LIGHTGBM, DamagedError, unreadable
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
from conch_engines.trees.xgboost_file import choose_iterations


class LightgbmBackend(NamedOutputsBackend):
    """Boosters of trees, linear trees included."""

    kinds = (LIGHTGBM,)
    file_names = ("lightgbm.txt",)
    parameters = (CPU_THREADS, BEST_ITERATION)

    def __init__(self) -> None:
        # Imported late, and here so that a missing package is an error of the backend.
        import lightgbm  # noqa: F401

    def describe(self, path: Path, kind: str, model: str, parameters: Mapping[str, str]) -> Offer:
        """Reads and checks the text."""
        choose_iterations(None, boolean(parameters, BEST_ITERATION), path, model)
        try:
            header = read_lightgbm(file_content(path, model))
        except DamagedError as error:
            raise unreadable(path, kind, model, str(error)) from error
        outputs: dict[str, tuple[str, tuple[int, ...]]] = {
            # An objective of the user's own may have several outputs that are no classes.
            PREDICT: ("INT64", (1,)) if header.classifies else ("FP64", (header.outputs,)),
            MARGIN: ("FP64", (header.outputs,)),
            LEAF: ("INT32", (header.trees,)),
        }
        if not header.linear:  # of which LightGBM computes none
            outputs[CONTRIBUTIONS] = "FP64", contribution_dims(header.outputs, header.features)
        if header.classifies:
            outputs[PREDICT_PROBA] = "FP64", (max(header.outputs, 2),)
        return Offer(header.features, "FP64", outputs, {}, features_by_name=header.columns)

    def open_model(self, path: Path, kind: str, spec: ModelSpec, threads: int, offer: Offer) -> NamedFunction:
        """Opens the booster."""
        return _LightgbmFunction(open_lightgbm(path, spec.name), threads, offer)


class _LightgbmFunction:
    def __init__(self, booster: Any, threads: int, offer: Offer) -> None:
        self._predict = booster.predict
        self._threads = threads
        self._classifies = PREDICT_PROBA in offer.outputs
        self._dims = offer.outputs[CONTRIBUTIONS][1] if CONTRIBUTIONS in offer.outputs else ()
        self._contributions = lightgbm_contributions(booster, threads)

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        rows = inputs[INPUT]
        count = len(rows)
        threads = threads_for(rows, self._threads)
        found: dict[str, Array] = {}
        if PREDICT in outputs or PREDICT_PROBA in outputs:
            values = self._predict(rows, num_threads=threads).reshape(count, -1)
            found = classes_and_probabilities(values) if self._classifies else {PREDICT: values}
        if MARGIN in outputs:
            found[MARGIN] = self._predict(rows, raw_score=True, num_threads=threads).reshape(count, -1)
        if LEAF in outputs:
            found[LEAF] = self._predict(rows, pred_leaf=True, num_threads=threads).astype(
                np.int32, copy=False
            )
        if CONTRIBUTIONS in outputs:
            found[CONTRIBUTIONS] = self._contributions(rows).reshape(count, *self._dims)
        return found
