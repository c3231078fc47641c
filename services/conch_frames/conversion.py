"""Converts a table to the tensors of a model, exactly or with an error that names column and row. Pure.

A value is never changed without a word: whole numbers become floats only where each float up to them is
exact, floats become whole numbers only if they are whole, and nulls are NaN or refused. Numbers with a
fraction are rounded to the model's kind of float, as the model's library rounds them.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conch.core.tensor import NUMPY_DTYPES, Array, Tensor
from conch_frames.column import (
    ABSENT,
    EXACT_WHOLES,
    NUMBER_SIGNS,
    Column,
    column_of,
    quick_column,
    with_nulls,
)
from conch_frames.column_rules import ISO, ColumnRule, ModelColumns, ModelInput
from conch_frames.frame_error import NO_ROWS, FrameError

_MOST_NAMES = 20
_TRUE, _FALSE = ("true", "1"), ("false", "0")
_NOT_FINITE = {
    sign + name.lower(): float(sign + name) for sign in ("", "+", "-") for name in ("nan", "inf", "infinity")
}
_DATE = re.compile(r"(\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)?)(Z|[+-]\d\d:\d\d)?")
_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_NULL_REASON = "it is null, which {} can't be: send a value"

_NULL_TEXT = (
    "it is null, and a text can't be: send another one, such as '', or, if the model takes nulls there, give "
    "the column a text that stands for them: 'null' in the config's parameter 'CONCH_COLUMNS'"
)


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of one length.

    Attributes:
        columns: Values of each column by name, in order: a list, a numpy or an Arrow array, or a `Column`.
        named: False if the columns have no names of their own; they are those of a matrix then, in order.
        texts: True if all values are texts that stand for values of the model's types, and None for nulls.
        others: Names of columns that have been left out, for errors.
    """

    columns: Mapping[str, Any]
    named: bool = True
    texts: bool = False
    others: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows."""
        for values in self.columns.values():
            return values.rows if isinstance(values, Column) else len(values)
        return 0


def records_table(records: Sequence[Mapping[str, Any]], wants: Callable[[str], bool]) -> Table:
    """A table of rows by name, with `ABSENT` for members that a row does not have.

    Args:
        records: The rows.
        wants: True for the names of columns to keep: a table of all names may have rows times rows values.

    Raises:
        FrameError: There is no row.
    """
    if not records:
        raise FrameError("", None, NO_ROWS)
    names = {name: wants(name) for name in dict.fromkeys(name for record in records for name in record)}
    found = {name: [each.get(name, ABSENT) for each in records] for name, kept in names.items() if kept}
    return Table(found, others=tuple(name for name, kept in names.items() if not kept))


def table_tensors(table: Table, model: ModelColumns) -> dict[str, Tensor]:
    """The inputs of a model that a table fills; columns that the model does not have are left out.

    Returns:
        Tensors by input, of shape [rows], [rows, 1], or [rows, columns] for a matrix.

    Raises:
        FrameError: A column is missing, there is no row, or one of its values does not fit.
    """
    if not table.columns and not table.others:
        raise FrameError("", None, f"it has no columns; model '{model.model}' has {_names(model.rules)}")
    if table.columns and not table.rows:
        raise FrameError("", None, NO_ROWS)
    lengths = {name: _length(values) for name, values in table.columns.items()}
    for name, length in lengths.items():
        if length != table.rows:
            raise FrameError(name, None, f"it has {length} rows, and the columns before have {table.rows}")
    for each in model.inputs.values():
        if not each.optional and each.name not in model.rules and each is not model.matrix:
            raise FrameError(
                "",
                None,
                f"input '{each.name}' of model '{model.model}' has dims {list(each.dims)}, which is no value "
                f"for each row; a matrix needs parameter 'CONCH_COLUMNS' with the names of its columns",
            )
    if not table.named or not model.rules:
        table, model = _with_names(table, model)
    columns = table.columns
    if any(rule.spaces for rule in model.rules.values()):
        columns = {**{name.replace(" ", "_"): values for name, values in columns.items()}, **columns}
    arrays = {
        name: column_array(columns[name], rule, table.texts)
        for name, rule in model.rules.items()
        if name in columns or not _left_out(table, model, rule)
    }
    if model.matrix is not None:
        return {model.matrix.name: _matrix(model.matrix, list(arrays.values()))}
    return {name: _tensor(model.inputs[name], array) for name, array in arrays.items()}


def _length(values: Any) -> int:
    return values.rows if isinstance(values, Column) else len(values)


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return (", ".join(map(repr, listed[:_MOST_NAMES])) or "none") + more


def _left_out(table: Table, model: ModelColumns, rule: ColumnRule) -> bool:
    """True for a column that a table may leave out. Raises FrameError: the model needs it."""
    if rule.optional and model.matrix is None:
        return True
    names = (*table.columns, *table.others)
    one_line = table.texts and len(names) == 1 and any(sign in names[0] for sign in ";\t|")
    raise FrameError(
        rule.name,
        None,
        f"model '{model.model}' needs it, and the table has {_names(names)}"
        + ("; values of CSV are separated by commas" if one_line else ""),
    )


def _with_names(table: Table, model: ModelColumns) -> tuple[Table, ModelColumns]:
    """A table whose columns have the model's names by their places, and rules for them."""
    rules, matrix = model.rules, model.matrix
    if not rules:
        if matrix is None or (table.named and not model.by_position):
            raise FrameError(
                "",
                None,
                f"model '{model.model}' does not name the columns of its input, so their order can't be "
                f"checked: add parameter 'CONCH_COLUMNS' to its config, or send rows without names",
            )
        width = len(table.columns) if matrix.dims[1] == -1 else matrix.dims[1]
        rules = {str(number): ColumnRule(str(number), matrix.datatype) for number in range(width)}
    if len(table.columns) != len(rules):
        raise FrameError(
            "",
            None,
            f"it has {len(table.columns)} columns without names, and model '{model.model}' has "
            f"{len(rules)}: {_names(rules)}",
        )
    if matrix is None and len(rules) > 1:
        raise FrameError("", None, f"name its columns: model '{model.model}' has {_names(rules)}")
    columns = dict(zip(rules, table.columns.values(), strict=True))
    return Table(columns, texts=table.texts), replace(model, rules=rules)


