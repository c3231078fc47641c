"""The backend ``sklearn``: scikit-learn's own results by name."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from conch.core.engine_text import engine_text
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
    TRANSFORM,
    NamedFunction,
    NamedOutputsBackend,
    Offer,
)
from conch_frames.column_rules import columns_of_spec

log = logging.getLogger(__name__)

_METHODS = {
    PREDICT: "predict",
    PREDICT_PROBA: "predict_proba",
    TRANSFORM: "transform",
    MARGIN: "decision_function",
    LEAF: "apply",
}
_DATATYPES = {"f": "FP64", "i": "INT64", "u": "INT64", "b": "BOOL", "U": "BYTES", "S": "BYTES", "O": "BYTES"}
"""Datatype of results by numpy's kind."""
_DTYPES = {"FP64": np.float64, "INT64": np.int64, "BOOL": np.bool_}
_WIDEST = 1 << 16
"""Columns of a sparse result up to which it is an output, as answers hold the zeros too."""
_OF_SETS = ("MultiLabelBinarizer",)
"""Transformers that would take a text as the set of its letters."""

Outputs = dict[str, tuple[str, tuple[int, ...]]]

_NULL = "\0"
"""Text of a missing value, in columns of texts that may miss some."""
_KNOWN = object()
"""Stands for no null."""


