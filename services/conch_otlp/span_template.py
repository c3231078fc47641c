"""`SpanTemplate`: spans that differ in ids and times only, as bytes with places for these.

A template makes one such message, with a mark in each place, and serializes it once; each span is then one
formatting of bytes, where building the message costs ten times as much. What only few spans have is appended
to the bytes: protobuf merges messages that follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from opentelemetry.proto.trace.v1.trace_pb2 import Span

TRACE_ID, SPAN_ID, PARENT_ID, TIMES = range(4)
"""Places among the values of a span; times, little-endian in eight bytes, follow from `TIMES` on."""

_MARK = b"\xff\xfe\xff\xfe\xff\xfe"
"""Begins each mark; no UTF-8 has these bytes, so that no text looks like a mark."""


class SpanTemplate:
    """Makes spans of one kind.

    Args:
        span: A span without ids and times, but with its events.
        start: Place of the start among the times; None for a span without times.
        end: Place of the end.
        events: Places of the events.
        has_parent: True if there is a parent.
    """

    __slots__ = ("_format", "_pick")

    def __init__(
        self, span: Span, start: int | None, end: int, events: Sequence[int], has_parent: bool
    ) -> None:
        marks: dict[bytes, int] = {}

        def mark(place: int) -> bytes:
            made = _MARK + len(marks).to_bytes(2, "big")
            marks[made] = place
            return made

        def time(place: int) -> int:
            # Times are fixed64, which protobuf serializes as these eight bytes.
            return int.from_bytes(mark(TIMES + place), "little")

        marked = Span()
        marked.CopyFrom(span)
        marked.trace_id = mark(TRACE_ID)
        marked.trace_id += bytes(8)  # it has 16 bytes, a mark has eight
        marked.span_id = mark(SPAN_ID)
        if has_parent:
            marked.parent_span_id = mark(PARENT_ID)
        if start is not None:
            marked.start_time_unix_nano = time(start)
            marked.end_time_unix_nano = time(end)
        for event, place in zip(marked.events, events, strict=True):
            event.time_unix_nano = time(place)
        text = marked.SerializeToString()
        found = sorted((text.index(made), len(made), place) for made, place in marks.items())
        pieces, places, done = [], [], 0
        for index, length, place in found:
            pieces.append(text[done:index].replace(b"%", b"%%"))
            places.append(place)
            done = index + (2 * length if place == TRACE_ID else length)
        self._format = b"%b".join([*pieces, text[done:].replace(b"%", b"%%")])
        self._pick = itemgetter(*places)

    def __call__(self, values: Sequence[bytes]) -> bytes:
        """The bytes of a span with these ids and times."""
        made: bytes = self._format % self._pick(values)
        return made
