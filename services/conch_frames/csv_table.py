"""CSV as tables of texts, and columns as CSV. Pure.

Values are texts until a model's rules say what they are: an empty field is null, and ``""`` an empty text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress

import numpy as np

from conch.core.tensor import Array, Buffer
from conch_frames.conversion import Table
from conch_frames.frame_error import FrameError

_EMPTY = "\0"
"""Stands for a quoted empty field, which Python's parser does not tell apart from an empty one."""


def csv_table(content: Buffer | str, wants: Callable[[str], bool] = lambda name: True) -> Table:
    """Reads CSV in UTF-8 with a line of column names, as RFC 4180 describes it.

    Args:
        content: The whole text.
        wants: True for the names of the columns to keep.

    Raises:
        FrameError: It is no CSV; the text names the row, from 0 on without the line of names.
    """
    lines = csv_lines(_decoded(content))
    try:
        names = next(lines)
    except StopIteration:
        raise FrameError("", None, "the body is empty: CSV begins with a line of column names") from None
    return rows_table(names, lines, wants)


def csv_lines(text: str) -> Iterator[list[str]]:
    """The records of a text, without empty lines. Raises FrameError: a record is malformed."""
    if _EMPTY in text:
        raise FrameError("", None, "CSV can't have NUL characters")
    if '""' in text:
        text = _marked(text)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        yield from filter(None, reader)
    except csv.Error as error:
        raise FrameError("", None, f"line {reader.line_num} is no CSV: {error}") from None


def rows_table(
    names: list[str],
    lines: Iterable[list[str]],
    wants: Callable[[str], bool] = lambda name: True,
) -> Table:
    """A table of records below a line of names. Raises FrameError: a record has another number of fields."""
    if len(set(names)) < len(names):
        raise FrameError("", None, "the first line has a column name twice")
    kept = [wants(name) for name in names]
    count, rows = len(names), []
    for number, row in enumerate(lines):
        if len(row) != count:
            raise FrameError("", number, f"it has {len(row)} values, expected {count}")
        rows.append(row if all(kept) else list(compress(row, kept)))
    columns = zip(*rows, strict=True) if rows else ([] for each in kept if each)
    named = zip(compress(names, kept), columns, strict=True)
    others = tuple(name for name, keep in zip(names, kept, strict=True) if not keep)
    return Table({name: list(map(_cell, cells)) for name, cells in named}, texts=True, others=others)


def csv_text(columns: Mapping[str, Array], header: bool = True) -> str:
    """Columns as CSV that `csv_table` reads: floats exactly, NaN as an empty field.

    Args:
        columns: Arrays of one dimension and one length.
        header: False to leave out the line of names.
    """
    cells = [_cells(values) for values in columns.values()]
    lines = [",".join(map(_quoted, columns))] if header else []
    lines += map(",".join, zip(*cells, strict=True))
    return "".join(f"{line}\n" for line in lines)


def _decoded(content: Buffer | str) -> str:
    if isinstance(content, str):
        return content.removeprefix("\ufeff")
    try:
        return str(content, "utf-8-sig")
    except UnicodeDecodeError as error:
        raise FrameError("", None, f"the body is not CSV in UTF-8: {error}") from None


def _marked(text: str) -> str:
    """The text with `_EMPTY` in each quoted field that is empty.

    Between quotes, parts of odd numbers are inside a field, as a quote in a field is doubled. An empty part
    inside is an empty field if what is around it begins and ends a field.
    """
    parts = text.split('"')
    last = len(parts) - 1
    for number in range(1, last, 2):
        if parts[number]:
            continue
        before, behind = parts[number - 1], parts[number + 1]
        begins = before[-1:] in (",", "\n", "\r") if before else number == 1
        ends = behind[:1] in (",", "\n", "\r") if behind else number + 1 == last
        if begins and ends:
            parts[number] = _EMPTY
    return '"'.join(parts)


def _cell(cell: str) -> str | None:
    return ("" if cell == _EMPTY else cell) if cell else None


def _cells(values: Array) -> list[str]:
    plain = values.tolist()
    if values.dtype.kind == "f":
        # As a double the shortest text of a float stands for exactly its value.
        absent = np.isnan(values).tolist()
        doubles = values.astype(np.float64).tolist()
        return ["" if none else repr(each) for each, none in zip(doubles, absent, strict=True)]
    if values.dtype.kind == "O":
        return [_quoted(each if isinstance(each, str) else each.decode("latin-1")) for each in plain]
    return list(map(str, plain))


def _quoted(text: str) -> str:
    if text and not any(sign in text for sign in ',"\r\n'):
        return text
    return '"' + text.replace('"', '""') + '"'
