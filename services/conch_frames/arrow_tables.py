"""Arrow streams and Parquet files as tables within a limit, and columns as Arrow streams; needs pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Array, Buffer
from conch_frames.conversion import Table
from conch_frames.frame_error import FrameError
from conch_frames.packed_sizes import (
    ARROW_MAGIC,
    Chunk,
    PackedError,
    ParquetPages,
    arrow_file_messages,
    arrow_message_bytes,
    parquet_chunks,
)

_BATCH_BYTES = 1 << 10
"""Counted for each message beside its metadata, as an empty batch takes as much."""
_CELL_BYTES = 8
"""Counted for each value, as null columns, booleans and repeated values take less until they are unpacked."""
_OLD_WRITER_BYTES = 100
"""Read behind a column's pages in files of old versions of Java's writer, whose sizes are too small."""
_VIEW = 4  # numbers of 32 bits in a view of a text, of which the first is the length


class UnpackedSizeError(InvalidArgumentError):
    """A body unpacks to more than the limit."""

    http_status = 413


def arrow_table(body: Buffer, most_bytes: int, wants: Callable[[str], bool] = lambda name: True) -> Table:
    """Reads an Arrow stream or file.

    Args:
        body: The whole body.
        most_bytes: Limit of what it unpacks to.
        wants: True for the names of the columns to read.

    Raises:
        UnpackedSizeError: It unpacks to more.
        FrameError: It is no Arrow, or has a column that no model takes.
    """
    is_file = bytes(body[: len(ARROW_MAGIC)]) == ARROW_MAGIC
    opened = pa.ipc.open_file if is_file else pa.ipc.open_stream
    size = _Size(most_bytes)
    try:
        for metadata, content in arrow_file_messages(memoryview(body)) if is_file else _messages(body):
            size.add(_BATCH_BYTES + len(metadata))
            size.add(arrow_message_bytes(metadata, content))
        with opened(pa.BufferReader(pa.py_buffer(body))) as reader:
            names, kept = reader.schema.names, _kept(reader.schema, wants)
        options = pa.ipc.IpcReadOptions(included_fields=kept or [0], use_threads=False)
        with opened(pa.BufferReader(pa.py_buffer(body)), options=options) as reader:
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            table = pa.Table.from_batches(list(_bounded(batches, size, len(kept))), reader.schema)
    except PackedError as error:
        raise FrameError("", None, f"the body is no Arrow stream that can be read: {error}") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FrameError("", None, f"the body is no Arrow stream: {error}") from None
    return _table(table, names, size, wants)


def _messages(body: Buffer) -> Iterator[tuple[bytes, memoryview]]:
    """Metadata and bodies of the messages in a stream."""
    for message in pa.ipc.MessageReader.open_stream(pa.BufferReader(pa.py_buffer(body))):
        if message.body is not None:
            yield message.metadata.to_pybytes(), memoryview(message.body)


def _bounded(batches: Any, size: _Size, columns: int) -> Iterator[Any]:
    """Batches that are validated; each counts its dictionaries, which are gone through for each."""
    for batch in batches:
        size.add(batch.num_rows * columns * _CELL_BYTES)
        for column in batch.columns:
            if hasattr(column, "dictionary"):
                size.add(column.dictionary.get_total_buffer_size())  # follows no offsets
        batch.validate(full=True)  # the reader follows offsets and codes without a check
        yield batch


def parquet_table(body: Buffer, most_bytes: int, wants: Callable[[str], bool] = lambda name: True) -> Table:
    """Reads a Parquet file; arguments and errors as of `arrow_table`."""
    size = _Size(most_bytes)
    try:
        file = parquet.ParquetFile(pa.BufferReader(pa.py_buffer(body)))
        schema = file.schema_arrow
        names = [schema.names[place] for place in _kept(schema, wants)]
        chunks, writer = parquet_chunks(memoryview(body))
        tail = _OLD_WRITER_BYTES if writer.startswith(b"parquet-mr") else 0
        pages, read = ParquetPages(memoryview(body)), _read_places(file.schema, names)
        for chunk in chunks:
            if chunk.place in read:
                _add_chunk(pages, chunk, min(chunk.end + tail, len(body)), size)
        texts = [name for name in names if _is_text(schema.field(name).type)]
        # Texts stay in their dictionaries, as those repeat them without a bound.
        file = parquet.ParquetFile(pa.BufferReader(pa.py_buffer(body)), read_dictionary=texts)
        table = file.read(columns=names, use_threads=False, use_pandas_metadata=False)
        table.validate(full=True)
    except PackedError as error:
        raise FrameError("", None, f"the body is no Parquet that can be read: {error}") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FrameError("", None, f"the body is not Parquet: {error}") from None
    return _table(table, schema.names, size, wants)


def _read_places(schema: Any, names: Sequence[str]) -> set[int]:
    """Places of the columns that pyarrow reads for these names: for `a.b` also ``["a", "b", "c"]``."""
    exact, parts = set(names), tuple(f"{name}." for name in names if "." in name)
    paths = [schema.column(place).path for place in range(len(schema))]
    return {place for place, path in enumerate(paths) if path in exact or path.startswith(parts)}


def _add_chunk(pages: ParquetPages, chunk: Chunk, end: int, size: _Size) -> None:
    """Counts a column of a row group, and pages behind it up to `end`."""
    size.add(chunk.values * _CELL_BYTES)
    size.add(pages.unpacked_bytes(chunk.start, chunk.end))
    try:
        size.add(pages.unpacked_bytes(chunk.end, end))
    except PackedError:
        pass  # the next column's


class _Size:
    """Bytes that a body unpacks to."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = 0

    def add(self, count: int) -> None:
        """Adds bytes. Raises UnpackedSizeError: they are too many."""
        self._bytes += count
        if self._bytes > self._most:
            raise UnpackedSizeError(
                f"the body unpacks to more than {self._most} bytes. Send fewer rows at once, or use "
                f"--frame-max-unpacked-size to increase the limit."
            )


