"""Compares answers of the served model with predictions of the pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conch_testing.loaded_model import LoadedModel

Array = npt.NDArray[Any]

_DTYPES = {
    "TYPE_FP64": np.float64,
    "TYPE_FP32": np.float32,
    "TYPE_INT64": np.int64,
    "TYPE_INT32": np.int32,
    "TYPE_BOOL": np.bool_,
}
_TOLERANCES = {"f": 1e-12, "4": 1e-6}
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Difference:
    """Comparison of one output.

    Attributes:
        output: The served output.
        rows: Number of rows.
        differing: Numbers of the rows that differ.
        largest: The largest difference of numbers, relative to the pickle's where that is above 1.
        examples: Lines about the first rows that differ.
    """

    output: str
    rows: int
    differing: Sequence[int]
    largest: float
    examples: Sequence[str]


def inputs_of(config: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Array]:
    """Inputs of a request with all rows: the columns that the model has as inputs, or one of all columns."""
    found = {}
    for entry in config["input"]:
        name, datatype = entry["name"], entry["data_type"]
        columns = [rows[name]] if name in rows else list(rows.values())
        found[name] = np.column_stack([_column(each["values"], datatype) for each in columns])
    return found


def _column(values: Sequence[Any], datatype: str) -> Array:
    if datatype == "TYPE_STRING":
        column = np.empty(len(values), object)
        column[:] = [str(each).encode() for each in values]
        return column
    return np.array([np.nan if each is None else each for each in values]).astype(_DTYPES[datatype])


def compare(model: LoadedModel, facts: Mapping[str, Any], tolerance: float | None) -> list[Difference]:
    """Runs the rows of the pickle's predictions, and compares each output that it has predictions for."""
    served = model.run(inputs_of(model.config, facts["rows"]))
    found = []
    for name, prediction in facts["predictions"].items():
        own = np.array(_revived(prediction["values"]), object).reshape(prediction["shape"] or [1])
        own = own.reshape(len(own), -1)
        output, own = _counterpart(name, own, served, facts)
        if output in served:
            found.append(_difference(output, served[output], own, tolerance))
    return found


def _revived(values: Sequence[Any]) -> list[Any]:
    """Values as JSON has them, with its null as NaN."""
    return [np.nan if each is None else each for each in values]


def _counterpart(
    name: str, own: Array, served: Mapping[str, Array], facts: Mapping[str, Any]
) -> tuple[str, Array]:
    """The output that answers what the pickle predicts, and the prediction in its form."""
    classes = facts.get("classes")
    if facts.get("raw") and name == "predict":
        if facts["kind"] == "catboost":
            return "margin", own
        if "predict_proba" in served:
            both = own if own.shape[1] > 1 else np.column_stack((1 - own.astype(float), own))
            return "predict_proba", both
    elif classes and name == "predict" and facts["kind"] in ("xgboost", "lightgbm"):
        return name, np.vectorize(classes.index, otypes=[object])(own)
    return name, own


def _difference(output: str, answer: Array, own: Array, tolerance: float | None) -> Difference:
    if answer.shape != own.shape:
        line = f"has the shape {list(answer.shape)}, the pickle's {list(own.shape)}"
        return Difference(output, len(own), range(len(own)), np.inf, [line])
    if answer.dtype.kind == "O":
        texts = np.array([each.decode() for each in answer.reshape(-1)], object).reshape(answer.shape)
        unequal = texts != np.vectorize(str, otypes=[object])(own)
        largest = 0.0
        answer = texts
    else:
        given, expected = answer.astype(np.float64), own.astype(np.float64)
        default = _TOLERANCES["4"] if answer.dtype == np.float32 else _TOLERANCES["f"]
        most = default if tolerance is None else tolerance
        with np.errstate(invalid="ignore"):
            away = np.abs(given - expected) / np.maximum(np.abs(expected), 1)
        away[(given == expected) | (np.isnan(given) & np.isnan(expected))] = 0
        unequal = ~(away <= most)
        largest = float(np.nanmax(np.where(np.isnan(away), np.inf, away)))
    rows = np.flatnonzero(unequal.any(axis=1)).tolist()
    examples = [f"row {at}: {_shown(answer[at])}, the pickle's {_shown(own[at])}" for at in rows[:_SHOWN]]
    return Difference(output, len(own), rows, largest, examples)


def _shown(values: Array) -> str:
    texts = [f"{each:.12g}" if isinstance(each, float) else str(each) for each in values[:4].tolist()]
    return ", ".join(texts) + (", ..." if len(values) > 4 else "")