def _matrix(of: ModelInput, arrays: Sequence[Array]) -> Tensor:
    if of.datatype == "BYTES" or len(of.dims) == 1:
        stacked = np.stack(arrays, axis=1)
    else:
        stacked = np.empty((len(arrays[0]), len(arrays)), arrays[0].dtype)
        for at, array in enumerate(arrays):
            stacked[:, at] = array
    if len(of.dims) == 1:
        stacked = stacked[:, 0]
    return Tensor(of.name, of.datatype, stacked.shape, None, np.ascontiguousarray(stacked))


def _tensor(of: ModelInput, array: Array) -> Tensor:
    if len(of.dims) == 2:
        array = array[:, np.newaxis]
    return Tensor(of.name, of.datatype, array.shape, None, np.ascontiguousarray(array))


def column_array(data: Any, rule: ColumnRule, texts: bool = False) -> Array:
    """The values of a column as the model takes them.

    Args:
        data: A list, a numpy or an Arrow array, or a `Column`.
        rule: The model's rule.
        texts: True if all values are texts that stand for values of the rule's type.

    Returns:
        An array of one dimension of the rule's datatype; BYTES are objects of `bytes`.

    Raises:
        FrameError: A value does not fit.
    """
    if rule.datatype != "BYTES" and rule.datatype not in NUMPY_DTYPES:
        raise FrameError(rule.name, None, f"its input is {rule.datatype}, which no table can fill")
    if rule.optional:
        data = with_nulls(data)
    column = _parsed(data, rule) if texts else column_of(rule.name, data)
    if column.codes is not None:
        return _by_code(column, rule)
    return _converted(column, rule)