class SklearnBackend(NamedOutputsBackend):
    """Fitted estimators with a ``predict``, ``predict_proba`` or ``transform``."""

    kinds = (SKLEARN,)
    parameters = (CPU_THREADS, TRUSTED_TYPES)

    def __init__(self) -> None:
        # Imported late, and here so that a missing package is an error of the backend.
        import skops.io  # noqa: F401

        # Rows of numbers are in the order of the training, whatever its DataFrame called them.
        warnings.filterwarnings("ignore", "X does not have valid feature names", UserWarning)

    def describe(self, path: Path, kind: str, model: str, parameters: Mapping[str, str]) -> Offer:
        """Opens the estimator and computes one row, as estimators do not say what they return."""
        from sklearn.exceptions import NotFittedError

        estimator = open_estimator(path, model, parameters.get(TRUSTED_TYPES, ""))
        functions = _functions(estimator)
        refused = f"unable to load model '{model}': {type(estimator).__name__} of '{path}'"
        main = next((name for name in (PREDICT, PREDICT_PROBA, TRANSFORM) if name in functions), None)
        if main is None:
            raise InvalidArgumentError(
                f"{refused} has no 'predict', 'predict_proba' or 'transform' that new rows could be given to"
            )
        if type(estimator).__name__ in _OF_SETS:
            raise InvalidArgumentError(f"{refused} takes sets, of which no tensor is made")
        failures = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rows without the names of a DataFrame
            for what, offer, rows in _trials(estimator, model):
                try:
                    _computed(functions[main], rows)
                except NotFittedError as error:
                    raise InvalidArgumentError(f"{refused} is not fitted") from error
                except Exception as error:  # of the user's estimator
                    failures.append(f"{what}: {error}")
                    continue
                return _with_rules(replace(offer, outputs=_outputs(functions, rows)), estimator)
        raise InvalidArgumentError(
            f"{refused} can't {_METHODS[main].replace('_', ' ')} a row of {'; nor of '.join(failures)}"
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
        return _SklearnFunction(estimator, offer, spec.name, nulls)


class _SklearnFunction:
    def __init__(
        self, estimator: Any, offer: Offer, model: str, nulls: Mapping[str, tuple[bytes, Any]]
    ) -> None:
        self._functions = _functions(estimator)
        self._columns = tuple(offer.columns)
        self._named = hasattr(estimator, "feature_names_in_")
        self._flat = _features(estimator) is None
        self._model = model
        self._nulls = nulls
        self._datatypes = {name: datatype for name, (datatype, _) in offer.outputs.items()}

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        rows: Any = inputs.get(INPUT)
        if rows is None or INPUT in self._columns:
            columns = {name: _column(inputs[name], self._nulls.get(name)) for name in self._columns}
            rows = _table(columns, self._named, self._model)
        elif self._flat:
            rows = _column(rows)
        elif rows.dtype.kind == "O":
            rows = _decoded(rows)
        found: dict[str, Array] = {}
        for method, function in self._functions.items():
            wanted = [name for name in outputs if _method_of(name) == method]
            try:
                parts = _computed(function, rows) if wanted else {}
            except ValueError as error:
                if refused := _not_finite(inputs, self._columns):
                    raise InvalidArgumentError(
                        f"{refused}, which the model does not take: send numbers, or train an imputer: "
                        f"{engine_text(error)}"
                    ) from error
                raise
            for name in wanted:
                array = _converted(parts[name.removeprefix(method)], self._datatypes[name], name)
                found[name] = array.reshape(len(rows), -1)
        return found


def _not_finite(inputs: Mapping[str, Array], names: Sequence[str]) -> str:
    """The columns of numbers with NaN, which is null in tables, or infinity; empty if there are none."""
    found = []
    for name, array in inputs.items():
        if array.dtype.kind != "f":
            continue
        by_place = name == INPUT and len(names) == array.shape[1] != 1
        for place, column in enumerate(array.T):
            shown = f"column '{names[place]}'" if by_place else f"input '{name}'"
            if array.shape[1] > 1 and not by_place:
                shown += f", column {place},"
            if np.isnan(column).any():
                found.append(f"{shown} has null (NaN)")
            if np.isinf(column).any():
                found.append(f"{shown} has infinity")
    return "; ".join(found[:10])


def _functions(estimator: Any) -> dict[str, Callable[[Any], Any]]:
    return {name: getattr(estimator, key) for name, key in _METHODS.items() if hasattr(estimator, key)}


def _features(estimator: Any) -> int | None:
    """Number of columns; None for estimators of a vector, such as vectorizers of texts."""
    features = getattr(estimator, "n_features_in_", None)
    return None if features is None else int(features)


def _computed(function: Callable[[Any], Any], rows: Any) -> dict[str, Array]:
    """A method's results, by what their outputs have behind its name: several targets have a number each."""
    found = function(rows)
    if isinstance(found, list):
        return {f"_{number}": np.asarray(each) for number, each in enumerate(found)}
    if hasattr(found, "toarray"):  # sparse
        if found.shape[1] > _WIDEST:
            raise InvalidArgumentError(f"it makes {found.shape[1]} columns, and at most {_WIDEST} are served")
        found = found.toarray()
    return {"": np.asarray(found)}


def _method_of(output: str) -> str:
    head, _, number = output.rpartition("_")
    return head if number.isdecimal() else output


def _outputs(functions: Mapping[str, Callable[[Any], Any]], rows: Any) -> Outputs:
    outputs: Outputs = {}
    for method, function in functions.items():
        try:
            parts = _computed(function, rows)
        except Exception:  # of the user's estimator, such as probabilities of a model trained without them
            continue
        for part, array in parts.items():
            kind = array.dtype.kind
            # SparsePCA returns a vector for one row.
            of_one = array.ndim == 1 or len(array) == 1
            if of_one and kind in _DATATYPES and not (method == TRANSFORM and _is_mixed(array)):
                outputs[method + part] = _DATATYPES[kind], (max(array.size, 1),)
    return outputs


def _is_mixed(array: Array) -> bool:
    """True for objects other than texts, which an output of texts would change."""
    return array.dtype.kind == "O" and not all(isinstance(each, str) for each in array.reshape(-1).tolist())


def _trials(estimator: Any, model: str) -> Iterable[tuple[str, Offer, Any]]:
    """Kinds of rows that an estimator may take: a description, the offer without outputs, and such a row."""
    features = _features(estimator)
    if features is None:
        yield "one text", Offer(1, "BYTES", {}, {}), np.array(["text"], object)
        for known in (getattr(estimator, "classes_", ()), getattr(estimator, "X_thresholds_", (0.0,))):
            row = np.atleast_1d(np.asarray(known))[:1]
            if len(row) and (datatype := _DATATYPES.get(row.dtype.kind)):
                yield f"one {datatype}", Offer(1, datatype, {}, {}), row
        return
    values = _column_values(estimator, features)
    columns = {name: _DATATYPES[np.asarray(value).dtype.kind] for name, value in values.items()}
    texts = [datatype == "BYTES" for datatype in columns.values()]
    named = hasattr(estimator, "feature_names_in_")
    by_columns = columns if named else {}
    if not any(texts):
        for fill in (0.0, 1.0):  # logarithms take no zeros
            row = np.array([[float(value) or fill for value in values.values()]])
            yield f"{features} numbers", Offer(features, "FP64", {}, {}, by_columns), row
    elif all(texts) and not named:
        yield f"{features} texts", Offer(features, "BYTES", {}, {}), np.array([[*values.values()]], object)
    if named or (any(texts) and not all(texts)):
        row = _table({name: np.array([value]) for name, value in values.items()}, named, model)
        yield f"the columns {', '.join(columns)}", Offer(features, "FP64", {}, {}, columns, False), row


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


def _table(columns: Mapping[str, Array], named: bool, model: str) -> Any:
    """A DataFrame, or an array of objects for an estimator whose training had one.

    Raises:
        UnavailableError: pandas is not installed.
    """
    if not named:
        return np.column_stack([column.astype(object) for column in columns.values()])
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
    texts = _decoded(column)
    if null is not None:
        texts[np.fromiter((each == null[0] for each in column.tolist()), np.bool_, len(column))] = null[1]
    return texts


def _decoded(array: Array) -> Array:
    texts = np.empty(array.shape, object)
    elements = array.reshape(-1).tolist()
    try:
        texts.reshape(-1)[:] = list(map(bytes.decode, elements))  # in half the time
    except UnicodeDecodeError:
        texts.reshape(-1)[:] = [each.decode(errors="replace") for each in elements]
    return texts


def _column_values(estimator: Any, features: int) -> dict[str, Any]:
    """A value that may come for each column of the training; columns without a name get scikit-learn's.

    The file has no types of columns: those of categories and texts are known, all others count as numbers.
    """
    names = _names(estimator, features)
    values = {**dict.fromkeys(names, 0.0), **_by_column(estimator, names, _values)}
    dropped = _dropped(estimator, names) if hasattr(estimator, "feature_names_in_") else set()
    return {name: value for name, value in values.items() if name not in dropped}


def _names(estimator: Any, features: int) -> list[str]:
    given = getattr(estimator, "feature_names_in_", None)
    return [f"x{number}" for number in range(features)] if given is None else [str(name) for name in given]


def _dropped(estimator: Any, names: Sequence[str]) -> set[str]:
    """Columns of the training's DataFrame that the estimator does without."""
    while hasattr(estimator, "steps"):
        estimator = estimator.steps[0][1]
    parts = getattr(estimator, "transformers_", ())
    used = {name for _, part, columns in parts if part != "drop" for name in _selected(columns, names)}
    return set(names) - used if parts else set()


def _with_rules(offer: Offer, estimator: Any) -> Offer:
    """An offer with the names of its columns, and what a table's columns need."""
    if not offer.columns:
        return offer
    names = _names(estimator, offer.features)  # all: a ColumnTransformer may select by number
    nulls = {
        name: null
        for name, null in _by_column(estimator, names, _null).items()
        if offer.columns.get(name) == "BYTES"
    }
    return replace(
        offer,
        features_by_name=named_columns(list(offer.columns), offer.features),
        column_rules=_column_rules(_by_column(estimator, names, _categories), offer.columns, nulls),
        nulls=nulls,
    )


def _column_rules(
    categories: Mapping[str, Any], columns: Mapping[str, str], nulls: Mapping[str, Any]
) -> Columns:
    """Rules of columns: the categories of encoders that refuse others, and a text for nulls."""
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
    if hasattr(transformer, "is_categorical_"):  # histogram-based gradient boosting, of categories
        return _by_column(getattr(transformer, "_preprocessor", None), names, read)
    return read(transformer, names)


def _values(transformer: Any, names: Sequence[str]) -> dict[str, Any]:
    """A value of each column."""
    if hasattr(transformer, "build_analyzer"):  # vectorizers of texts
        return dict.fromkeys(names, "text")
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


def _converted(array: Array, datatype: str, output: str) -> Array:
    if datatype != "BYTES":
        return array.astype(_DTYPES[datatype], copy=False)
    texts = np.empty(array.shape, object)
    texts.reshape(-1)[:] = [_encoded(each, output) for each in array.reshape(-1).tolist()]
    return texts


def _encoded(value: Any, output: str) -> bytes:
    if _is_missing(value):
        raise InvalidArgumentError(f"output '{output}' has a missing value, which no text stands for")
    return value if isinstance(value, bytes) else str(value).encode()
