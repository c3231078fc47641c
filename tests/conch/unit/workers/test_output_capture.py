"""A worker's output: its lines in the log, and the part that is kept."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tests.support.clocks import Clock

from conch.workers.supervision.output_capture import Lines, Tail

S = 1_000_000_000


def _cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [piece for piece in (*pieces, data) if piece]


@given(st.binary(max_size=300), st.lists(st.integers(1, 40), max_size=20))
def test_lines_do_not_depend_on_how_they_come(data: bytes, sizes: list[int]) -> None:
    lines = Lines(Clock(), per_second=10_000, longest=1_000)
    found = [line for piece in _cut(data, sizes) for line in lines.feed(piece)] + list(lines.end())
    wanted = [line.decode(errors="replace").rstrip() for line in data.split(b"\n")]
    assert found == [line for line in wanted if line]


@given(st.binary(max_size=300), st.lists(st.integers(1, 40), max_size=20), st.integers(1, 5))
def test_within_a_second_no_more_than_the_limit(data: bytes, sizes: list[int], most: int) -> None:
    lines = Lines(Clock(), per_second=most, longest=10)
    found = [line for piece in _cut(data, sizes) for line in lines.feed(piece)] + list(lines.end())
    assert len(found) <= most + 1
    assert all(len(line) <= 100 for line in found)


def test_lines_left_out_are_counted_in_the_next_second() -> None:
    clock = Clock()
    lines = Lines(clock, per_second=2)
    assert list(lines.feed(b"1\n2\n3\n4\n5")) == ["1", "2"]
    clock.now = 2 * S
    found = list(lines.feed(b"0\n6\n"))
    assert found[0].startswith("(2 more lines are left out")
    assert found[1:] == ["50", "6"]


def test_long_lines_are_cut() -> None:
    lines = Lines(Clock(), longest=4)
    assert list(lines.feed(b"123")) == []
    assert list(lines.feed(b"45678\n1234\n")) == ["1234 ... (4 more bytes)", "1234"]


@given(st.lists(st.binary(max_size=50), max_size=30), st.integers(1, 64))
def test_tail_is_the_end(pieces: list[bytes], most: int) -> None:
    tail = Tail(most)
    for piece in pieces:
        tail.add(piece)
    whole = b"".join(pieces)
    assert len(tail.text()) <= most
    assert whole.decode(errors="replace").endswith(tail.text()) or not whole.isascii()


@given(st.lists(st.sampled_from([b"\n", b" \n", b"\t\r\n", b"a\n", b"b"]), min_size=1, max_size=40))
def test_blank_lines_are_not_logged(pieces: list[bytes]) -> None:
    lines = Lines(Clock(), per_second=3)
    found = [line for piece in pieces for line in lines.feed(piece)] + list(lines.end())
    wanted = [line.rstrip() for line in b"".join(pieces).decode().split("\n") if line.strip()]
    assert found[:3] == wanted[:3]
    assert len(found) <= 4


@pytest.mark.parametrize("blank", [b"\n", b" \n", b"\r\n"])
def test_blank_lines_are_not_looked_at_one_by_one(blank: bytes) -> None:
    ended = 0

    class Counted(Lines):
        def _end(self) -> Iterator[str]:
            nonlocal ended
            ended += 1
            return super()._end()

    lines = Counted(Clock(), per_second=10)
    for _ in range(16):
        assert list(lines.feed(blank * 10_000)) == []
    assert ended <= 10 * 16
    assert list(lines.feed(b"x\n")) == ["x"]
