"""The profile of one column: its values in two windows, beside those of the training set.

A column has numbers, or categories where its input has texts or booleans or its rule lists categories. Dates
in a unit are numbers of seconds, as in a training set's profile. The codes of categories count as the
categories that they stand for.

Threads and locks: none; `InputProfile` holds its lock around each call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from conch.core.tensor import NUMPY_DTYPES, Array
from conch_frames.column_rules import ColumnRule
from conch_profiles.sketches import MOST_ENCODED, NumberSketch, TextSketch, value_text
from conch_profiles.training_profile import RANKS, TrainingColumn, TrainingNumbers, TrainingTexts, psi

LEAST_ROWS = 500
"""Rows without which there is no PSI: of 10 bins it would be above 0.02 by chance."""

MOST_SHOWN = 10
"""Categories that are listed."""

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

SketchT = TypeVar("SketchT", NumberSketch, TextSketch)


class ColumnProfile(ABC, Generic[SketchT]):
    """One column.

    Attributes:
        name: Its name.
        kind: ``number`` or ``category``.
        note: Reason for which it is not compared with the training set; empty if it is, or there is none.
    """

    kind: str

    def __init__(self, name: str, note: str) -> None:
        self.name = name
        self.note = note
        self._now: SketchT = self._empty()
        self._before: SketchT | None = None

    @abstractmethod
    def _empty(self) -> SketchT:
        """A sketch without values."""

    @abstractmethod
    def add(self, values: Array) -> int:
        """Adds values: an array of one dimension, for texts of objects. Returns their number."""

    def turn(self) -> None:
        """Begins a window; the one before the present one is forgotten."""
        self._now, self._before = self._empty(), self._now

    @property
    def rows(self) -> int:
        """Values in both windows, with nulls."""
        return self._now.rows + (0 if self._before is None else self._before.rows)

    @property
    def nulls(self) -> int:
        """Nulls in both windows."""
        return self._now.nulls + (0 if self._before is None else self._before.nulls)

    @property
    def bins(self) -> list[int]:
        """Count of each bin, then those that are in no bin: nulls, and infinities of numbers."""
        found: Array = self._now.bins if self._before is None else self._now.bins + self._before.bins
        return [*map(int, found), self.nulls]

    @property
    @abstractmethod
    def expected(self) -> list[int] | None:
        """Counts of the training set in the same bins; None if it can't be compared."""

    @property
    def psi(self) -> float | None:
        """The population stability index; None without enough rows, or a training set to compare with."""
        expected = self.expected
        if expected is None or self.rows < LEAST_ROWS or not sum(expected):
            return None
        return psi(expected, self.bins)

    def _too_few(self) -> str:
        if self.expected is None or self.rows >= LEAST_ROWS:
            return ""
        return f"PSI needs {LEAST_ROWS} rows, and {self.rows} were counted"

    @property
    def new(self) -> float | None:
        """Share of values whose category the training set has not; None if that can't be told."""
        return None

    def as_object(self) -> dict[str, Any]:
        """The column as JSON."""
        rows = self.rows
        found: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "rows": rows,
            "nulls": self.nulls,
            "psi": self.psi,
            "note": self.note or self._too_few(),
        }
        sketch = self._now
        if self._before is not None:
            sketch = self._empty()
            sketch.merge(self._before)
            sketch.merge(self._now)
        return found | self._described(sketch)

    @abstractmethod
    def _described(self, sketch: SketchT) -> dict[str, Any]:
        """Further members, of a sketch of both windows."""

    def _bins(self, labels: Iterable[Any]) -> list[dict[str, Any]]:
        """Shares of all bins; without a training set none."""
        expected, found = self.expected, self.bins
        if expected is None:
            return []
        all_expected, all_found = max(sum(expected), 1), max(sum(found), 1)
        return [
            {**label, "training": before / all_expected, "requests": now / all_found}
            for label, before, now in zip(labels, expected, found, strict=True)
            if before or now or "upto" in label
        ]


