"""Files of rows, CSV, JSON lines and Parquet: read in pieces and written as they come, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import orjson

from conch.core.tensor import Array
from conch_frames.conversion import Table, records_table
from conch_frames.csv_table import csv_lines, csv_table, csv_text
from conch_frames.frame_error import FrameError

FORMATS = ("csv", "jsonl", "parquet")

_ENDINGS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_BLOCK_BYTES = 2 << 20
_RECORD_BYTES = 64 << 20
_PARQUET_ROWS = 8192


class RowFileError(Exception):
    """A file of rows can't be read or written."""


def format_of(name: str, otherwise: str = "") -> str:
    """The format of a file by its ending, or another one.

    Raises:
        RowFileError: The ending says none, and there is no other.
    """
    found = _ENDINGS.get(Path(name).suffix.lower(), otherwise)
    if not found:
        what = "standard input" if name == "-" else f"'{name}'"
        endings = ", ".join(_ENDINGS)
        raise RowFileError(f"{what} has none of the endings {endings}: give --format {'|'.join(FORMATS)}")
    return found


class RowReader:
    """Reads a file in pieces.

    Args:
        file: The file, opened for bytes; Parquet needs one that can be sought.
        kind: One of `FORMATS`.
        size: Its size in bytes; 0 if that is not known.
    """

    def __init__(self, file: IO[bytes], kind: str, size: int) -> None:
        self._file = file
        self._kind = kind
        self._size = size
        self._read = 0
        self._all = 0

    @property
    def fraction(self) -> float:
        """The part of the file that has been read; 0 if its size is not known."""
        return min(self._read / self._all, 1.0) if self._all else 0.0

    def tables(self, skip: int, wants: Callable[[str], bool]) -> Iterator[Table]:
        """The rows behind the first ones.

        Args:
            skip: Number of rows to leave out.
            wants: True for the names of the columns to keep.

        Raises:
            FrameError: A row is malformed; its number counts from the file's first row.
            RowFileError: The file can't be read, or has fewer rows.
        """
        first = 0
        pieces = {"csv": self._csv, "jsonl": self._json_lines, "parquet": self._parquet}[self._kind](wants)
        while True:
            try:
                table = next(pieces, None)
            except FrameError as error:
                raise error.moved(first) from None
            if table is None:
                break
            rows = table.rows
            left_out = min(max(skip - first, 0), rows)
            first += rows
            if left_out < rows or not table.columns:  # the model refuses a table without its columns
                yield _rows(table, left_out, rows)
        if first < skip:
            raise RowFileError(f"it has {first} rows, and {skip} are to be left out")

    def _blocks(self) -> Iterator[bytes]:
        self._all = self._size
        while block := self._file.read(_BLOCK_BYTES):
            yield block
            self._read += len(block)

    def _csv(self, wants: Callable[[str], bool]) -> Iterator[Table]:
        head = b""
        for piece in _records(self._blocks(), quotes=True):
            rows = piece
            if not head:  # the first record, behind empty lines
                rows = piece.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")
                end = _first_record_end(rows)
                head, rows = rows[:end], rows[end:]
            if head:
                yield csv_table((head if head.endswith(b"\n") else head + b"\n") + rows, wants)
        if not head:
            raise FrameError("", None, "it is empty: CSV begins with a line of column names")

    def _json_lines(self, wants: Callable[[str], bool]) -> Iterator[Table]:
        for piece in _records(self._blocks(), quotes=False):
            records = [_record(at, line) for at, line in enumerate(filter(bytes.strip, piece.splitlines()))]
            if records:
                yield records_table(records, wants)

    def _parquet(self, wants: Callable[[str], bool]) -> Iterator[Table]:
        try:
            import pyarrow as pa
            from pyarrow import parquet
        except ImportError as error:
            raise RowFileError(
                f"Parquet needs pyarrow, which is not installed; install it with `pip install "
                f"'conch[frames]'` ({error})"
            ) from None
        try:
            file = parquet.ParquetFile(self._file)
            self._all = file.metadata.num_rows
            names = [name for name in file.schema_arrow.names if wants(name)]
            others = tuple(name for name in file.schema_arrow.names if not wants(name))
            for batch in file.iter_batches(_PARQUET_ROWS, columns=names):
                yield Table(dict(zip(batch.schema.names, batch.columns, strict=True)), others=others)
                self._read += batch.num_rows
        except pa.ArrowException as error:
            raise RowFileError(f"it is no Parquet that can be read: {error}") from None


def first_rows(table: Table, count: int) -> Table:
    """The first rows of a table of a `RowReader`."""
    return _rows(table, 0, count)


def _rows(table: Table, start: int, stop: int) -> Table:
    return replace(table, columns={name: values[start:stop] for name, values in table.columns.items()})


def _records(blocks: Iterator[bytes], quotes: bool) -> Iterator[bytes]:
    """Pieces that end with a line; with quotes, with one that is no part of a field."""
    rest = b""
    for block in blocks:
        data = rest + block
        end = _record_end(data) if quotes else data.rfind(b"\n") + 1
        if not end and len(data) > _RECORD_BYTES:
            raise FrameError("", 0, f"it is longer than {_RECORD_BYTES} bytes: is a quote not closed?")
        rest = data[end:]
        if end:
            yield data[:end]
    if rest:
        yield rest


def _record_end(data: bytes) -> int:
    """Place behind the last line that ends outside of quotes; 0 if there is none."""
    end = data.rfind(b"\n")
    inside = data.count(b'"', 0, max(end, 0)) % 2
    while end >= 0 and inside:
        before = data.rfind(b"\n", 0, end)
        inside ^= data.count(b'"', max(before, 0), end) % 2
        end = before
    return end + 1