def _by_code(column: Column, rule: ColumnRule) -> Array:
    """Converts each value that a row has, once."""
    codes = column.codes
    assert codes is not None, "called for columns with codes"
    rows = np.arange(len(codes)) if column.nulls is None else np.flatnonzero(~column.nulls)
    present = codes[rows].astype(np.intp)
    used = np.flatnonzero(np.bincount(present, minlength=1))
    places = np.zeros(int(used.max(initial=0)) + 1, np.intp)
    places[used] = np.arange(len(used))
    try:
        made = _converted(Column(column.values[used]), rule)
    except FrameError as error:
        if error.row is None:
            raise
        row = rows[_first(present == used[error.row])]
        raise FrameError(rule.name, int(row), error.reason) from None
    found: Array = made[places[present]]
    if column.nulls is None or len(rows) == len(codes):
        return found
    try:
        null = _converted(Column(np.zeros(1), np.ones(1, np.bool_)), replace(rule, unit=""))
    except FrameError as error:
        raise FrameError(rule.name, _first(column.nulls), error.reason) from None
    spread = np.empty(len(codes), made.dtype)
    spread[rows] = found
    spread[column.nulls] = null[0]
    return spread


def _converted(column: Column, rule: ColumnRule) -> Array:
    if rule.unit:
        column = _dates(column, rule)
    elif column.values.dtype.kind == "M":
        raise FrameError(
            rule.name, None, "it has dates, and the model's config states no unit of them: convert them"
        )
    if rule.categories is not None:
        column = _checked_categories(column, rule)
    if rule.datatype == "BYTES":
        return _text_array(column, rule)
    return _number_array(column, rule)


def _first(mask: Array) -> int:
    return int(np.argmax(mask))


# Numbers


def _number_array(column: Column, rule: ColumnRule) -> Array:
    if column.values.dtype.kind == "O":
        return _mixed_numbers(column, rule)
    values, nulls, dtype = column.values, column.nulls, NUMPY_DTYPES[rule.datatype]
    if nulls is not None and nulls.any():
        if dtype.kind != "f":
            row = _first(nulls)
            _number_array(Column(values[:row]), rule)  # refuses a row before it
            raise FrameError(rule.name, row, _NULL_REASON.format(rule.datatype))
        values = np.where(nulls, values.dtype.type(0), values)
    else:
        nulls = None
    truths = values.dtype.kind == "b"
    if (not truths if dtype.kind == "b" else truths and not rule.takes_booleans) and len(values):
        row = 0 if nulls is None else _first(~nulls)
        if nulls is None or not nulls.all():
            raise FrameError(rule.name, row, _wrong(values[row].item(), rule))
    refusal = _refusal(values, dtype, rule)
    if refusal is not None:
        raise FrameError(rule.name, *refusal)
    made = values if values.dtype == dtype else values.astype(dtype)
    if nulls is not None:
        made[nulls] = np.nan
    return made


def _refusal(values: Array, dtype: np.dtype[Any], rule: ColumnRule) -> tuple[int, str] | None:
    """The first row whose number a type can't hold exactly, with the reason; None if there is none."""
    kind = values.dtype.kind
    if values.dtype == dtype or kind == "b" or not len(values):
        return None
    if kind == "f":
        return _refused_float(values, dtype, rule)
    source = np.iinfo(values.dtype)
    if dtype.kind == "f":
        least, most = -EXACT_WHOLES[rule.datatype], EXACT_WHOLES[rule.datatype]
        reason = _inexact
    else:
        least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        reason = _beyond
    lost = np.zeros(len(values), np.bool_)
    if source.min < least:
        lost |= values < least
    if source.max > most:
        lost |= values > most
    if not lost.any():
        return None
    row = _first(lost)
    return row, reason(values[row].item(), rule)


def _refused_float(values: Array, dtype: np.dtype[Any], rule: ColumnRule) -> tuple[int, str] | None:
    if dtype.kind == "f":
        if dtype.itemsize >= values.dtype.itemsize:
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            lost = np.isinf(values.astype(dtype)) & np.isfinite(values)
        row = _first(lost)
        return (row, _beyond(values[row].item(), rule)) if lost.any() else None
    limits = np.iinfo(dtype)
    # The limits as floats are exact: powers of two, and those of short types.
    values = values.astype(np.float64, copy=False)
    lost = (
        (values >= 2.0 ** (limits.bits - (dtype.kind == "i")))
        | ~(values >= float(limits.min))
        | (np.floor(values) != values)
        | (np.abs(values) >= EXACT_WHOLES["FP64"])
    )
    if not lost.any():
        return None
    row = _first(lost)
    value = values[row].item()
    if np.isnan(value):
        return row, _NULL_REASON.format(rule.datatype)
    if np.isfinite(value) and value != np.floor(value):
        return row, f"{value!r} is no whole number, and the model takes {rule.datatype}"
    if float(limits.min) <= value < 2.0 ** (limits.bits - (dtype.kind == "i")):
        exact = EXACT_WHOLES["FP64"]
        return row, f"{value!r} is a float of {exact} or more, which may be rounded: send a whole number"
    return row, _beyond(value, rule)