class NumberProfile(ColumnProfile[NumberSketch]):
    """A column of numbers; `scale` divides them, and bins round as FP16 where the input is that."""

    kind = "number"

    def __init__(
        self, name: str, dtype: np.dtype[Any], scale: int, training: TrainingColumn | None, note: str = ""
    ) -> None:
        self._is_half = dtype == np.float16
        self._scale = scale
        self._nulls = 0 if training is None else training.nulls
        self._training: TrainingNumbers | None = None if training is None else training.numbers
        if training is not None and training.numbers is None:
            note = "the training set has no numbers here"
        super().__init__(name, note)

    def _empty(self) -> NumberSketch:
        edges = () if self._training is None else self._training.edges
        if not self._is_half:
            return NumberSketch(edges)
        with np.errstate(over="ignore"):
            return NumberSketch(np.array(edges).astype(np.float16).tolist())

    def add(self, values: Array) -> int:
        """Adds numbers."""
        self._now.add(values if self._scale == 1 else values / self._scale)
        return len(values)

    @property
    def infinities(self) -> int:
        """Infinite values in both windows."""
        return self._now.infinities + (0 if self._before is None else self._before.infinities)

    @property
    def bins(self) -> list[int]:
        """Count of each bin, of nulls, and of infinities."""
        return [*super().bins, self.infinities]

    @property
    def expected(self) -> list[int] | None:
        """Counts of the training set."""
        training = self._training
        return None if training is None else [*training.counts, self._nulls, training.infinities]

    def _described(self, sketch: NumberSketch) -> dict[str, Any]:
        training = self._training
        edges = () if training is None else training.edges
        labels = [*({"upto": edge} for edge in edges), {"upto": None}, {"is": "null"}, {"is": "infinite"}]
        return {
            "infinite": sketch.infinities,
            "quantiles": _by_rank(sketch.quantiles(RANKS)),
            "training_quantiles": {} if training is None else _by_rank(training.quantiles),
            "bins": self._bins(labels),
        }


class CategoryProfile(ColumnProfile[TextSketch]):
    """A column of categories.

    Args:
        name: Its name.
        rule: Its rule.
        training: The column of the training set; None without one.
        note: See `ColumnProfile`.
    """

    kind = "category"

    def __init__(self, name: str, rule: ColumnRule, training: TrainingColumn | None, note: str = "") -> None:
        self._is_text = rule.datatype == "BYTES"
        self._null = None if rule.null is None else rule.null.encode()[:MOST_ENCODED]
        self._names = [value_text(each) for each in rule.categories or ()] if rule.codes else None
        self._nulls = 0 if training is None else training.nulls
        texts = None if training is None else training.texts
        self._training = None if texts is None else _alike(texts, rule)
        self._known = frozenset(() if self._training is None else self._training.counts)
        if training is not None and texts is None:
            note = "the training set has no categories here, or too many"
        super().__init__(name, note)

    def _empty(self) -> TextSketch:
        return TextSketch(() if self._training is None else self._training.binned, self._known)

    def add(self, values: Array) -> int:
        """Adds texts, as bytes or `str`, or numbers."""
        counts: Counter[str] = Counter()
        rows, nulls = len(values), 0
        if self._is_text:
            found = Counter(values.tolist())
            if self._null is not None:
                nulls = found.pop(self._null, 0) + found.pop(self._null.decode("utf-8", "ignore"), 0)
            for value, count in found.items():
                counts[value_text(value)] += count
        else:
            if values.dtype.kind == "f":
                missing = np.isnan(values)
                nulls = int(missing.sum())
                values = values[~missing]
            distinct, times = np.unique(values, return_counts=True)
            if values.dtype in (np.float32, np.float16):  # 0.1 is a category, not 0.10000000149
                distinct = np.array([float(str(each)) for each in distinct])
            for value, count in zip(distinct.tolist(), times.tolist(), strict=True):
                counts[self._text(value)] += count
        self._now.add(counts, nulls)
        return rows

    def _text(self, value: Any) -> str:
        names = self._names
        if names is None:
            return value_text(value)
        return names[int(value)] if 0 <= value < len(names) and value == int(value) else f"code {value:g}"

    @property
    def expected(self) -> list[int] | None:
        """Counts of the training set."""
        return None if self._training is None else [*self._training.bins, self._nulls]

    @property
    def new(self) -> float | None:
        """Share of values, without nulls, whose category the training set has not."""
        if self._training is None or self._training.others:
            return None
        count = self._now.new + (0 if self._before is None else self._before.new)
        return count / max(self.rows - self.nulls, 1)

    def _described(self, sketch: TextSketch) -> dict[str, Any]:
        frequent, rows = sketch.frequent(), max(sketch.rows, 1)
        binned = () if self._training is None else self._training.binned
        labels = [*({"value": text} for text in binned), {"is": "other"}, {"is": "null"}]
        new = self.new
        return {
            "top": [{"value": text, "share": count / rows} for text, count in frequent[:MOST_SHOWN]],
            "new": new,
            "new_values": []
            if new is None
            else [text for text, _ in frequent if text not in self._known][:MOST_SHOWN],
            "bins": self._bins(labels),
        }


