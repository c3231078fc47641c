"""Bodies of invocations as tables or arrays: JSON, JSON lines, CSV, Arrow and Parquet. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch.core.tensor import Buffer
from conch_frames.conversion import Table, records_table
from conch_frames.csv_table import csv_table
from conch_frames.frame_error import FrameError

JSON_TYPE: Final = "application/json"
CSV_TYPE: Final = "text/csv"
ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
PARQUET_TYPE: Final = "application/vnd.apache.parquet"
_LINES_TYPES: Final = ("application/jsonl", "application/x-ndjson", "application/jsonlines")

_FORMATS = ("dataframe_split", "dataframe_records", "instances", "inputs")
_PARAMS = "params"

Wants = Callable[[str], bool]


class ContentTypeError(UnsupportedError):
    """A body is in none of the formats."""

    http_status = 415


@dataclass(frozen=True, slots=True)
class FrameRequest:
    """A request: a table, arrays by name, or one array without a name."""

    data: Any
    params: Mapping[str, Any] = field(default_factory=dict)


def needs_arrow(content_type: str) -> bool:
    """True for formats that pyarrow reads, which takes long to import."""
    return content_type.partition(";")[0].strip().lower() in (ARROW_TYPE, PARQUET_TYPE)


def read_request(body: Buffer, content_type: str, most_bytes: int, wants: Wants) -> FrameRequest:
    """Reads a body.

    Args:
        body: The whole body.
        content_type: The request's header.
        most_bytes: Limit of what compressed formats unpack to.
        wants: True for the names of the model's columns and inputs; others are left out of tables.

    Raises:
        ContentTypeError: It is in no format that is known.
        InvalidArgumentError: It is malformed; the text names the member.
    """
    kind, *settings = (part.strip() for part in content_type.lower().split(";"))
    for setting in settings:
        if setting not in ("charset=utf-8", 'charset="utf-8"', "header=present"):
            raise ContentTypeError(f"Content-Type has '{setting}': only charset=utf-8 is known")
    if kind in (JSON_TYPE, ""):
        return _json(body, wants)
    if kind == CSV_TYPE:
        return FrameRequest(csv_table(body, wants))
    if kind in _LINES_TYPES:
        return FrameRequest(_records(_lines(body), "the body", wants))
    if kind not in (ARROW_TYPE, PARQUET_TYPE):
        known = ", ".join((JSON_TYPE, CSV_TYPE, *_LINES_TYPES, ARROW_TYPE))
        raise ContentTypeError(f"Content-Type is '{kind}', expected {known} or {PARQUET_TYPE}")
    try:
        from conch_frames.arrow_tables import arrow_table, parquet_table
    except ImportError:
        raise ContentTypeError(
            f"{kind} needs the Python package pyarrow on the server: `pip install 'conch[frames]'`"
        ) from None
    return FrameRequest((arrow_table if kind == ARROW_TYPE else parquet_table)(body, most_bytes, wants))


def _json(body: Buffer, wants: Wants) -> FrameRequest:
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
    unknown = sorted(members.keys() - {name, _PARAMS})
    if unknown:
        raise InvalidArgumentError(f"the body has '{unknown[0]}' beside '{name}': only '{_PARAMS}' is known")
    value, params = members[name], members.get(_PARAMS)
    if params is not None and not isinstance(params, dict):
        raise InvalidArgumentError(f"'{_PARAMS}' must be an object with the values of params by name")
    read = {
        "dataframe_split": _split,
        "dataframe_records": _named_records,
        "instances": _instances,
        "inputs": _inputs,
    }
    return FrameRequest(read[name](value, wants), params or {})


def _split(value: Any, wants: Wants) -> Table:
    if not isinstance(value, dict) or "data" not in value or value.keys() - {"columns", "data", "index"}:
        raise InvalidArgumentError(
            "'dataframe_split' must be an object with 'data' and perhaps 'columns' and 'index'"
        )
    rows, columns = value["data"], value.get("columns")
    if not isinstance(rows, list) or not set(map(type, rows)) <= {list}:
        raise InvalidArgumentError("'dataframe_split.data' must be a list of rows, which are lists")
    if columns is not None and not isinstance(columns, list):
        raise InvalidArgumentError("'dataframe_split.columns' must be a list of names")
    names = list(map(str, columns if columns is not None else range(len(rows[0]) if rows else 0)))
    if len(set(names)) < len(names):
        raise InvalidArgumentError("'dataframe_split.columns' has a name twice")
    if set(map(len, rows)) - {len(names)}:
        number, row = next((at, row) for at, row in enumerate(rows) if len(row) != len(names))
        raise InvalidArgumentError(
            f"'dataframe_split.data[{number}]' has {len(row)} values, expected {len(names)}"
        )
    named = columns is not None
    kept = [at for at, name in enumerate(names) if not named or wants(name)]
    found = {names[at]: [row[at] for row in rows] for at in kept}
    return Table(found, named, others=tuple(name for name in names if name not in found))


def _lines(body: Buffer) -> list[Any]:
    """The values of lines of JSON. Raises FrameError: one is malformed."""
    found = []
    for line in bytes(body).splitlines():
        if not line.strip():
            continue
        try:
            found.append(orjson.loads(line))
        except orjson.JSONDecodeError as error:
            raise FrameError("", len(found), f"the line is not JSON: {error}") from None
    return found


def _named_records(value: Any, wants: Wants) -> Table:
    return _records(value, "'dataframe_records'", wants)


def _records(value: Any, member: str, wants: Wants) -> Table:
    """A table of records."""
    if not isinstance(value, list) or not set(map(type, value)) <= {dict}:
        raise InvalidArgumentError(f"{member} must be a list of objects, one for each row")
    return records_table(value, wants)


def _instances(value: Any, wants: Wants) -> Any:
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


def _inputs(value: Any, wants: Wants) -> Any:
    """A table if the inputs are a list of objects, else as they are."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _records(value, "'inputs'", wants)
    return value