def _first_record_end(data: bytes) -> int:
    """Place behind the first line that ends outside of quotes."""
    end = data.find(b"\n")
    inside = data.count(b'"', 0, max(end, 0)) % 2
    while end >= 0 and inside:
        after = data.find(b"\n", end + 1)
        inside ^= data.count(b'"', end, after if after >= 0 else len(data)) % 2
        end = after
    return end + 1 or len(data)


def _decoded(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        row = piece.count(b"\n", 0, error.start)
        raise FrameError("", None, f"it is no UTF-8: {error.reason} in or behind line {row}") from None


def _record(row: int, line: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise FrameError("", row, f"it is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise FrameError("", row, "it is no JSON object of values by column")
    return found


class RowWriter(Protocol):
    """Writes rows to a file."""

    def write(self, columns: Mapping[str, Array]) -> None:
        """Writes rows. Raises RowFileError, OSError."""

    def close(self) -> None:
        """Completes the file."""


def open_writer(file: IO[bytes], kind: str, begins: bool, names: Sequence[str] = ()) -> RowWriter:
    """A writer of a format.

    Args:
        file: The file, opened for bytes.
        kind: One of `FORMATS`.
        begins: True if the file has no rows yet.
        names: The columns of its rows, which further ones must have; any if empty.

    Raises:
        RowFileError: Rows can't be added to a file of this format, or a package is not installed.
    """
    if kind != "parquet":
        return _CsvWriter(file, begins, names) if kind == "csv" else _JsonWriter(file, names)
    if not begins:
        raise RowFileError("rows can't be added to a Parquet file: give another file")
    return _ParquetWriter(file)


class _CsvWriter:
    def __init__(self, file: IO[bytes], header: bool, names: Sequence[str]) -> None:
        self._file = file
        self._header = header
        self._names = names

    def write(self, columns: Mapping[str, Array]) -> None:
        _check_names(columns, self._names)
        self._file.write(csv_text(_texts(columns), self._header).encode())
        self._file.flush()
        self._header = False

    def close(self) -> None:
        self._file.flush()


class _JsonWriter:
    def __init__(self, file: IO[bytes], names: Sequence[str]) -> None:
        self._file = file
        self._names = names

    def write(self, columns: Mapping[str, Array]) -> None:
        _check_names(columns, self._names)
        for name, values in columns.items():
            if values.dtype.kind == "f" and np.isinf(values).any():
                raise RowFileError(f"output '{name}' has infinity, which JSON has not: write CSV or Parquet")
        names = list(columns)
        rows = zip(*(values.tolist() for values in _texts(columns).values()), strict=True)
        lines = [
            orjson.dumps(dict(zip(names, row, strict=True)), option=orjson.OPT_APPEND_NEWLINE) for row in rows
        ]
        self._file.write(b"".join(lines))
        self._file.flush()

    def close(self) -> None:
        self._file.flush()


class _ParquetWriter:
    def __init__(self, file: IO[bytes]) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise RowFileError(
                f"Parquet needs pyarrow, which is not installed; install it with `pip install "
                f"'conch[frames]'` ({error})"
            ) from None
        self._file = file
        self._writer: Any = None

    def write(self, columns: Mapping[str, Array]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        table = pa.table({name: pa.array(values) for name, values in columns.items()})
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._file, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._file.flush()


def _texts(columns: Mapping[str, Array]) -> Mapping[str, Array]:
    """The columns. Raises RowFileError: one has bytes that are no text."""
    for name, values in columns.items():
        if values.dtype.kind == "O" and not all(isinstance(each, str) for each in values.tolist()):
            raise RowFileError(f"output '{name}' has bytes that are no text in UTF-8, which only Parquet has")
    return columns


def _check_names(columns: Mapping[str, Array], names: Sequence[str]) -> None:
    if names and list(columns) != list(names):
        raise RowFileError(
            f"the outputs are {', '.join(columns)}, and the rows of the file {', '.join(names)}: give "
            f"another file, or --output with the names of the file"
        )


def columns_of(path: Path, kind: str) -> list[str]:
    """The columns of a file that was written before, by its first record; none if it is empty.

    Raises:
        RowFileError: The record is malformed.
        OSError: It can't be read.
    """
    with path.open("rb") as file:
        piece = next(_records(iter(lambda: file.read(_BLOCK_BYTES), b""), quotes=kind == "csv"), b"")
    end = _first_record_end(piece) if kind == "csv" else piece.find(b"\n") + 1
    first = piece[:end].removeprefix(b"\xef\xbb\xbf")
    try:
        return next(csv_lines(_decoded(first)), []) if kind == "csv" else list(_record(0, first))
    except FrameError as error:
        raise RowFileError(f"{path}: {error.message}") from None


def rows_of(path: Path, kind: str) -> int:
    """Number of rows in a file that was written before.

    Raises:
        RowFileError: A row is malformed or not complete, or its format has no rows to be counted.
        OSError: It can't be read.
    """
    if kind == "parquet":
        raise RowFileError("rows can't be added to a Parquet file: give another file")
    rows, last = 0, b"\n"
    try:
        with path.open("rb") as file:
            for piece in _records(iter(lambda: file.read(_BLOCK_BYTES), b""), quotes=kind == "csv"):
                rows += _count(piece, kind)
                last = piece[-1:]
    except FrameError as error:
        raise RowFileError(f"{path}: {error.message}") from None
    if last != b"\n":
        raise RowFileError(f"{path} ends within a row: remove its last line")
    return max(rows - (kind == "csv"), 0)


def _count(piece: bytes, kind: str) -> int:
    lines: Sequence[Any] = list(csv_lines(_decoded(piece))) if kind == "csv" else piece.splitlines()
    return len(lines)