def _mixed_numbers(column: Column, rule: ColumnRule) -> Array:
    """Python's numbers of several types, or beyond 64 bits: those of each type together."""
    dtype = NUMPY_DTYPES[rule.datatype]
    made = np.zeros(len(column.values), dtype)
    values = column.values.tolist()
    nulls = [False] * len(values) if column.nulls is None else column.nulls.tolist()
    refused: FrameError | None = None
    rows: dict[str, list[int]] = {}
    for row, (value, null) in enumerate(zip(values, nulls, strict=True)):
        kind = "null" if null else _number_kind(value)
        if not kind or (null and dtype.kind != "f"):
            tell = _beyond if type(value) is int else _wrong
            reason = _NULL_REASON.format(rule.datatype) if null else tell(value, rule)
            refused = FrameError(rule.name, row, reason)
            break
        rows.setdefault(kind, []).append(row)
    made[rows.pop("null", [])] = np.nan if dtype.kind == "f" else 0
    for kind, places in rows.items():
        try:
            made[places] = _number_array(Column(np.array([values[row] for row in places], kind)), rule)
        except FrameError as error:
            row = places[error.row or 0]
            if refused is None or refused.row is None or row < refused.row:
                refused = FrameError(rule.name, row, error.reason)
    if refused is not None:
        raise refused
    return made


def _number_kind(value: Any) -> str:
    """The type of numpy that has a number of Python; empty if none has."""
    if type(value) is not int:
        return {bool: "bool", float: "float64"}.get(type(value), "")
    if -(1 << 63) <= value < 1 << 63:
        return "int64"
    return "uint64" if 0 < value < 1 << 64 else ""


def _described(rule: ColumnRule) -> str:
    if rule.datatype == "BYTES":
        return "texts"
    return "true or false" if rule.datatype == "BOOL" else f"numbers of type {rule.datatype}"


def _wrong(value: Any, rule: ColumnRule) -> str:
    fix = ""
    if rule.datatype == "BYTES" and isinstance(value, int):
        kind = "BOOL" if isinstance(value, bool) else "INT64"
        fix = f": send texts, or, if a CatBoost model had such values in training, list it as TYPE_{kind}"
        if kind == "BOOL":
            fix += "; parameter 'CONCH_BOOL_TEXTS' is for a training with texts such as 'True'"
    return f"must have {_described(rule)}, not {_shown(value)}{fix}"


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:80] + "..."


def _beyond(value: Any, rule: ColumnRule) -> str:
    return f"{_shown(value)} is beyond {rule.datatype}"


def _inexact(value: Any, rule: ColumnRule) -> str:
    return (
        f"{_shown(value)} is a whole number beyond {EXACT_WHOLES[rule.datatype]}, up to which "
        f"{rule.datatype} has each: send it as a float if it may be rounded"
    )


# Texts


def _text_array(column: Column, rule: ColumnRule) -> Array:
    nulls = column.nulls
    if nulls is not None and nulls.any() and rule.null is None:
        raise FrameError(rule.name, _first(nulls), _NULL_TEXT)
    values = column.values.tolist()
    if nulls is None and not rule.is_binary and rule.null is None and set(map(type, values)) == {str}:
        try:
            return _as_objects(list(map(str.encode, values)))
        except UnicodeEncodeError:
            pass  # said below, with its row
    if column.values.dtype.kind != "O" and values:
        present = np.ones(len(values), np.bool_) if nulls is None else ~nulls
        if present.any():
            row = _first(present)
            raise FrameError(rule.name, row, _wrong(values[row], rule))
    missing = b"" if rule.null is None else rule.null.encode()
    made = np.empty(len(values), object)
    encode = _decoded if rule.is_binary else _encoded
    for row, value in enumerate(values):
        if nulls is not None and nulls[row]:
            made[row] = missing
        elif type(value) is bytes:
            made[row] = value
        elif type(value) is str:
            if value == rule.null:
                raise FrameError(rule.name, row, f"{value!r} stands for null in this column: send null")
            made[row] = encode(value, row, rule)
        else:
            raise FrameError(rule.name, row, _wrong(value, rule))
    return made


