"""A column's values in one form, whatever library they come from; pyarrow only where a column is its."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from math import isnan
from typing import Any, Final

import numpy as np

from conch.core.tensor import Array
from conch_frames.frame_error import FrameError

EXACT_WHOLES: Final = {"FP16": 1 << 11, "FP32": 1 << 24, "FP64": 1 << 53}
"""Whole numbers up to which a datatype has each."""

NUMBER_SIGNS: Final = b"0123456789+-.eE"
"""All that cells of numbers have; parsers differ in what they take besides."""

ABSENT: Final = object()
"""Stands in a list where a row of JSON has no such member; refused, unless `with_nulls` makes it a null."""


@dataclass(frozen=True, slots=True)
class Column:
    """The values of a column.

    Attributes:
        values: One for each row, or the distinct ones that `codes` numbers: booleans, integers, floats,
            `datetime64` in UTC, or objects of `str`, `bytes`, `bool`, `int` and `float`.
        nulls: True for each row that is null; None if no row is. Values there have no meaning.
        codes: Number of each row's value in `values`; None if each row has its own.
    """

    values: Array
    nulls: Array | None = None
    codes: Array | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.values if self.codes is None else self.codes)


def with_nulls(data: Any) -> Any:
    """A column's values, with nulls in a list where rows of JSON have none."""
    return [None if each is ABSENT else each for each in data] if isinstance(data, list) else data


def column_of(name: str, data: Any) -> Column:
    """A list, a numpy array or an Arrow array of one dimension as a column.

    Raises:
        FrameError: Its type, or that of a value, is none that a model's column can have.
    """
    if isinstance(data, Column):
        return data
    if isinstance(data, np.ndarray):
        return _of_array(name, data)
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and isinstance(data, arrow.Array | arrow.ChunkedArray):
        return _of_arrow(name, data)
    return _of_list(name, data)


def _of_array(name: str, array: Array) -> Column:
    if array.ndim != 1:
        raise FrameError(name, None, f"its values have {array.ndim} dimensions, and a column has one")
    kind = array.dtype.kind
    if kind in "biuf":
        if array.dtype.itemsize > 8:
            raise FrameError(name, None, f"its type is {array.dtype}, which no model takes: cast it")
        return Column(array)
    if kind == "M":
        nulls = np.isnat(array)
        return Column(array, nulls if nulls.any() else None)
    if kind in "USOT":
        return _of_list(name, array.tolist())
    raise FrameError(name, None, f"its type is {array.dtype}, which no model takes: cast it")


def _of_list(name: str, values: Sequence[Any]) -> Column:
    kinds = set(map(type, values))
    missing = {kind for kind in kinds if kind is type(None) or kind.__name__ in ("NAType", "NaTType")}
    nulls = None
    if missing:
        nulls = np.fromiter((type(each) in missing for each in values), np.bool_, len(values))
        kinds -= missing
    if kinds <= {float} or kinds in ({bool}, {int}):
        return _of_numbers(values, kinds, nulls)
    if kinds <= {str, bytes, bool, int, float}:
        if float in kinds:  # pandas' null among others
            nans = np.fromiter(
                (type(each) is float and isnan(each) for each in values), np.bool_, len(values)
            )
            nulls = nans if nulls is None else nulls | nans
        return Column(_objects(values), nulls)
    plain = [_plain(name, row, value) for row, value in enumerate(values)]
    if not any(isinstance(each, np.datetime64) for each in plain):
        return _of_list(name, plain)
    for row, each in enumerate(plain):
        if each is not None and not isinstance(each, np.datetime64):
            raise FrameError(name, row, f"it has {each!r} among dates")
    return _of_array(name, np.array([np.datetime64("NaT") if each is None else each for each in plain]))


def _of_numbers(values: Sequence[Any], kinds: set[type], nulls: Array | None) -> Column:
    """Values of one type of Python."""
    if nulls is not None:
        values = [0 if null else each for each, null in zip(values, nulls.tolist(), strict=True)]
    if kinds == {bool}:
        return Column(np.array(values, np.bool_), nulls)
    if kinds != {int}:
        return Column(np.array(values, np.float64), nulls)
    try:
        return Column(np.array(values, np.int64), nulls)
    except OverflowError:
        return Column(_objects(values), nulls)


