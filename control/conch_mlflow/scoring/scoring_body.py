"""Bodies of MLflow's scoring protocol: JSON, CSV and Parquet. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch.core.tensor import Buffer

JSON_TYPE = "application/json"
CSV_TYPE = "text/csv"
PARQUET_TYPE = "application/vnd.apache.parquet"

_FORMATS = ("dataframe_split", "dataframe_records", "instances", "inputs")
_PARAMS = "params"


class ContentTypeError(UnsupportedError):
    """A body is in none of the formats."""

    http_status = 415


@dataclass(frozen=True, slots=True)
class Table:
    """A DataFrame.

    Attributes:
        columns: Values of each column, all of one length, in order.
        named: True if the body names the columns; else they are numbered.
        texts: True if all values are texts, which stand for values of the columns' types; empty for missing.
    """

    columns: Mapping[str, list[Any]]
    named: bool = True
    texts: bool = False

    @property
    def rows(self) -> int:
        """Number of rows."""
        return next((len(each) for each in self.columns.values()), 0)


@dataclass(frozen=True, slots=True)
class Scored:
    """A request: a table, arrays by name, or one array without a name."""

    data: Any
    params: Mapping[str, Any] = field(default_factory=dict)


def read_body(body: Buffer, content_type: str) -> Scored:
    """Reads a body.

    Raises:
        ContentTypeError: It is in no format that is known.
        InvalidArgumentError: It is malformed; the text names the member.
    """
    kind, *settings = (part.strip() for part in content_type.lower().split(";"))
    for setting in settings:
        if setting not in ("charset=utf-8", 'charset="utf-8"'):
            raise ContentTypeError(f"Content-Type has '{setting}': only charset=utf-8 is known")
    if kind in (JSON_TYPE, ""):
        return _json(body)
    if kind == CSV_TYPE:
        return Scored(_csv(body))
    if kind == PARQUET_TYPE:
        return Scored(_parquet(body))
    raise ContentTypeError(f"Content-Type is '{kind}', expected {JSON_TYPE}, {CSV_TYPE} or {PARQUET_TYPE}")


def _json(body: Buffer) -> Scored:
    try:
        members = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(f"the body is not JSON: {error}") from None
    given = [name for name in _FORMATS if isinstance(members, dict) and name in members]
    if len(given) != 1:
        raise InvalidArgumentError(
            f"the body must be a JSON object with exactly one of {', '.join(_FORMATS)}, "
            f"it has {' and '.join(given) or 'none'}"
        )
    (name,) = given
    value, params = members[name], members.get(_PARAMS)
    if params is not None and not isinstance(params, dict):
        raise InvalidArgumentError(f"'{_PARAMS}' must be an object with the values of params by name")
    read = {
        "dataframe_split": _split,
        "dataframe_records": _records,
        "instances": _instances,
        "inputs": _inputs,
    }
    return Scored(read[name](value), params or {})


def _split(value: Any) -> Table:
    if not isinstance(value, dict) or "data" not in value or value.keys() - {"columns", "data", "index"}:
        raise InvalidArgumentError(
            "'dataframe_split' must be an object with 'data' and perhaps 'columns' and 'index'"
        )
    rows, columns = value["data"], value.get("columns")
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise InvalidArgumentError("'dataframe_split.data' must be a list of rows, which are lists")
    if columns is not None and not isinstance(columns, list):
        raise InvalidArgumentError("'dataframe_split.columns' must be a list of names")
    names = list(map(str, columns if columns is not None else range(len(rows[0]) if rows else 0)))
    if len(set(names)) < len(names):
        raise InvalidArgumentError("'dataframe_split.columns' has a name twice")
    for number, row in enumerate(rows):
        if len(row) != len(names):
            raise InvalidArgumentError(
                f"'dataframe_split.data[{number}]' has {len(row)} values, expected {len(names)}"
            )
    return Table({name: [row[at] for row in rows] for at, name in enumerate(names)}, columns is not None)


def _records(value: Any, member: str = "dataframe_records") -> Table:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise InvalidArgumentError(f"'{member}' must be a list of objects, one for each row")
    names = dict.fromkeys(name for record in value for name in record)
    return Table({name: [record.get(name) for record in value] for name in names})


def _instances(value: Any) -> Any:
    """Arrays by name if the instances are objects, else an array."""
    if not isinstance(value, list) or not value:
        raise InvalidArgumentError("'instances' must be a list of one instance or more")
    if not isinstance(value[0], dict):
        return value
    names = value[0].keys()
    for number, each in enumerate(value):
        if not isinstance(each, dict) or each.keys() != names:
            raise InvalidArgumentError(
                f"'instances[{number}]' must be an object with {', '.join(map(repr, names))}, as the first "
                f"one is"
            )
    return {name: [each[name] for each in value] for name in names}


def _inputs(value: Any) -> Any:
    """A table if the inputs are a list of objects, else as they are."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _records(value, "inputs")
    return value


def _csv(body: Buffer) -> Table:
    try:
        lines = list(csv.reader(io.StringIO(str(body, "utf-8-sig"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgumentError(f"the body is not CSV in UTF-8: {error}") from None
    lines = [line for line in lines if line]
    if not lines:
        raise InvalidArgumentError("the body is empty: CSV begins with a line of column names")
    names, *rows = lines
    if len(set(names)) < len(names):
        raise InvalidArgumentError("the first line of the CSV has a column name twice")
    for number, row in enumerate(rows, 1):
        if len(row) != len(names):
            raise InvalidArgumentError(
                f"row {number} of the CSV has {len(row)} values, expected {len(names)}"
            )
    return Table({name: [row[at] for row in rows] for at, name in enumerate(names)}, texts=True)


def _parquet(body: Buffer) -> Table:
    try:
        from pyarrow import ArrowException, BufferReader, parquet
    except ImportError:
        raise ContentTypeError(f"{PARQUET_TYPE} needs the package pyarrow on the server") from None
    try:
        columns = parquet.read_table(BufferReader(body)).to_pydict()
    except (ArrowException, OSError, ValueError) as error:
        raise InvalidArgumentError(f"the body is not Parquet: {error}") from None
    # The index of pandas is no column.
    return Table({name: values for name, values in columns.items() if not name.startswith("__index_level_")})
