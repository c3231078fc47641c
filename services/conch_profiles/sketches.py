"""Sketches of a column's values in bounded memory: quantiles of numbers, and frequent texts.

Counts of rows, nulls, infinities, bins and known texts are exact. Quantiles are a t-digest's, and frequent
texts those of a frequent-items sketch: a text with more than 1.4 % of all is always among them.

Threads and locks: none; owners hold a lock, also to read: a quantile compresses its digest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from datasketches import frequent_items_error_type, frequent_strings_sketch, tdigest_double

from conch.core.tensor import Array

MOST_TEXT = 64
"""Characters of a text that are kept; texts that differ behind them are one."""

MOST_ENCODED = 4 * MOST_TEXT
"""Bytes of a text in UTF-8 that hold these characters."""

_COMPRESSION = 200
_LOG_TEXTS = 8
_SLACK = 0.05
_CLOSE = 1e-9
_MOST_STEPS = 60
_EXACT = 2.0**53


def value_text(value: Any) -> str:
    """A category as a text: `10` and `10.0` are one, and `true` is what JSON calls it."""
    if isinstance(value, bytes):
        text = value[:MOST_ENCODED].decode("utf-8", "replace")
    elif isinstance(value, bool | np.bool_):
        text = "true" if value else "false"
    elif isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        text = str(int(value))
    else:
        text = str(value)
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode()  # a lone surrogate is refused by the sketch
    return text[:MOST_TEXT]


class NumberSketch:
    """The numbers of a column.

    Bins compare numbers in single precision: 0.1 of a training set and of an input of FP32 are in one bin.

    Args:
        edges: Upper bounds of all bins but the last, ascending; empty to count no bins.

    Attributes:
        rows: Values, with nulls and infinities.
        nulls: NaN.
        infinities: Infinite values; quantiles and bins are without them.
        bins: Count of each bin.
    """

    def __init__(self, edges: Sequence[float] = ()) -> None:
        self.rows = self.nulls = self.infinities = 0
        with np.errstate(over="ignore"):
            self._edges = np.array(edges, np.float64).astype(np.float32)
        self.bins: Array = np.zeros(len(self._edges) + 1, np.int64)
        self._digest = tdigest_double(_COMPRESSION)

    def add(self, values: Array) -> None:
        """Adds numbers of any dtype, in an array of one dimension."""
        numbers = np.ascontiguousarray(values, np.float64)
        finite = numbers[np.isfinite(numbers)]
        self.rows += len(numbers)
        if len(finite) < len(numbers):
            nulls = int(np.isnan(numbers).sum())
            self.nulls += nulls
            self.infinities += len(numbers) - len(finite) - nulls
        if not len(finite):
            return
        self._digest.update(finite)
        with np.errstate(over="ignore"):
            places = np.searchsorted(self._edges, finite.astype(np.float32))
        self.bins += np.bincount(places, minlength=len(self.bins))

    def merge(self, other: NumberSketch) -> None:
        """Adds what another sketch with the same edges has counted."""
        self.rows += other.rows
        self.nulls += other.nulls
        self.infinities += other.infinities
        self.bins = self.bins + other.bins
        self._digest.merge(other._digest)

    def quantiles(self, ranks: Iterable[float]) -> list[float]:
        """The values at these ranks from 0 to 1; empty without a finite value."""
        if self._digest.is_empty():
            return []
        return [self._quantile(rank) for rank in ranks]

    def _quantile(self, rank: float) -> float:
        """The value at a rank, by bisection of ranks: `get_quantile` alone is off by some percent of ranks.

        ``findings/datasketches-tdigest-quantile.sh`` fails once it no longer is.
        """
        digest = self._digest
        least, most = digest.get_min_value(), digest.get_max_value()
        if rank <= 0 or rank >= 1:
            return float(least if rank <= 0 else most)
        first, last = digest.get_quantile(max(rank - _SLACK, 0)), digest.get_quantile(min(rank + _SLACK, 1))
        low = first = first if digest.get_rank(first) < rank else least
        high = last = last if digest.get_rank(last) >= rank else most
        for _ in range(_MOST_STEPS):
            if high - low <= _CLOSE * max(abs(low), abs(high)):
                break
            middle = low / 2 + high / 2
            if digest.get_rank(middle) < rank:
                low = middle
            else:
                high = middle
        # A value that many rows have is where the search begins, or one of few digits.
        if low == first or high == last:
            return float(first if low == first else last)
        rounded = float(f"{high:.9g}")
        return rounded if low <= rounded <= high else float(high)


class TextSketch:
    """The categories of a column, as texts of `value_text`.

    Args:
        binned: Texts that have a bin each, in their order; one more bin is for all others.
        known: Texts that are not new.

    Attributes:
        rows: Values, with nulls.
        nulls: Their nulls.
        bins: Count of each bin.
        new: Values whose text is not among `known`.
    """

    def __init__(self, binned: Sequence[str] = (), known: Collection[str] = ()) -> None:
        self.rows = self.nulls = self.new = 0
        self._places = {text: place for place, text in enumerate(binned)}
        self._known = known
        self.bins: Array = np.zeros(len(self._places) + 1, np.int64)
        self._texts = frequent_strings_sketch(_LOG_TEXTS)

    def add(self, counts: Mapping[str, int], nulls: int = 0) -> None:
        """Adds texts with their counts."""
        self.nulls += nulls
        self.rows += nulls
        others = len(self._places)
        for text, count in counts.items():
            self.rows += count
            self._texts.update(text, count)
            self.bins[self._places.get(text, others)] += count
            if text not in self._known:
                self.new += count

    def merge(self, other: TextSketch) -> None:
        """Adds what another sketch with the same bins has counted."""
        self.rows += other.rows
        self.nulls += other.nulls
        self.new += other.new
        self.bins = self.bins + other.bins
        self._texts.merge(other._texts)

    def frequent(self) -> list[tuple[str, int]]:
        """Texts with their least possible counts, the most frequent first."""
        found = self._texts.get_frequent_items(frequent_items_error_type.NO_FALSE_NEGATIVES)
        return sorted(((text, low) for text, _, low, _ in found), key=lambda each: (-each[1], each[0]))