def _as_objects(values: list[bytes]) -> Array:
    made = np.empty(len(values), object)
    made[:] = values
    return made


def _encoded(value: str, row: int, rule: ColumnRule) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise FrameError(rule.name, row, "its text has a surrogate, which UTF-8 can't have") from None


def _decoded(value: str, row: int, rule: ColumnRule) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise FrameError(rule.name, row, "it is binary, which must be in base64") from None


# Categories


def _checked_categories(column: Column, rule: ColumnRule) -> Column:
    """The column with its values, or their numbers, if all are categories of the model."""
    assert rule.categories is not None, "called for columns with categories"
    numbers = {each: number for number, each in enumerate(rule.categories)}
    kind = type(rule.categories[0])
    values = column.values.tolist()
    nulls = np.zeros(len(values), np.bool_) if column.nulls is None else column.nulls.copy()
    found: list[Any] = []
    for row, value in enumerate(values):
        if not nulls[row] and isinstance(value, float) and np.isnan(value):
            nulls[row] = True
        key = value.decode(errors="replace") if isinstance(value, bytes) else value
        if nulls[row]:
            found.append(rule.categories[0] if not rule.codes else 0)
        elif _fits(key, kind) and key in numbers:
            found.append(numbers[key] if rule.codes else key)
        elif rule.unseen_is_null:
            nulls[row] = True
            found.append(rule.categories[0] if not rule.codes else 0)
        else:
            known = ", ".join(_shown(each) for each in rule.categories[:10])
            more = ", ..." if len(rule.categories) > 10 else ""
            raise FrameError(rule.name, row, f"{_shown(value)} is no category of the model: {known}{more}")
    return replace(column_of(rule.name, found), nulls=nulls if nulls.any() else None)


