"""The backend ``sklearn``: scikit-learn's own results by name."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec
from conch.core.tensor import Array
from conch_engines.trees.feature_columns import Columns, named_columns, usable_categories
from conch_engines.trees.fil_parameters import CPU_THREADS
from conch_engines.trees.model_files import SKLEARN, TRUSTED_TYPES, missing_package, open_estimator
from conch_engines.trees.named_outputs import (
    INPUT,
    LEAF,
    MARGIN,
    PREDICT,
    PREDICT_PROBA,
    NamedFunction,
    NamedOutputsBackend,
    Offer,
)
from conch_frames.column_rules import columns_of_spec

log = logging.getLogger(__name__)

_METHODS = {PREDICT: "predict", PREDICT_PROBA: "predict_proba", MARGIN: "decision_function", LEAF: "apply"}
_DATATYPES = {"f": "FP64", "i": "INT64", "u": "INT64", "b": "BOOL", "U": "BYTES", "S": "BYTES", "O": "BYTES"}
"""Datatype of results by numpy's kind."""
_DTYPES = {"FP64": np.float64, "INT64": np.int64, "BOOL": np.bool_}


_TEXT = np.array(["text"], object)
_NULL = "\0"
"""Text of a missing value, in columns of texts that may miss some."""
_KNOWN = object()
"""Stands for no null."""


class SklearnBackend(NamedOutputsBackend):
    """Estimators with a ``predict``."""

    kinds = (SKLEARN,)
    parameters = (CPU_THREADS, TRUSTED_TYPES)

    def __init__(self) -> None:
        # Imported late, and here so that a missing package is an error of the backend.
        import skops.io  # noqa: F401

    def describe(self, path: Path, kind: str, model: str, parameters: Mapping[str, str]) -> Offer:
        """Opens the estimator and predicts a row of zeros, as estimators do not say what they return."""
        estimator = open_estimator(path, model, parameters.get(TRUSTED_TYPES, ""))
        features = getattr(estimator, "n_features_in_", None)
        # Vectorizers of texts count no features.
        by_texts = features is None and hasattr(estimator, "predict") and _predicts(estimator, _TEXT)
        if not hasattr(estimator, "predict") or (features is None and not by_texts):
            raise InvalidArgumentError(
                f"unable to load model '{model}': {type(estimator).__name__} of '{path}' is not fitted, has "
                f"no 'predict', or takes neither rows of numbers nor texts"
            )
        features = 1 if features is None else int(features)
        values = _column_values(estimator)
        columns = {name: _DATATYPES[np.asarray(value).dtype.kind] for name, value in values.items()}
        rows: Any = _TEXT if by_texts else np.zeros((1, features))
        by_rows = not values or _predicts(estimator, rows)
        if not by_rows:
            rows = _frame({name: np.array([value]) for name, value in values.items()}, model)
        outputs: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, function in _functions(estimator).items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of rows without the names of a DataFrame
                    array = np.asarray(function(rows))
            except Exception as error:  # of the user's estimator
                if name == PREDICT:
                    what = f"{features} numbers" if by_rows else f"the columns {', '.join(columns)}"
                    raise InvalidArgumentError(
                        f"unable to load model '{model}': {type(estimator).__name__} of '{path}' can't "
                        f"predict a row of {what}: {error}"
                    ) from error
                continue  # such as probabilities of a model trained without them
            if len(array) == 1 and array.dtype.kind in _DATATYPES:
                outputs[name] = _DATATYPES[array.dtype.kind], (max(array.size, 1),)
        nulls = {
            name: null
            for name, null in _by_column(estimator, list(columns), _null).items()
            if columns.get(name) == "BYTES"
        }
        return Offer(
            features,
            "BYTES" if by_texts else "FP64",
            outputs,
            {},
            columns,
            by_rows,
            features_by_name=named_columns(list(columns), features),
            column_rules=_column_rules(estimator, columns, nulls),
            nulls=nulls,
        )

    def open_model(self, path: Path, kind: str, spec: ModelSpec, threads: int, offer: Offer) -> NamedFunction:
        """Opens the estimator with one thread: instances share the cores, and joblib's pools are slow."""
        trusted = spec.parameters.get(TRUSTED_TYPES, "")
        if trusted:
            log.warning("model '%s': its config trusts types that could run code: %s", spec.name, trusted)
        estimator = open_estimator(path, spec.name, trusted)
        _set_single_thread(estimator, set())
        rules = columns_of_spec(spec).rules
        nulls = {
            name: (rule.null.encode(), offer.nulls.get(name, np.nan))
            for name, rule in rules.items()
            if rule.null is not None
        }
        return _SklearnFunction(_functions(estimator), offer, spec.name, nulls)


