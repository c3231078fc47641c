"""CSV as tables of texts, and columns as CSV. Pure.

Values are texts until a model's rules say what they are: an empty field is null, and ``""`` an empty text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

import numpy as np

from conch.core.tensor import Array, Buffer
from conch_frames.conversion import Table
from conch_frames.frame_error import FrameError

_LONG_BYTES = 64 << 10
_PIECE_ROWS = 4096
_BEFORE_FIELD, _BEHIND_FIELD = np.frombuffer(b",\n", np.uint8), np.frombuffer(b",\r\n", np.uint8)
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
    quick = _quick_table(content, wants)
    if quick is not None:
        return quick
    lines = csv_lines(_decoded(content))
    try:
        names = next(lines)
    except StopIteration:
        raise FrameError("", None, "the body is empty: CSV begins with a line of column names") from None
    return rows_table(names, lines, wants)


def _quick_table(content: Buffer | str, wants: Callable[[str], bool]) -> Table | None:
    """A table by pyarrow's parser, of long bodies without quotes in fields; None for any other body.

    Careful path: `csv_lines`, which says what is wrong. On 100,000 rows of 20 columns it takes three times
    as long. Test of both: ``tests/conch_frames/unit/test_conversion.py``.
    """
    if isinstance(content, str) or len(content) < _LONG_BYTES:
        return None
    content = bytes(content)
    returns, quotes = content.count(b"\r"), b'"' in content
    if b"\0" in content or returns != content.count(b"\r\n") or (quotes and not _quotes_are_plain(content)):
        return None
    try:
        import pyarrow as pa
        from pyarrow import csv as arrow_csv
    except ImportError:
        return None
    head = content[: content.find(b"\n") + 1].decode("utf-8-sig", "replace")
    try:
        names = next(csv_lines(head), [])
        if not names or len(set(names)) < len(names):
            return None
        options = arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.large_string()),
            include_columns=[name for name in names if wants(name)],
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        table = arrow_csv.read_csv(
            pa.BufferReader(content),
            arrow_csv.ReadOptions(use_threads=False),
            arrow_csv.ParseOptions(quote_char=quotes and '"', newlines_in_values=quotes),
            options,
        )
    except (pa.ArrowException, KeyError, FrameError):
        return None
    columns = dict(zip(table.column_names, table.columns, strict=True))
    return Table(columns, texts=True, others=tuple(name for name in names if name not in columns))


def _quotes_are_plain(content: bytes) -> bool:
    """True if all quotes are around fields, and none in them."""
    signs = np.frombuffer(content, np.uint8)
    places = np.flatnonzero(signs == ord('"'))
    begins, ends = places[::2], places[1::2]
    if len(begins) != len(ends):
        return False
    before = signs[begins[begins > 0] - 1]
    behind = signs[ends[ends < len(signs) - 1] + 1]
    return bool(np.isin(before, _BEFORE_FIELD).all() and np.isin(behind, _BEHIND_FIELD).all())


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
    kept = [place for place, name in enumerate(names) if wants(name)]
    columns: list[list[str | None]] = [[] for _ in kept]
    number = 0
    lines = iter(lines)
    # In pieces: millions of lists at once would keep the garbage collector busy.
    while piece := list(islice(lines, _PIECE_ROWS)):
        if set(map(len, piece)) != {len(names)}:
            at, row = next((at, row) for at, row in enumerate(piece) if len(row) != len(names))
            raise FrameError("", number + at, f"it has {len(row)} values, expected {len(names)}")
        cells = list(zip(*piece, strict=True))
        for column, place in zip(columns, kept, strict=True):
            column.extend(_cells_of(cells[place]))
        number += len(piece)
    named = {names[place]: column for place, column in zip(kept, columns, strict=True)}
    return Table(named, texts=True, others=tuple(name for name in names if name not in named))


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


def _cells_of(cells: tuple[str, ...]) -> Iterable[str | None]:
    if "" not in cells and _EMPTY not in cells:
        return cells
    return [("" if cell == _EMPTY else cell) if cell else None for cell in cells]


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