def _fits(value: Any, kind: type) -> bool:
    """True if a value may stand for categories of a type: 10.0 for 10, but neither "10" nor true for 1."""
    if kind in (int, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


# Dates


def _dates(column: Column, rule: ColumnRule) -> Column:
    """Dates as numbers or texts of the rule's unit; numbers and texts that are so already stay."""
    if column.values.dtype.kind == "O" and rule.unit != ISO:
        column = _parsed_dates(column, rule)
    if column.values.dtype.kind != "M":
        return column
    if rule.unit == ISO:
        texts = np.datetime_as_string(column.values).tolist()
        return replace(column, values=np.array(texts, object) if texts else np.empty(0, object))
    unit, _ = np.datetime_data(column.values.dtype)
    values = column.values if unit in _NANOSECONDS else column.values.astype("datetime64[s]")
    unit = unit if unit in _NANOSECONDS else "s"
    counts = np.where(np.isnat(values), 0, values.astype(np.int64))
    source, wanted = _NANOSECONDS[unit], _NANOSECONDS[rule.unit]
    if source < wanted:
        factor = wanted // source
        lost = counts % factor != 0
        reason = f"is finer than {rule.unit}, the unit of the model's dates: round it"
        counts = counts // factor
    else:
        factor = source // wanted
        most = np.iinfo(np.int64).max // factor
        lost = (counts > most) | (counts < -most)
        reason = f"is too far from 1970 for {rule.unit}"
        counts = np.where(lost, 0, counts) * factor
    if lost.any():
        row = _first(lost)
        raise FrameError(rule.name, row, f"{values[row]} {reason}")
    return replace(column, values=counts)


def _parsed_dates(column: Column, rule: ColumnRule) -> Column:
    """Texts in ISO 8601 as dates; those without a zone are in UTC."""
    made = np.full(len(column.values), "NaT", "datetime64[ns]")
    for row, value in enumerate(column.values.tolist()):
        if column.nulls is not None and column.nulls[row]:
            continue
        if not isinstance(value, str):
            if all(isinstance(each, int | float) for each in column.values.tolist()):
                return column
            raise FrameError(rule.name, row, f"must have dates in ISO 8601, not {_shown(value)}")
        made[row] = _date(value, row, rule)
    nulls = np.isnat(made)
    return Column(made, nulls if nulls.any() else None)


def _date(text: str, row: int, rule: ColumnRule) -> np.datetime64:
    match = _DATE.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        found = np.datetime64(match[1], "ns")
        # Beyond the years 1678 to 2262 nanoseconds wrap around.
        if str(found)[:10] != match[1][:10]:
            raise ValueError
    except ValueError:
        raise FrameError(
            rule.name, row, f"{_shown(text)} is no date of ISO 8601, such as 2026-01-31"
        ) from None
    zone = match[2]
    if zone and zone != "Z":
        minutes = int(zone[1:3]) * 60 + int(zone[4:])
        found -= np.timedelta64(-minutes if zone[0] == "-" else minutes, "m")
    return found


# Texts that stand for values


def _parsed(cells: Any, rule: ColumnRule) -> Column:
    """Cells of a format without types, as values of the rule's type."""
    kind = _cell_kind(rule)
    if not isinstance(cells, Sequence):
        quick = quick_column(rule.name, cells, kind, EXACT_WHOLES.get(rule.datatype, EXACT_WHOLES["FP64"]))
        if quick is not None:
            return quick
        cells = cells.to_pylist()
    if kind != "text":
        cells = [each or None for each in cells]
    nulls = np.fromiter((each is None for each in cells), np.bool_, len(cells))
    absent = nulls if nulls.any() else None
    if kind == "text":
        values = np.empty(len(cells), object)
        values[:] = cells
        return Column(values, absent)
    given = cells if absent is None else [each for each in cells if each is not None]
    try:
        parsed = _parsed_numbers(given, kind, EXACT_WHOLES.get(rule.datatype, EXACT_WHOLES["FP64"]))
    except (ValueError, OverflowError):
        parsed = _parsed_each(cells, kind, rule)
    if absent is None:
        return Column(parsed)
    spread = np.zeros(len(cells), parsed.dtype)
    spread[~nulls] = parsed
    return Column(spread, absent)


def _cell_kind(rule: ColumnRule) -> str:
    """The kind of value that a cell stands for: text, float, int or bool."""
    if rule.categories is not None:
        return {str: "text", float: "float", int: "int", bool: "bool"}[type(rule.categories[0])]
    if rule.datatype == "BYTES" or rule.unit:
        return "text"
    return {"f": "float", "b": "bool"}.get(NUMPY_DTYPES[rule.datatype].kind, "int")


def _parsed_numbers(cells: Sequence[Any], kind: str, most: int) -> Array:
    """Numbers of cells. Raises ValueError or OverflowError: a cell is none, or beyond `most` or 64 bits."""
    if kind == "bool" or "".join(cells).encode().translate(None, NUMBER_SIGNS):
        raise ValueError
    if kind == "int":
        return np.array([int(each) for each in cells], np.int64)
    found = np.array([float(each) for each in cells], np.float64)
    if np.abs(found).max(initial=0.0) >= most:
        raise ValueError
    return found


def _parsed_each(cells: Sequence[str | None], kind: str, rule: ColumnRule) -> Array:
    made: list[Any] = []
    for row, cell in enumerate(cells):
        if cell is None:
            continue
        try:
            made.append(_parsed_cell(cell, kind))
        except ValueError:
            raise FrameError(rule.name, row, f"must have {_described(rule)}, not {_shown(cell)}") from None
    column = column_of(rule.name, made)
    return column.values


def _parsed_cell(cell: str, kind: str) -> bool | int | float:
    lower = cell.lower()
    if kind == "bool" or (lower in ("true", "false") and kind != "text"):
        if lower in (_TRUE if kind == "bool" else _TRUE[:1]):
            return True
        if lower in (_FALSE if kind == "bool" else _FALSE[:1]):
            return False
        raise ValueError
    if lower in _NOT_FINITE:
        return _NOT_FINITE[lower]
    if not cell or cell.encode().translate(None, NUMBER_SIGNS):
        raise ValueError
    try:
        return int(cell)
    except ValueError:
        found = float(cell)
        if np.isinf(found):
            raise ValueError from None
        return found
