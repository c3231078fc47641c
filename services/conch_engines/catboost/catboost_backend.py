"""The backend ``catboost``: CatBoost's own results by name, for its files ``.cbm``.

The file has the names of the columns, and which of them are categories or texts, but neither the categories
nor their types. CatBoost compares categories as texts, a bool as ``1`` or ``0``, and an unknown one gets a
default without a word: so columns keep their types, and texts that stand for a bool are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conch.core.engine_text import engine_text
from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec
from conch.core.tensor import Array
from conch_engines.model_config import boolean
from conch_engines.trees.boosters import threads_for
from conch_engines.trees.fil_parameters import CPU_THREADS
from conch_engines.trees.model_files import CATBOOST, unreadable
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
)

log = logging.getLogger(__name__)

BOOL_TEXTS = "CONCH_BOOL_TEXTS"
"""Parameter: true for categories that were texts such as ``True`` in the training."""

_LIKE_BOOLS = frozenset({"True", "False", "true", "false"})
_OF_CATEGORIES = frozenset({"BYTES", "INT32", "INT64", "BOOL"})
_DATATYPES = {"f": "FP64", "i": "INT64", "u": "INT64", "b": "BOOL", "U": "BYTES", "S": "BYTES", "O": "BYTES"}
_DTYPES = {"FP64": np.float64, "INT64": np.int64, "INT32": np.int32, "BOOL": np.bool_}

Function = Callable[[Any, int], Any]
"""Computes one output of a `catboost.Pool`, with a number of threads."""


class CatboostBackend(NamedOutputsBackend):
    """Models of CatBoost on the CPU."""

    kinds = (CATBOOST,)
    parameters = (CPU_THREADS, BOOL_TEXTS)

    def __init__(self) -> None:
        # Imported late, and here so that a missing package is an error of the backend.
        import catboost  # noqa: F401

    def describe(self, path: Path, kind: str, model: str, parameters: Mapping[str, str]) -> Offer:
        """Opens the model and computes one row."""
        boolean(parameters, BOOL_TEXTS, False)
        opened = _opened(path, model)
        columns = opened.columns
        outputs = {}
        for name, function in opened.functions.items():
            array = np.asarray(function(opened.pool(columns.example()), 1))
            outputs[name] = _DATATYPES[array.dtype.kind], array.shape[1:] or (1,)
        if LEAF in outputs:
            outputs[LEAF] = "INT32", outputs[LEAF][1]
        return Offer(
            len(columns.names),
            "FP64",
            outputs,
            {},
            {name: "BYTES" if name in columns.texts else "FP64" for name in columns.names},
            not columns.texts,
            text_datatypes={name: _OF_CATEGORIES for name in columns.categories},
        )

    def open_model(self, path: Path, kind: str, spec: ModelSpec, threads: int, offer: Offer) -> NamedFunction:
        """Opens the model; one evaluation has made CatBoost's evaluator, so that threads may share it."""
        opened = _opened(path, spec.name)
        takes_bools = boolean(spec.parameters, BOOL_TEXTS, False)
        return _CatboostFunction(
            opened, {each: of[0] for each, of in offer.outputs.items()}, threads, takes_bools
        )


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns of the training in their order, and those of categories and of texts."""

    names: Sequence[str]
    categories: Sequence[str]
    words: Sequence[str]

    @property
    def texts(self) -> frozenset[str]:
        return frozenset((*self.categories, *self.words))

    def example(self) -> dict[str, Any]:
        """A row."""
        return {name: ["1"] if name in self.texts else [0.0] for name in self.names}


@dataclass(frozen=True, slots=True)
class _Opened:
    columns: _Columns
    functions: Mapping[str, Function]

    def pool(self, columns: Mapping[str, Any]) -> Any:
        """A `catboost.Pool` of a DataFrame, in the order of the training."""
        import catboost
        import pandas as pd

        of = self.columns
        frame = pd.DataFrame({name: columns[name] for name in of.names})
        return catboost.Pool(frame, cat_features=[*of.categories], text_features=[*of.words])

    def pool_of_numbers(self, rows: Array) -> Any:
        """A `catboost.Pool` of rows of numbers."""
        import catboost

        # CatBoost computes with FP32.
        return catboost.Pool(np.ascontiguousarray(rows, np.float32), feature_names=[*self.columns.names])


class _CatboostFunction:
    def __init__(
        self, opened: _Opened, datatypes: Mapping[str, str], threads: int, takes_bools: bool
    ) -> None:
        self._opened = opened
        self._datatypes = datatypes
        self._threads = threads
        self._takes_bools = takes_bools

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        names = self._opened.columns.names
        if INPUT in inputs and INPUT not in names:
            rows = inputs[INPUT]
            pool = self._opened.pool_of_numbers(rows)
        else:
            columns = {name: self._column(name, inputs[name]) for name in names}
            rows = columns[names[0]]
            pool = self._opened.pool(columns)
        count, threads = len(rows), threads_for(rows, self._threads)
        return {
            name: _converted(self._opened.functions[name](pool, threads), self._datatypes[name], count)
            for name in outputs
        }

    def _column(self, name: str, array: Array) -> Array:
        column: Array = array[:, 0]
        if name not in self._opened.columns.texts:
            return column.astype(np.float64, copy=False)
        if column.dtype.kind != "O":
            return column.astype(np.int64)  # as CatBoost makes 1 and 0 of a bool
        texts = np.empty(len(column), object)
        for at, value in enumerate(column.tolist()):
            try:
                texts[at] = value.decode()
            except UnicodeDecodeError as error:
                raise InvalidArgumentError(f"input '{name}' has no UTF-8 in row {at}: {error}") from error
            if texts[at] in _LIKE_BOOLS and not self._takes_bools and name in self._opened.columns.categories:
                raise InvalidArgumentError(
                    f"input '{name}' has '{texts[at]}' in row {at}, which CatBoost does not know where the "
                    f"training had a bool: give the input data_type TYPE_BOOL, or set parameter "
                    f"'{BOOL_TEXTS}' to 'true' if the training had such texts"
                )
        return texts


def _opened(path: Path, model: str) -> _Opened:
    import catboost

    try:
        # By its path: of bytes, CatBoost forgets the objective, and predicts the margin of Poisson's.
        booster = catboost.CatBoost().load_model(str(path))
        classifies = len(np.asarray(booster.classes_)) > 0
        # The classes know which prediction is an objective's own, such as the exponent of Poisson's.
        kind = catboost.CatBoostClassifier if classifies else catboost.CatBoostRegressor
        booster = kind().load_model(str(path))
    except catboost.CatBoostError as error:
        raise unreadable(path, CATBOOST, model, engine_text(error).splitlines()[0]) from error
    names = [str(each) for each in booster.feature_names_]
    refused = f"unable to load model '{model}': '{path}'"
    if booster.get_embedding_feature_indices():
        raise InvalidArgumentError(f"{refused} has columns of embeddings, which have no input here")
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"{refused} has several columns with one name, and each is an input")
    columns = _Columns(
        names,
        [names[each] for each in booster.get_cat_feature_indices()],
        [names[each] for each in booster.get_text_feature_indices()],
    )
    return _Opened(columns, _functions(booster, classifies))


def _functions(booster: Any, classifies: bool) -> dict[str, Function]:
    def leaves(pool: Any, threads: int) -> Any:
        return booster.calc_leaf_indexes(pool, thread_count=threads)

    def contributions(pool: Any, threads: int) -> Any:
        return booster.get_feature_importance(pool, type="ShapValues", thread_count=threads)

    def margin(pool: Any, threads: int) -> Any:
        return booster.predict(pool, prediction_type="RawFormulaVal", thread_count=threads)

    found: dict[str, Function] = {
        PREDICT: lambda pool, threads: booster.predict(pool, thread_count=threads),
        MARGIN: margin,
        LEAF: leaves,
    }
    if classifies:
        found[PREDICT_PROBA] = lambda pool, threads: booster.predict_proba(pool, thread_count=threads)
    if not booster.get_text_feature_indices():  # of which CatBoost computes none
        found[CONTRIBUTIONS] = contributions
    return found


def _converted(values: Any, datatype: str, count: int) -> Array:
    array = np.asarray(values)
    if datatype != "BYTES":
        return array.astype(_DTYPES[datatype], copy=False).reshape(count, *(array.shape[1:] or (1,)))
    texts = np.empty(array.shape, object)
    texts.reshape(-1)[:] = [str(each).encode() for each in array.reshape(-1).tolist()]
    return texts.reshape(count, -1)