def column_profile(
    rule: ColumnRule, training: TrainingColumn | None, is_compared: bool
) -> NumberProfile | CategoryProfile | None:
    """The profile of a column.

    Args:
        rule: Its rule.
        training: The column of the training set; None if that has none.
        is_compared: True if there is a training set.

    Returns:
        None if its datatype has no values that can be counted.
    """
    note = "the training set has no such column" if is_compared and training is None else ""
    if rule.is_binary:
        return None
    if rule.datatype in ("BYTES", "BOOL") or (rule.categories is not None and rule.datatype in NUMPY_DTYPES):
        return CategoryProfile(rule.name, rule, training, note)
    if rule.datatype not in NUMPY_DTYPES:
        return None
    dtype = NUMPY_DTYPES[rule.datatype]
    return NumberProfile(rule.name, dtype, _PER_SECOND.get(rule.unit, 1), training, note)


def _alike(texts: TrainingTexts, rule: ColumnRule) -> TrainingTexts:
    """The training set's categories as texts of the input's values: of CSV they are as written there."""
    if rule.datatype == "BYTES" or (rule.categories is not None and isinstance(rule.categories[0], str)):
        return texts
    counts: Counter[str] = Counter()
    for text, count in texts.counts.items():
        counts[_written_alike(text, rule.datatype)] += count
    return TrainingTexts(dict(counts.most_common()), texts.others)


def _written_alike(text: str, datatype: str) -> str:
    if datatype == "BOOL":
        lower = text.lower()
        return {"1": "true", "0": "false"}.get(lower, lower)
    dtype = NUMPY_DTYPES[datatype]
    try:
        if dtype.kind != "f":
            return value_text(_whole(text))
        with np.errstate(over="ignore"):
            return value_text(float(str(dtype.type(float(text)))))  # the digits that a request's value has
    except ValueError:
        return text


def _whole(text: str) -> int | float:
    try:
        return int(text)  # a float loses digits behind 2^53
    except ValueError:
        return float(text)


def _by_rank(values: Iterable[float]) -> Mapping[str, float]:
    """Quantiles by rank as a text; none without values."""
    return {f"{rank:g}": value for rank, value in zip(RANKS, values, strict=False)}


def first_texts(data: bytes | memoryview, most: int) -> list[bytes]:
    """The first elements of a BYTES tensor in wire form, cut to `MOST_ENCODED` bytes.

    The data may end within an element, which counts if that much of it is there.
    """
    view, start = memoryview(data), 0
    found: list[bytes] = []
    while len(found) < most and start + 4 <= len(view):
        end = start + 4 + int.from_bytes(view[start : start + 4], "little")
        enough = min(end, start + 4 + MOST_ENCODED)
        if enough > len(view):
            break
        found.append(bytes(view[start + 4 : enough]))
        start = end
    return found


def spread(array: Array, most: int) -> Array:
    """Some rows of an array, as far from each other as possible."""
    step = -(-len(array) // most) if len(array) else 1
    return array[::step]
