"""Frames of pandas, polars and pyarrow as tables, and columns as frames; narwhals is imported when needed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from conch.core.errors import UnavailableError
from conch.core.tensor import Array
from conch_frames.column import Column, column_of
from conch_frames.conversion import Table
from conch_frames.frame_error import FrameError


def frame_table(frame: Any) -> Table:
    """A frame, or a mapping of columns by name, as a table; an index of pandas is no column.

    Args:
        frame: A frame of pandas, polars, pyarrow or another library that narwhals knows, or a mapping.

    Raises:
        FrameError: It is none, is lazy, or has a name twice.
        UnavailableError: narwhals or pyarrow is not installed.
    """
    if isinstance(frame, Table):
        return frame
    if isinstance(frame, Mapping):
        return Table({str(name): column_of(str(name), values) for name, values in frame.items()})
    narwhals = _narwhals()
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and isinstance(frame, arrow.RecordBatch):
        frame = arrow.Table.from_batches([frame])
    try:
        wrapped = narwhals.from_native(frame, eager_only=True)
        names = wrapped.columns
    except narwhals.exceptions.DuplicateError:
        raise FrameError("", None, "it has a column name twice") from None
    except TypeError as error:
        raise FrameError(
            "",
            None,
            f"{type(frame).__name__} is no frame of pandas, polars or pyarrow with its rows: {error}",
        ) from None
    columns: dict[str, Any] = {}
    for name in names:
        if str(name) in columns:
            raise FrameError("", None, f"it has a column name twice: '{name}'")
        columns[str(name)] = _column(str(name), wrapped.get_column(name))
    return Table(columns)


def frame_like(columns: Mapping[str, Array], like: Any) -> Any:
    """Columns as a frame of the same library as another, with its index if that is of pandas.

    Args:
        columns: Arrays of one dimension by name, as `output_columns` returns them.
        like: The frame that was sent, of as many rows, or a mapping, for which the columns are returned.

    Raises:
        FrameError: The columns have another number of rows.
    """
    if isinstance(like, Mapping | Table):
        return dict(columns)
    for name, values in columns.items():
        if len(values) != len(like):
            raise FrameError(name, None, f"it has {len(values)} rows, and the frame {len(like)}")
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(like, pandas.DataFrame):
        return pandas.DataFrame(dict(columns), index=like.index)
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and isinstance(like, arrow.Table | arrow.RecordBatch):
        return arrow.table({name: arrow.array(values) for name, values in columns.items()})
    narwhals = _narwhals()
    backend = narwhals.from_native(like, eager_only=True).implementation
    plain = {
        name: values.tolist() if values.dtype.kind == "O" else np.ascontiguousarray(values)
        for name, values in columns.items()
    }
    return narwhals.from_dict(plain, backend=backend).to_native()


def _narwhals() -> Any:
    try:
        import narwhals
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"frames need the Python package '{error.name}', which is not installed; install it with "
            f"`pip install 'conch[frames]'`"
        ) from error
    return narwhals


def _column(name: str, series: Any) -> Column:
    native = series.to_native()
    dtype = getattr(native, "dtype", None)
    if isinstance(dtype, np.dtype):  # of pandas; objects row by row, so that an error has its row
        return column_of(name, native.to_numpy())
    try:
        return column_of(name, series.to_arrow())
    except FrameError:
        raise
    except Exception as error:  # of narwhals and the frame's library, each with classes of its own
        raise FrameError(name, None, f"its type is {dtype}, which no model takes: {error}") from None
