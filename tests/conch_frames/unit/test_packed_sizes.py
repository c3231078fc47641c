"""Bodies of few bytes that unpack to many, or that take long to look through."""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch_frames.arrow_tables import UnpackedSizeError, arrow_table, parquet_table
from conch_frames.packed_sizes import PackedError, ParquetPages, parquet_chunks

EMPTY_PAGE = bytes.fromhex("1500 1500 1500 00")
"""Header of a page of type 0, with sizes of 0."""


def zeros(column: str) -> bytes:
    """A Parquet file of some kilobytes that is eight megabytes of numbers."""
    sink = io.BytesIO()
    pq.write_table(pa.table({column: np.zeros(1_000_000)}), sink, compression="zstd", use_dictionary=False)
    return sink.getvalue()


def test_a_parquet_column_counts_whatever_name_its_pages_have() -> None:
    """pyarrow finds pages by the place of a column in its schema."""
    body = zeros("agesages")
    (length,) = struct.unpack("<I", body[-8:-4])
    schema = body.index(b"agesages", len(body) - 8 - length)
    renamed = body[:schema] + b"incoming" + body[schema + 8 :]
    for each in (body, renamed):
        with pytest.raises(UnpackedSizeError):
            parquet_table(each, 7_000_000)
    assert parquet_table(renamed, 20_000_000).columns.keys() == {"incoming"}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        # Field 65538, which is field 2 in 16 bits: the size that pyarrow allocates.
        ("1500 1500 1500 05 848008 feffffff0f 00", "a number that is too long"),
        # A size of 33 bits, of which pyarrow takes 32.
        ("1500 1500 15 8080808010 00", "a number that is too long"),
        ("1500 1500 00", "a page has no size"),
        ("49" + "19" * 5000, "nested too deep"),
        ("49 f5ffff03", "a list is longer than the file"),
        ("48 ffff03", "a struct is cut off"),
    ],
)
def test_a_page_that_pyarrow_would_read_in_another_way_is_refused(header: str, reason: str) -> None:
    body = memoryview(bytes.fromhex(header))
    with pytest.raises(PackedError, match=reason):
        ParquetPages(body).unpacked_bytes(0, len(body))


def test_a_column_that_says_it_has_no_values_counts() -> None:
    """pyarrow reads its pages all the same, where its row group has rows."""
    body = io.BytesIO()
    pq.write_table(pa.table({"x": np.zeros(100_000)}), body, use_dictionary=False, write_statistics=False)
    content, count = bytearray(body.getvalue()), b"\xc0\x9a\x0c"  # 100,000 as a zigzag varint
    values = content.index(count, content.index(count) + len(count))  # behind that of the file
    content[values : values + len(count)] = b"\x80\x80\x00"
    metadata = pq.ParquetFile(io.BytesIO(content)).metadata.row_group(0)
    assert (metadata.num_rows, metadata.column(0).num_values) == (100_000, 0)
    with pytest.raises(UnpackedSizeError):
        parquet_table(bytes(content), 100_000)


def test_lists_in_a_footer_are_no_deeper_than_structs() -> None:
    footer = bytes.fromhex("49" + "19" * 5000)
    with pytest.raises(PackedError, match="nested too deep"):
        parquet_chunks(memoryview(b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1"))


def test_columns_in_one_place_share_the_bound_of_page_headers() -> None:
    body = memoryview(EMPTY_PAGE * 60_000)
    pages = ParquetPages(body)
    assert pages.unpacked_bytes(0, len(body)) == 0
    with pytest.raises(PackedError, match="headers of its pages are too long"):
        for _ in range(100):
            pages.unpacked_bytes(0, len(body))


def test_each_batch_of_an_arrow_stream_counts_its_dictionary() -> None:
    """Each is validated, and merged with the others, by the time that its dictionary takes."""
    texts = pa.array([f"{number:06}" for number in range(20_000)])
    batch = pa.record_batch({"town": pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), texts)})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(100):
            writer.write_batch(batch)
    assert len(sink.getvalue()) < 300_000
    with pytest.raises(UnpackedSizeError):
        arrow_table(sink.getvalue(), 10_000_000)
    assert arrow_table(sink.getvalue(), 30_000_000).rows == 100


@pytest.mark.parametrize("opened", [pa.ipc.new_stream, pa.ipc.new_file])
def test_a_batch_without_rows_counts(opened: Any) -> None:
    batch = pa.record_batch({"age": pa.array([], pa.int8())})
    sink = io.BytesIO()
    with opened(sink, batch.schema) as writer:
        for _ in range(1000):
            writer.write_batch(batch)
    with pytest.raises(UnpackedSizeError):
        arrow_table(sink.getvalue(), 1_000_000)
    assert arrow_table(sink.getvalue(), 2_000_000).rows == 0


PARQUET = io.BytesIO()
pq.write_table(pa.table({"age": [1, None], "town": ["Ulm", "a longer name"]}), PARQUET)
DAMAGE = st.lists(
    st.tuples(st.integers(0, 700), st.sampled_from([0, 1, 127, 128, 255])), min_size=1, max_size=4
)


@given(DAMAGE)
def test_a_damaged_footer_is_read_or_refused(damage: list[tuple[int, int]]) -> None:
    body = bytearray(PARQUET.getvalue())
    for place, value in damage:
        body[-1 - place % len(body)] = value
    with suppress(PackedError):
        parquet_chunks(memoryview(body))
