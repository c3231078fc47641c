"""Frames that programs pass as examples, and that functions return."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from conch.core.tensor import Array
from conch_frames.column import column_of
from conch_frames.column_rules import ColumnRule
from conch_frames.conversion import column_array
from conch_frames.libraries import frame_table

_LIBRARIES = ("pandas", "polars", "pyarrow")


def is_frame(value: Any) -> bool:
    """True for a DataFrame of pandas or polars, or a table of pyarrow."""
    return type(value).__module__.partition(".")[0] in _LIBRARIES and hasattr(value, "columns")


def answered_columns(answer: Any) -> Any:
    """The columns of a frame that a function returns, as arrays by name; any other answer as it is."""
    if not is_frame(answer):
        return answer
    return {name: _answered(name, values) for name, values in frame_table(answer).columns.items()}


def is_missing(value: Any) -> bool:
    """True for None, NaN, and what pandas has for them."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def _answered(name: str, data: Any) -> Array:
    """A column that a function returns: numbers, booleans or texts."""
    column = column_of(name, data)
    values = column.values if column.codes is None else column.values[column.codes]
    if values.dtype.kind == "M":
        raise ValueError(f"column '{name}' has dates, which no output has: make them texts or numbers")
    if column.nulls is None or not column.nulls.any():
        return values
    if values.dtype.kind == "O":
        row = int(np.argmax(column.nulls))
        raise ValueError(f"column '{name}' has no value in row {row}, which only numbers have, as NaN")
    return column_array(column, ColumnRule(name, "FP64"))
