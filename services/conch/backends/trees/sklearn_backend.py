"""The backend ``sklearn``: scikit-learn's own results by name. Used by: the entry point ``sklearn``.

Serves every estimator, trees or not, that skops opens without running code of the file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from conch.backends.trees.model_files import SKLEARN
from conch.backends.trees.named_outputs import (
    INPUT,
    LEAF,
    MARGIN,
    PREDICT,
    PREDICT_PROBA,
    NamedFunction,
    NamedOutputsBackend,
    Offer,
)
from conch.backends.trees.skops_file import open_estimator
from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Array

_METHODS = {PREDICT: "predict", PREDICT_PROBA: "predict_proba", MARGIN: "decision_function", LEAF: "apply"}
_DATATYPES = {"f": "FP64", "i": "INT64", "u": "INT64", "b": "BOOL", "U": "BYTES", "S": "BYTES", "O": "BYTES"}
"""Datatype of results by numpy's kind."""
_DTYPES = {"FP64": np.float64, "INT64": np.int64, "BOOL": np.bool_}


class SklearnBackend(NamedOutputsBackend):
    """Estimators with a ``predict``."""

    kinds = (SKLEARN,)

    def __init__(self) -> None:
        # Imported late, and here so that a missing package is an error of the backend.
        import skops.io  # noqa: F401

    def describe(self, path: Path, kind: str, model: str) -> Offer:
        """Opens the estimator and predicts a row of zeros, as estimators do not say what they return."""
        estimator = open_estimator(path, model)
        features = getattr(estimator, "n_features_in_", None)
        if features is None or not hasattr(estimator, "predict"):
            raise InvalidArgumentError(
                f"unable to load model '{model}': {type(estimator).__name__} of '{path}' is not fitted, or "
                f"has no 'predict'"
            )
        outputs: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, function in _functions(estimator).items():
            try:
                array = np.asarray(function(np.zeros((1, features))))
            except Exception as error:
                if name == PREDICT:
                    raise InvalidArgumentError(
                        f"unable to load model '{model}': {type(estimator).__name__} of '{path}' can't "
                        f"predict a row of {features} numbers: {error}"
                    ) from error
                continue  # such as probabilities of a model trained without them
            if len(array) == 1 and array.dtype.kind in _DATATYPES:
                outputs[name] = _DATATYPES[array.dtype.kind], (max(array.size, 1),)
        return Offer(int(features), "FP64", outputs, {})

    def open_model(self, path: Path, kind: str, model: str, threads: int, offer: Offer) -> NamedFunction:
        """Opens the estimator with one thread: instances share the cores, and joblib's pools are slow."""
        estimator = open_estimator(path, model)
        jobs = [name for name in estimator.get_params() if name.split("__")[-1] == "n_jobs"]
        estimator.set_params(**dict.fromkeys(jobs, 1))
        return _SklearnFunction(_functions(estimator), offer)


class _SklearnFunction:
    def __init__(self, functions: dict[str, Callable[[Array], Any]], offer: Offer) -> None:
        self._functions = functions
        self._datatypes = {name: datatype for name, (datatype, _) in offer.outputs.items()}

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        rows = inputs[INPUT]
        return {
            name: _converted(self._functions[name](rows), self._datatypes[name]).reshape(len(rows), -1)
            for name in outputs
        }


def _functions(estimator: Any) -> dict[str, Callable[[Array], Any]]:
    return {name: getattr(estimator, key) for name, key in _METHODS.items() if hasattr(estimator, key)}


def _converted(values: Any, datatype: str) -> Array:
    array = np.asarray(values)
    if datatype != "BYTES":
        return array.astype(_DTYPES[datatype], copy=False)
    texts = np.empty(array.shape, object)
    texts.reshape(-1)[:] = [
        each if isinstance(each, bytes) else str(each).encode() for each in array.reshape(-1).tolist()
    ]
    return texts