def _objects(values: Sequence[Any]) -> Array:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _plain(name: str, row: int, value: Any) -> Any:
    """A value as one of Python's own types, or `datetime64`."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if value is ABSENT:
        raise FrameError(name, row, "the row does not have it: send null for a missing value")
    if isinstance(value, np.generic):
        return value if isinstance(value, np.datetime64) else value.item()
    # Of a class that derives from one of Python's.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, int):
        return value if type(value) is bool else int(value)
    if isinstance(value, float):
        return float(value)
    if hasattr(value, "to_datetime64"):  # pandas.Timestamp, which has nanoseconds
        return value.to_datetime64()
    if isinstance(value, datetime):
        return _datetime64(value)
    if isinstance(value, date):
        return np.datetime64(value, "s")
    raise FrameError(name, row, f"its value is of type {type(value).__name__}, which no model takes")


def _datetime64(value: datetime) -> np.datetime64:
    offset = value.utcoffset()
    plain = value.replace(tzinfo=None)
    return np.datetime64(plain if offset is None else plain - offset, "us")


def _of_arrow(name: str, data: Any) -> Column:
    """An Arrow array; without `to_numpy`, `asarray` and scalars, which import pandas: 0.4 s of a command."""
    import pyarrow as pa

    if isinstance(data, pa.ChunkedArray):
        if pa.types.is_dictionary(data.type):
            data = data.unify_dictionaries()
        data = data.chunk(0) if data.num_chunks == 1 else data.combine_chunks()
        if isinstance(data, pa.ChunkedArray):  # of texts that one array can't hold
            raise FrameError(name, None, "its texts are longer than 2 GiB together: send fewer rows at once")
    kind = data.type
    nulls = _arrow_numbers(pa, data.is_null()) if data.null_count else None
    if pa.types.is_dictionary(kind):
        return _of_dictionary(name, data, nulls, _arrow_numbers(pa, data.indices))
    if pa.types.is_null(kind):
        return Column(np.zeros(len(data)), np.ones(len(data), np.bool_))
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return Column(_arrow_numbers(pa, data), nulls)
    if pa.types.is_timestamp(kind):
        return Column(data.cast(pa.timestamp(kind.unit)).to_numpy(zero_copy_only=False), nulls)
    if pa.types.is_date(kind):
        return Column(data.to_numpy(zero_copy_only=False), nulls)
    if _is_text(pa, kind):
        return Column(_objects(data.to_pylist()), nulls)
    raise FrameError(name, None, f"its Arrow type is {kind}, which no model takes: cast it")


def _arrow_numbers(pa: Any, data: Any) -> Array:
    """Numbers or booleans; 0 for nulls."""
    truths = pa.types.is_boolean(data.type)
    plain = data.cast(pa.uint8()) if truths else data
    bare = pa.Array.from_buffers(plain.type, len(plain), [None, plain.buffers()[1]], offset=plain.offset)
    values: Array = np.from_dlpack(bare)
    if data.null_count:
        values = np.where(_arrow_numbers(pa, data.is_null()), values.dtype.type(0), values)
    return values.view(np.bool_) if truths else values


def _of_dictionary(name: str, data: Any, nulls: Array | None, codes: Array) -> Column:
    distinct = column_of(name, data.dictionary)
    if distinct.codes is not None:
        raise FrameError(name, None, "it is a dictionary of dictionaries, which no model takes")
    if distinct.nulls is not None:  # a null may be among the values too
        missing = distinct.nulls[codes]
        nulls = missing if nulls is None else nulls | missing
    return Column(distinct.values, nulls, codes)


def _is_text(pa: Any, kind: Any) -> bool:
    types = pa.types
    tests = (types.is_string, types.is_large_string, types.is_string_view)
    return any(test(kind) for test in (*tests, types.is_binary, types.is_large_binary, types.is_binary_view))


def quick_column(name: str, cells: Any, kind: str, most: int) -> Column | None:
    """Arrow's texts as values of a kind; None where they are to be looked at one by one.

    Args:
        name: The column.
        cells: A chunked array of texts.
        kind: ``text``, ``int``, ``float`` or ``bool``.
        most: Floats from here on are looked at, as whole numbers may not be exact.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if kind == "text":
        return column_of(name, cells.dictionary_encode())
    texts = (bytes(chunk.buffers()[2] or b"") for chunk in cells.chunks)  # a slice has those of all rows
    if kind == "bool" or any(each.translate(None, NUMBER_SIGNS) for each in texts):
        return None
    filled = pc.binary_length(cells).cast(pa.bool_())  # of other kinds an empty text is null
    cells = pc.if_else(filled, cells, pa.nulls(len(cells), cells.type))
    try:
        column = column_of(name, cells.cast(pa.int64() if kind == "int" else pa.float64()))
    except pa.ArrowInvalid:
        return None
    if kind == "float" and np.abs(column.values).max(initial=0.0) >= most:
        return None
    return column
