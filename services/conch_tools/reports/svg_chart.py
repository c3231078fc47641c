"""Charts as SVG: lines, points, bars, boxes and cells on linear, log and percentile axes.

Colours are classes (``series-0`` to ``series-5``) that `html_page` gives values for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

SERIES = 6
"""Colours; a chart with more series repeats them with dashes, then with dots."""

_PATTERNS = ("", " dashed", " dotted")
_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 34, 48
_LETTER = 7  # width of a letter, a little more than that of most
_SLANT = math.sqrt(0.5)  # of names that are turned by 45 degrees
_LEGEND = 18  # height of a row of legends
_LEGEND_GAP = 34  # in a row of legends: the square, and what is between two
_LARGEST_SHARE = 0.99999
_SHARES = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)

Pair = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis.

    Attributes:
        scale: ``percentile`` takes shares and gives each 9 of p90, p99, p99.9 the same length.
        ticks: Values and their texts; chosen from the range if empty.
    """

    label: str
    low: float
    high: float
    scale: Literal["linear", "log", "percentile"] = "linear"
    ticks: tuple[tuple[float, str], ...] = ()

    @classmethod
    def over(
        cls, label: str, values: Iterable[float], scale: Literal["linear", "log", "percentile"] = "linear"
    ) -> Axis:
        """An axis that fits values; a linear one starts at 0."""
        found = [value for value in values if math.isfinite(value) and (scale != "log" or value > 0)]
        if scale == "percentile":
            return cls(label, 0.0, max(found, default=0.9), scale)
        if scale == "log":
            low, high = min(found, default=1.0), max(found, default=10.0)
            return cls(label, low / 1.1, high * 1.1, scale)
        return cls(label, min([0.0, *found]), max(found, default=1.0) * 1.05 or 1.0, scale)

    @classmethod
    def of_names(cls, label: str, names: Sequence[str]) -> Axis:
        """An axis of categories; name i has its middle at i."""
        ticks = tuple((float(index), name) for index, name in enumerate(names))
        return cls(label, -0.5, max(len(names), 1) - 0.5, "linear", ticks)

    def place(self, value: float) -> float:
        """Position of a value, from 0 to 1; outside values are at the ends."""
        low, high, here = self._raw(self.low), self._raw(self.high), self._raw(value)
        return min(max((here - low) / (high - low), 0.0), 1.0) if high > low else 0.5

    def marks(self) -> list[tuple[float, str]]:
        """Ticks with their texts."""
        if self.ticks:
            return list(self.ticks)
        if self.scale == "percentile":
            return [(share, f"p{share * 100:g}") for share in _SHARES if share <= self.high]
        if self.scale == "log":
            return self._log_marks()
        return self._linear_marks()

    def _raw(self, value: float) -> float:
        if self.scale == "log":
            return math.log10(max(value, 1e-12))
        if self.scale == "percentile":
            return -math.log10(1 - min(max(value, 0.0), _LARGEST_SHARE))
        return value

    def _log_marks(self) -> list[tuple[float, str]]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        wide = last - first > 3
        values = [
            10.0**power * step for power in range(first, last + 1) for step in ((1,) if wide else (1, 2, 5))
        ]
        return [(value, short(value)) for value in values if self.low <= value <= self.high]

    def _linear_marks(self) -> list[tuple[float, str]]:
        span = self.high - self.low
        if span <= 0:
            return [(self.low, short(self.low))]
        power = 10.0 ** math.floor(math.log10(span / 5))
        step = next(power * step for step in (1, 2, 5, 10) if span / (power * step) <= 6)
        first = math.ceil(self.low / step)
        count = int((self.high - first * step) / step + 1e-9) + 1
        return [((first + index) * step, short((first + index) * step)) for index in range(count)]