def _kept(schema: Any, wants: Callable[[str], bool]) -> list[int]:
    """Places of the wanted columns. Raises FrameError: there are two of a name, or one has no usable type."""
    names = schema.names
    kept = [place for place, name in enumerate(names) if wants(name) and not _is_index(name)]
    if len({names[place] for place in kept}) < len(kept):
        raise FrameError("", None, "it has a column name twice")
    for place in kept:
        kind = schema.field(place).type
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (_is_plain(plain) or _is_text(plain)):
            raise FrameError(names[place], None, f"its Arrow type is {kind}, which no model takes: cast it")
    return kept


def _is_index(name: str) -> bool:
    """True for an index of pandas, which is no column."""
    return name.startswith("__index_level_")


def _table(table: Any, names: Sequence[str], size: _Size, wants: Callable[[str], bool]) -> Table:
    columns: dict[str, Any] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if not wants(name) or _is_index(name):
            continue
        for chunk in column.chunks:
            size.add(_text_bytes(chunk))
        columns[name] = column
    return Table(columns, others=tuple(name for name in names if name not in columns))


def _text_bytes(chunk: Any) -> int:
    """Bytes of a chunk's texts, where its buffers do not have each row's."""
    kind = chunk.type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return int(_view_lengths(chunk)[np.asarray(chunk.is_valid())].sum())
    if not pa.types.is_dictionary(kind) or not _is_text(kind.value_type):
        return 0
    values = chunk.dictionary
    if pa.types.is_string_view(values.type) or pa.types.is_binary_view(values.type):
        lengths = _view_lengths(values)
    else:
        lengths = np.asarray(pc.binary_length(values).fill_null(0)).astype(np.int64)
    codes = np.asarray(chunk.indices.drop_null())
    return int(lengths[codes].sum()) if len(lengths) else 0


def _view_lengths(texts: Any) -> Array:
    """Lengths of views of texts; their buffer may be longer than they are."""
    if not len(texts):
        return np.zeros(0, np.int64)
    numbers = np.frombuffer(texts.buffers()[1], np.int32, (texts.offset + len(texts)) * _VIEW)
    return numbers[texts.offset * _VIEW :: _VIEW].astype(np.int64)


def _is_plain(kind: Any) -> bool:
    types = pa.types
    tests = (
        types.is_null,
        types.is_boolean,
        types.is_integer,
        types.is_floating,
        types.is_date,
        types.is_timestamp,
    )
    return any(test(kind) for test in tests)


def _is_text(kind: Any) -> bool:
    types = pa.types
    tests = (types.is_string, types.is_large_string, types.is_string_view)
    return any(test(kind) for test in (*tests, types.is_binary, types.is_large_binary, types.is_binary_view))


def arrow_stream(columns: Mapping[str, Array]) -> bytes:
    """Columns as an Arrow stream: `str` as string, `bytes` as binary, numbers as they are."""
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    found: bytes = sink.getvalue().to_pybytes()
    return found
