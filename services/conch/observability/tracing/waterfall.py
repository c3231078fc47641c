"""Shows one request with its subrequests in the order of time, as text or as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from conch.observability.tracing.trace_reader import ReadTrace
from conch.observability.tracing.trace_summary import extent, spans

_BAR = 50
_ROW, _LABEL, _CHART, _DURATION, _MARGIN = 20, 260, 640, 110, 10  # pixels
_BAR_SPACE = 4
_COLORS = {
    "": "#64748b",
    "receive": "#0ea5e9",
    "queue": "#f59e0b",
    "input": "#a3e635",
    "infer": "#16a34a",
    "output": "#65a30d",
    "send": "#6366f1",
}


class Row(NamedTuple):
    """One bar.

    Attributes:
        depth: Number of requests it is inside.
        label: Model and version, or the stage.
        stage: The stage; empty for a request.
        start_ns: Since the start of the first request.
        duration_ns: Its length.
    """

    depth: int
    label: str
    stage: str
    start_ns: int
    duration_ns: int


def waterfall(root: ReadTrace) -> list[Row]:
    """The rows of a request: itself, its stages, its subrequests."""
    whole = extent(root)
    return [] if whole is None else list(_rows(root, 0, whole[0]))


def _rows(trace: ReadTrace, depth: int, origin: int) -> Iterator[Row]:
    whole = extent(trace)
    if whole is None:
        return
    label = f"{printable(trace.model)} ({trace.version})"
    yield Row(depth, label, "", whole[0] - origin, whole[1] - whole[0])
    parts: list[tuple[int, Row | ReadTrace]] = [
        (start, Row(depth + 1, name, name, start - origin, end - start)) for name, start, end in spans(trace)
    ]
    parts += [(span[0], child) for child in trace.children if (span := extent(child)) is not None]
    parts.sort(key=lambda part: part[0])
    for _, part in parts:
        if isinstance(part, Row):
            yield part
        else:
            yield from _rows(part, depth + 1, origin)


def printable(text: str) -> str:
    """A text of a client, safe for terminals and XML."""
    return "".join(character if character.isprintable() else "?" for character in text)


def title(root: ReadTrace) -> str:
    """The heading of a waterfall, one line."""
    request = f", request id {printable(root.request_id)}" if root.request_id else ""
    return f"trace {root.number} of {printable(root.model)} ({root.version}){request}"


def as_text(rows: list[Row]) -> str:
    """Bars of characters, with start and length in microseconds."""
    origin, scale = _scale(rows, _BAR)
    width = max((2 * row.depth + len(row.label) for row in rows), default=0)
    lines = []
    for row in rows:
        start = min(int((row.start_ns - origin) * scale), _BAR - 1)
        length = min(max(round(row.duration_ns * scale), 1), _BAR - start)
        bar = " " * start + ("-" if row.stage else "=") * length
        label = "  " * row.depth + row.label
        numbers = f"{row.start_ns / 1000:>12.1f} {row.duration_ns / 1000:>12.1f}"
        lines.append(f"{label:<{width}} |{bar:<{_BAR}}|{numbers}")
    return "\n".join([f"{'':<{width}}  {'':<{_BAR}} {'start us':>12} {'length us':>12}", *lines])


def as_svg(rows: list[Row], heading: str) -> str:
    """A picture of its own, without scripts or fonts from elsewhere."""
    origin, scale = _scale(rows, _CHART)
    width = 2 * _MARGIN + _LABEL + _CHART + _DURATION
    height = 2 * _MARGIN + _ROW * (len(rows) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_MARGIN}" y="{_MARGIN + 14}" font-weight="bold">{escape(heading)}</text>',
    ]
    for number, row in enumerate(rows, start=1):
        top = _MARGIN + _ROW * number
        left = _MARGIN + _LABEL + (row.start_ns - origin) * scale
        length = max(row.duration_ns * scale, 1.0)
        text, duration = escape(row.label), f"{row.duration_ns / 1000:.1f} us"
        parts += [
            f'<text x="{_MARGIN + 14 * row.depth}" y="{top + 14}">{text}</text>',
            f'<rect x="{left:.1f}" y="{top + _BAR_SPACE / 2:.0f}" width="{length:.1f}" '
            f'height="{_ROW - _BAR_SPACE}" fill="{_COLORS[row.stage]}">'
            f"<title>{text}: {duration} from {row.start_ns / 1000:.1f} us</title></rect>",
            f'<text x="{width - _MARGIN}" y="{top + 14}" text-anchor="end">{duration}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _scale(rows: list[Row], width: int) -> tuple[int, float]:
    """The first start, and units of width for each nanosecond."""
    origin = min((row.start_ns for row in rows), default=0)
    end = max((row.start_ns + row.duration_ns for row in rows), default=0)
    return origin, width / max(end - origin, 1)