class Chart:
    """One chart; each method adds a mark, in the order in which they are drawn."""

    def __init__(self, title: str, x: Axis, y: Axis) -> None:
        self._title, self._x, self._y = title, x, y
        self._marks: list[str] = []
        self._names: dict[int, str] = {}

    def line(self, points: Sequence[Pair], series: int = 0, name: str = "") -> None:
        """A line through points."""
        self._legend(series, name)
        path = " ".join(f"{self._across(x):.1f},{self._down(y):.1f}" for x, y in points)
        self._marks.append(f'<polyline class="line {_colour(series)}" points="{path}"/>')

    def points(self, points: Sequence[Pair], series: int = 0, names: Sequence[str] = ()) -> None:
        """A dot at each point, with a name shown on hover."""
        for index, (x, y) in enumerate(points):
            title = f"<title>{escape(names[index])}</title>" if index < len(names) else ""
            self._marks.append(
                f'<circle class="fill {_colour(series)}" cx="{self._across(x):.1f}" cy="{self._down(y):.1f}" '
                f'r="3.5">{title}</circle>'
            )

    def bar(self, x: float, low: float, high: float, series: int = 0, name: str = "") -> None:
        """A bar from ``low`` to ``high`` around ``x``; stacked bars follow each other."""
        self._legend(series, name)
        self._rectangle(x - 0.3, x + 0.3, low, high, f'class="fill {_colour(series)}"')

    def box(self, x: float, five: tuple[float, float, float, float, float], series: int = 0) -> None:
        """A box from the second to the fourth value with the third as a line, whiskers to the others."""
        lowest, low, middle, high, highest = five
        self.line([(x, lowest), (x, highest)], series)
        self._rectangle(x - 0.2, x + 0.2, low, high, f'class="fill {_colour(series)}"')
        self._rule(x - 0.2, middle, x + 0.2, middle, "median")

    def cell(self, x: Pair, y: Pair, share: float) -> None:
        """A cell of a heat map, from nearly clear at 0 to full at 1."""
        self._rectangle(*x, *y, f'class="fill series-0" fill-opacity="{min(max(share, 0.03), 1):.2f}"')

    def mark(self, x: float, y: float, text: str) -> None:
        """A text at a point, with a line down to the axis."""
        self._rule(x, self._y.low, x, y, "grid")
        anchor = "end" if self._x.place(x) > 0.6 else "start"
        self._marks.append(f'<g class="halo">{_text(self._across(x), self._down(y) - 8, text, anchor)}</g>')

    def svg(self) -> str:
        """The whole chart; rows of legends and turned names make it higher."""
        legends, above = self._legends()
        names, below = self._names_across()
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT + above + below}" '
            f'role="img" aria-label="{escape(self._title)}">',
            *legends,
            f'<g transform="translate(0 {above})">',
            *names,
            *self._axes(below),
            *self._marks,
            "</g>",
            "</svg>",
        ]
        return "\n".join(parts)

    def _names_across(self) -> tuple[list[str], int]:
        """Texts of the x axis with their lines, turned if they are too long; the room they need below."""
        bottom = _HEIGHT - _BOTTOM
        marks = [(self._across(value), text) for value, text in self._x.marks()]
        room = (_WIDTH - _LEFT - _RIGHT) / max(len(marks), 1)
        longest = max((len(text) for _, text in marks), default=0)
        turned = bool(self._x.ticks) and longest * _LETTER > room
        below = 0
        parts = []
        for index, (across, whole) in enumerate(marks):
            parts.append(f'<path class="grid" d="M{across:.1f} {_TOP}V{bottom}"/>')
            if not turned:
                parts.append(_text(across, bottom + 16, whole, "middle"))
            elif index % math.ceil(_LEGEND / room) == 0:
                text = _cut(whole, (marks[0][0] - 4) / _SLANT)
                below = max(below, math.ceil(len(text) * _LETTER * _SLANT) - 12)
                place = f"{across + 4:.1f} {bottom + 14}"
                parts.append(_text(across + 4, bottom + 14, text, "end", f"rotate(-45 {place})"))
        return parts, below

    def _axes(self, below: int) -> list[str]:
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        parts = []
        for value, text in self._y.marks():
            down = self._down(value)
            parts.append(f'<path class="grid" d="M{_LEFT} {down:.1f}H{right}"/>')
            parts.append(_text(_LEFT - 6, down + 4, text, "end"))
        middle = (_LEFT + right) / 2
        parts.append(_text(middle, _HEIGHT - 10 + below, self._x.label, "middle"))
        turned = f"rotate(-90 14 {(_TOP + bottom) / 2})"
        parts.append(
            f'<text transform="{turned}" x="14" y="{(_TOP + bottom) / 2}" text-anchor="middle">'
            f"{escape(self._y.label)}</text>"
        )
        return parts

    def _legends(self) -> tuple[list[str], int]:
        """The legends in rows, and the height of the rows but the first."""
        parts, across, above = [], float(_LEFT), 0
        room = _WIDTH - _RIGHT - _LEFT - _LEGEND_GAP
        for series, whole in self._names.items():
            name = _cut(whole, room)
            length = _LEGEND_GAP + _LETTER * len(name)
            if across > _LEFT and across + length > _WIDTH:
                across, above = float(_LEFT), above + _LEGEND
            pattern = _colour(series)
            if series < SERIES:
                parts.append(
                    f'<rect class="fill {pattern}" x="{across:.0f}" y="{10 + above}" width="12" height="12"/>'
                )
            else:
                parts.append(f'<path class="line {pattern}" d="M{across:.0f} {16 + above}h14"/>')
            parts.append(_text(across + 16, 20 + above, name, "start"))
            across += length
        return parts, above

    def _legend(self, series: int, name: str) -> None:
        if name:
            self._names.setdefault(series, name)

    def _rectangle(self, x0: float, x1: float, y0: float, y1: float, style: str) -> None:
        left, right = self._across(x0), self._across(x1)
        top, bottom = self._down(y1), self._down(y0)
        self._marks.append(
            f'<rect {style} x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 0.5):.1f}" '
            f'height="{max(bottom - top, 0):.1f}"/>'
        )

    def _rule(self, x0: float, y0: float, x1: float, y1: float, style: str) -> None:
        start = f"M{self._across(x0):.1f} {self._down(y0):.1f}"
        self._marks.append(f'<path class="{style}" d="{start}L{self._across(x1):.1f} {self._down(y1):.1f}"/>')

    def _across(self, x: float) -> float:
        return _LEFT + self._x.place(x) * (_WIDTH - _LEFT - _RIGHT)

    def _down(self, y: float) -> float:
        return _HEIGHT - _BOTTOM - self._y.place(y) * (_HEIGHT - _TOP - _BOTTOM)


def short(value: float) -> str:
    """A number with at most 4 digits, with k, M or G."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.4g}"


def _colour(series: int) -> str:
    return f"series-{series % SERIES}{_PATTERNS[series // SERIES % len(_PATTERNS)]}"


def _cut(text: str, room: float) -> str:
    """The text, without its end if it needs more than a width."""
    most = int(room / _LETTER)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _text(x: float, y: float, text: str, anchor: str, transform: str = "") -> str:
    turned = f' transform="{transform}"' if transform else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}>{escape(text)}</text>'
