"""Frames as examples of bound functions: their columns as inputs, and frames like them.

Texts travel as BYTES, categories as what they are, dates as numbers of their unit. A whole number or a
boolean that may be missing travels as FP64, a missing text as `NULL_TEXT`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import NUMPY_DTYPES, Array
from conch_api.array_conversion import array_of
from conch_api.frames import is_missing
from conch_api.function_config import Tensor
from conch_api.input_readers import InputReader
from conch_frames.libraries import frame_table

FRAME_ROWS = 4096
"""Default batch size of functions of frames."""

NULL_TEXT = "\0"
"""A missing text in inputs of functions of frames, which have no nulls; it is no text of a table."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of an example.

    Attributes:
        name: Its name.
        datatype: Datatype of the input.
        kind: ``text``, ``bool``, ``whole``, ``float`` or ``date``: the values in the frame.
        categories: Its categories; None if it has none.
        dtype: Its type in the frame's library.
        unit: Unit of dates.
        whole: Datatype of whole numbers that travel as floats; empty for other columns.
    """

    name: str
    datatype: str
    kind: str
    categories: tuple[Any, ...] | None
    dtype: Any
    unit: str = ""
    whole: str = ""

    @property
    def reader(self) -> InputReader | None:
        """Reader of requests' values; None if they are as the example's in any case."""
        limits = None
        if self.datatype == "FP64" and self.kind in ("bool", "whole", "date"):
            info = np.iinfo(NUMPY_DTYPES[self.whole or "INT64"])
            limits = (0, 1) if self.kind == "bool" else (int(info.min), int(info.max))
        if self.datatype != "BYTES" and self.categories is None and limits is None:
            return None
        return InputReader(self.name, self.datatype == "BYTES", NULL_TEXT, self.categories, limits)

    @property
    def entry(self) -> dict[str, Any]:
        """The column in the config's parameter `CONCH_COLUMNS`."""
        entry: dict[str, Any] = {"name": self.name}
        if self.categories is not None:
            entry["categories"] = list(self.categories)
        if self.datatype == "BYTES":
            entry["null"] = NULL_TEXT
        return entry | ({"unit": self.unit} if self.unit else {})


class FrameExample:
    """A frame as an example: the inputs of a function, and frames like it.

    Args:
        frame: A DataFrame of pandas or polars, or a table of pyarrow.

    Raises:
        InvalidArgumentError: A column has a type that no input can have; the text names it.
    """

    def __init__(self, frame: Any) -> None:
        if not frame_table(frame).rows:
            raise InvalidArgumentError("a frame as example needs a column and a row")
        import narwhals.stable.v2 as narwhals  # the later API has no categories of pandas

        opened = narwhals.from_native(frame, eager_only=True)
        self._library = str(opened.implementation)
        self.columns = tuple(_column(name, opened[name]) for name in opened.columns)
        self._values = {each.name: _listed(each, opened[each.name]) for each in self.columns}

    @property
    def tensors(self) -> list[Tensor]:
        """The inputs: one for each column."""
        return [
            Tensor(each.name, str if each.datatype == "BYTES" else NUMPY_DTYPES[each.datatype], (1,))
            for each in self.columns
        ]

    @property
    def arrays(self) -> dict[str, Array]:
        """The example's rows as a function of arrays gets them."""
        return {each.name: _example_array(each, self._values[each.name]) for each in self.columns}

    @property
    def readers(self) -> dict[str, InputReader]:
        """Readers of columns whose values a request may have otherwise."""
        found = {each.name: each.reader for each in self.columns}
        return {name: reader for name, reader in found.items() if reader is not None}

    @property
    def parameter(self) -> str:
        """The config's parameter `CONCH_COLUMNS`."""
        return json.dumps([each.entry for each in self.columns])

    def frame(self, arrays: Mapping[str, Array]) -> Any:
        """A frame like the example of columns that have a row each."""
        columns = {each.name: _restored(each, arrays[each.name][:, 0]) for each in self.columns}
        dtypes = {each.name: each.dtype for each in self.columns}
        if self._library == "pandas":
            import pandas as pd

            return pd.DataFrame({name: pd.Series(each, dtype=dtypes[name]) for name, each in columns.items()})
        if self._library == "polars":
            import polars as pl

            return pl.DataFrame([pl.Series(name, each, dtypes[name]) for name, each in columns.items()])
        import pyarrow as pa

        return pa.table({name: pa.array(each, dtypes[name]) for name, each in columns.items()})


def _column(name: str, series: Any) -> Column:
    dtype = series.dtype
    native: Any = series.to_native()
    native = native.type if hasattr(native, "type") else native.dtype
    missing = bool(series.null_count())
    kind = str(dtype)
    if kind == "Categorical" or kind.startswith("Enum"):
        values = series.cat.get_categories().to_list()
        found, datatype = _kind_of(name, values, missing)
        return Column(name, datatype, found, tuple(values), native)
    if kind == "Object" or str(native) == "object":
        values = [each for each in series.to_list() if not is_missing(each)]
        found, datatype = _kind_of(name, values, missing)
        return Column(name, datatype, found, None, native)
    if kind == "String":
        return Column(name, "BYTES", "text", None, native)
    if kind == "Boolean":
        return Column(name, "FP64" if missing else "BOOL", "bool", None, native)
    if dtype.is_integer() and kind.upper() in NUMPY_DTYPES:
        whole = kind.upper()
        return Column(name, "FP64" if missing else whole, "whole", None, native, whole=whole)
    if kind in ("Float32", "Float64"):
        return Column(name, f"FP{kind[5:]}", "float", None, native)
    if kind.startswith("Datetime") and dtype.time_zone is None:
        return Column(name, "FP64" if missing else "INT64", "date", None, native, dtype.time_unit)
    raise InvalidArgumentError(
        f"column '{name}' is {kind}, which an input can't be: make it numbers, texts, categories or "
        f"dates without a time zone"
    )


def _kind_of(name: str, values: Sequence[Any], missing: bool) -> tuple[str, str]:
    """Kind and datatype of a column of objects."""
    kinds = {type(each) for each in values}
    if values and all(isinstance(each, str) for each in values):
        return "text", "BYTES"
    if kinds == {bool}:
        return "bool", "FP64" if missing else "BOOL"
    if kinds == {int}:
        return "whole", "FP64" if missing else "INT64"
    if kinds == {float}:
        return "float", "FP64"
    names = ", ".join(sorted(each.__name__ for each in kinds)) or "no value"
    raise InvalidArgumentError(
        f"column '{name}' has {names}: an input has texts, whole numbers, numbers or booleans alone"
    )


def _listed(column: Column, series: Any) -> list[Any]:
    values = (series.dt.timestamp(column.unit) if column.unit else series).to_list()
    return [None if is_missing(each) else each for each in values]


def _example_array(column: Column, values: Sequence[Any]) -> Array:
    if column.datatype != "BYTES":
        return array_of(values, column.datatype)[:, np.newaxis]
    texts = np.empty((len(values), 1), object)
    texts[:, 0] = values
    return texts


def _restored(column: Column, array: Array) -> Any:
    """Values of a request as those of the example's column were."""
    if column.kind == "float" or (column.kind not in ("text", "date") and column.datatype != "FP64"):
        return array
    values = array.tolist()
    if column.kind == "text":
        return values
    convert: Callable[[Any], Any] = bool if column.kind == "bool" else int
    return [None if math.isnan(each) else convert(each) for each in values]