class _SklearnFunction:
    def __init__(
        self,
        functions: dict[str, Callable[[Any], Any]],
        offer: Offer,
        model: str,
        nulls: Mapping[str, tuple[bytes, Any]],
    ) -> None:
        self._functions = functions
        self._columns = tuple(offer.columns)
        self._by_texts = offer.datatype == "BYTES"
        self._model = model
        self._nulls = nulls
        self._datatypes = {name: datatype for name, (datatype, _) in offer.outputs.items()}

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        rows: Any = inputs.get(INPUT)
        if rows is None or INPUT in self._columns:
            columns = {name: _column(inputs[name], self._nulls.get(name)) for name in self._columns}
            rows = _frame(columns, self._model)
        elif self._by_texts:
            rows = _column(rows)
        return {
            name: _converted(self._functions[name](rows), self._datatypes[name]).reshape(len(rows), -1)
            for name in outputs
        }


def _functions(estimator: Any) -> dict[str, Callable[[Any], Any]]:
    return {name: getattr(estimator, key) for name, key in _METHODS.items() if hasattr(estimator, key)}


def _set_single_thread(value: Any, seen: set[int]) -> None:
    """Sets `n_jobs` of an estimator and of those that it holds, also fitted ones, which are no parameters."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if hasattr(value, "get_params"):
        if "n_jobs" in vars(value):
            value.n_jobs = 1
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            _set_single_thread(each, seen)


def _predicts(estimator: Any, rows: Any) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            estimator.predict(rows)
    except Exception:  # of the user's estimator
        return False
    return True


def _frame(columns: Mapping[str, Array], model: str) -> Any:
    """A DataFrame. Raises UnavailableError: pandas is not installed."""
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        purpose = "a scikit-learn model with columns by name"
        raise missing_package(error, model, purpose, "pandas") from error
    # As objects: pandas has another null in texts than None, which scikit-learn tells apart.
    return pd.DataFrame({name: pd.Series(each, dtype=each.dtype) for name, each in columns.items()})


def _column(array: Array, null: tuple[bytes, Any] | None = None) -> Array:
    """An input as a column; texts become `str`, as scikit-learn compares them with those of the training.

    Args:
        array: The input.
        null: The text that stands for a missing one, and the null of the training.
    """
    column: Array = array[:, 0]
    if column.dtype.kind != "O":
        return column
    texts = np.empty(len(column), object)
    texts[:] = [each.decode(errors="replace") for each in column.tolist()]
    if null is not None:
        texts[np.fromiter((each == null[0] for each in column.tolist()), np.bool_, len(column))] = null[1]
    return texts


def _column_values(estimator: Any) -> dict[str, Any]:
    """A value that may come for each column of the training's DataFrame; empty if there was none.

    The file has no types of columns: those of categories and texts are known, all others count as numbers.
    """
    names = [str(name) for name in getattr(estimator, "feature_names_in_", ())]
    return {**dict.fromkeys(names, 0.0), **_by_column(estimator, names, _values)}


def _column_rules(estimator: Any, columns: Mapping[str, str], nulls: Mapping[str, Any]) -> Columns:
    """Rules of columns: the categories of encoders that refuse others, and a text for nulls."""
    categories = _by_column(estimator, list(columns), _categories)
    rules = []
    for name in columns:
        rule: dict[str, Any] = {"name": name}
        if categories.get(name):
            rule["categories"] = categories[name]
        if name in nulls:
            rule["null"] = _NULL
        if len(rule) > 1:
            rules.append(rule)
    return tuple(rules)


Read = Callable[[Any, Sequence[str]], dict[str, Any]]


def _by_column(transformer: Any, names: Sequence[str], read: Read) -> dict[str, Any]:
    """Facts about columns that a function reads of each fitted transformer that takes them."""
    if hasattr(transformer, "transformers_"):  # ColumnTransformer
        return _merged(
            _by_column(part, _selected(columns, names), read)
            for _, part, columns in transformer.transformers_
        )
    if hasattr(transformer, "transformer_list"):  # FeatureUnion
        return _merged(_by_column(part, names, read) for _, part in transformer.transformer_list)
    if hasattr(transformer, "steps"):  # Pipeline
        found: dict[str, Any] = {}
        for _, step in transformer.steps:
            found |= _by_column(step, names, read)
            if not hasattr(step, "statistics_"):  # only imputers keep the columns
                break
        return found
    return read(transformer, names)


def _values(transformer: Any, names: Sequence[str]) -> dict[str, Any]:
    """A value of each column."""
    if hasattr(transformer, "vocabulary_"):
        return {name: next(iter(transformer.vocabulary_)) for name in names}
    known = getattr(transformer, "categories_", None)
    if known is None:
        statistics = np.asarray(getattr(transformer, "statistics_", ()))
        known = [[each] for each in statistics.tolist()] if statistics.dtype.kind == "O" else []
    return {
        name: next((each for each in values if not _is_missing(each)), "")
        for name, values in zip(names, known, strict=False)
    }


def _categories(transformer: Any, names: Sequence[str]) -> dict[str, Any]:
    """The values that an encoder knows, if it refuses others."""
    if getattr(transformer, "handle_unknown", "") != "error":
        return {}
    known = getattr(transformer, "categories_", ())
    return {
        name: usable_categories([each for each in np.asarray(values).tolist() if not _is_missing(each)])
        for name, values in zip(names, known, strict=False)
    }


def _null(transformer: Any, names: Sequence[str]) -> dict[str, Any]:
    """The null that an imputer replaces, or an encoder knows as a category."""
    if hasattr(transformer, "statistics_"):
        null = getattr(transformer, "missing_values", np.nan)
        return dict.fromkeys(names, null) if _is_missing(null) else {}
    known = getattr(transformer, "categories_", ())
    found = {
        name: next((each for each in np.asarray(values).tolist() if _is_missing(each)), _KNOWN)
        for name, values in zip(names, known, strict=False)
    }
    return {name: null for name, null in found.items() if null is not _KNOWN}


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))


def _merged(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for each in found for name, value in each.items()}


def _selected(columns: Any, names: Sequence[str]) -> list[str]:
    """Names of a ColumnTransformer's selection: a name, names, numbers, a mask or a slice."""
    if isinstance(columns, str):
        return [columns]
    if isinstance(columns, slice) and isinstance(columns.start or columns.stop, str):
        start, stop = columns.start, columns.stop
        return list(names[names.index(start) if start else 0 : names.index(stop) + 1 if stop else None])
    if not isinstance(columns, slice) and all(isinstance(each, str) for each in columns):
        return list(columns)
    return [str(each) for each in np.atleast_1d(np.asarray(names, object)[columns])]


def _converted(values: Any, datatype: str) -> Array:
    array = np.asarray(values)
    if datatype != "BYTES":
        return array.astype(_DTYPES[datatype], copy=False)
    texts = np.empty(array.shape, object)
    texts.reshape(-1)[:] = [
        each if isinstance(each, bytes) else str(each).encode() for each in array.reshape(-1).tolist()
    ]
    return texts
