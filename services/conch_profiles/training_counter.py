"""Counts a training set in pieces, in two passes and bounded memory, for `conch profile`.

The first pass finds the edges of bins, at the deciles of numbers, and the categories; the second counts both.

Threads and locks: none.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from conch.core.tensor import Array
from conch_frames.column import column_of, with_nulls
from conch_frames.column_rules import ColumnRule
from conch_frames.conversion import Table, column_array
from conch_frames.frame_error import FrameError
from conch_profiles.sketches import NumberSketch, TextSketch, value_text
from conch_profiles.training_profile import (
    MOST_BINNED,
    MOST_TEXTS,
    RANKS,
    TrainingColumn,
    TrainingNumbers,
    TrainingProfile,
    TrainingTexts,
)

_DECILES = tuple(each / 10 for each in range(1, 10))
_NUMBERS = (bool, int, float)


class TrainingCounter:
    """Counts a training set.

    Attributes:
        rows: Number of rows.
        left_out: Columns that can't be counted, with the reason.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.left_out: dict[str, str] = {}
        self._columns: dict[str, _ColumnCounter] = {}

    def scan(self, table: Table) -> None:
        """Reads a piece in the first pass."""
        for name, values in table.columns.items():
            if name not in self.left_out:
                # A column of JSON lines may come later: it is null in the rows before.
                counter = self._columns.setdefault(name, _ColumnCounter())
                try:
                    counter.scan(_Piece(name, values, table.texts))
                except FrameError as error:
                    self.left_out[name] = error.reason
                    del self._columns[name]
        self.rows += table.rows

    def count(self, table: Table) -> None:
        """Reads a piece in the second pass."""
        for name, counter in self._columns.items():
            if name in table.columns:
                counter.count(_Piece(name, table.columns[name], table.texts))

    def profile(self) -> TrainingProfile:
        """The profile, after both passes."""
        return TrainingProfile(
            self.rows, {name: each.column(self.rows) for name, each in self._columns.items()}
        )


class _ColumnCounter:
    def __init__(self) -> None:
        self._values = 0
        self._numbers: NumberSketch | None = NumberSketch()
        self._texts: Counter[str] | None = Counter()
        self._frequent = TextSketch()
        self._edges: tuple[float, ...] = ()
        self._binned: tuple[str, ...] = ()
        self._counted: NumberSketch | None = None
        self._counted_texts: TextSketch | None = None

    def scan(self, piece: _Piece) -> None:
        """First pass."""
        self._values += piece.values
        if self._numbers is not None:
            numbers = piece.numbers()
            if numbers is None:
                self._numbers = None
            else:
                self._numbers.add(numbers)
        if piece.are_dates:
            self._texts = None  # a request may write the same date in another way
        if self._texts is None and not piece.may_be_text:
            return  # numbers with many values
        counts = piece.texts()
        if piece.may_be_text:
            self._frequent.add(counts)
        if self._texts is not None:
            self._texts.update(counts)
            if len(self._texts) > MOST_TEXTS:
                self._texts = None

    def count(self, piece: _Piece) -> None:
        """Second pass: of numbers their bins, and of texts with too many values the most frequent ones."""
        if self._numbers is not None:
            if self._counted is None:
                self._edges = tuple(sorted(set(self._numbers.quantiles(_DECILES))))
                self._counted = NumberSketch(self._edges)
            numbers = piece.numbers()
            if numbers is not None:
                self._counted.add(numbers)
        elif self._texts is None:
            if self._counted_texts is None:
                self._binned = tuple(text for text, _ in self._frequent.frequent()[:MOST_BINNED])
                self._counted_texts = TextSketch(self._binned)
            self._counted_texts.add(piece.texts())

    def column(self, rows: int) -> TrainingColumn:
        """The column, after both passes."""
        numbers, texts, nulls = None, None, rows - self._values
        if self._counted is not None and self._values:
            quantiles = tuple(self._counted.quantiles(RANKS))
            counts = tuple(map(int, self._counted.bins))
            numbers = TrainingNumbers(self._edges, counts, self._counted.infinities, quantiles)
            # NaN is a null, whether CSV has it as a text or a dictionary among its values.
            nulls = rows - sum(counts) - self._counted.infinities
        if self._texts:
            if numbers is not None:
                self._texts = Counter({text: n for text, n in self._texts.items() if text.lower() != "nan"})
            texts = TrainingTexts(dict(self._texts.most_common())) if self._texts else None
        elif self._counted_texts is not None:
            *bins, others = map(int, self._counted_texts.bins)
            by_text = Counter(dict(zip(self._binned, bins, strict=True)))
            texts = TrainingTexts(dict(by_text.most_common()), others)
        return TrainingColumn(nulls, numbers, texts)


class _Piece:
    """Some values of a column.

    Args:
        name: The column.
        data: The values, as a table has them.
        are_cells: True if all values are texts that may stand for numbers, as those of CSV.

    Raises:
        FrameError: Values of their type can't be counted.
    """

    def __init__(self, name: str, data: Any, are_cells: bool) -> None:
        self._name = name
        self._data = with_nulls(data)
        self._are_cells = are_cells
        self._column = column = column_of(name, self._data)
        self._present: Array = np.ones(column.rows, np.bool_) if column.nulls is None else ~column.nulls
        if column.codes is None and column.values.dtype.kind == "f":
            self._present &= ~np.isnan(column.values)

    @property
    def values(self) -> int:
        """Values that are not null."""
        return int(self._present.sum())

    @property
    def may_be_text(self) -> bool:
        """True unless its type is one of numbers, booleans or dates."""
        return self._column.values.dtype.kind == "O"

    @property
    def are_dates(self) -> bool:
        """True for a type of dates."""
        return self._column.values.dtype.kind == "M"

    def numbers(self) -> Array | None:
        """The values as floats, NaN for nulls; None if they are no numbers. Dates are seconds since 1970."""
        column = self._column
        if self._are_cells:
            return self._parsed()
        values = column.values
        if values.dtype.kind == "M":
            found = values.astype("datetime64[us]").astype(np.int64) / 1e6
        elif values.dtype.kind in "biuf":
            found = values.astype(np.float64)
        elif column.codes is None and all(type(each) in _NUMBERS for each in values[self._present].tolist()):
            found = np.full(len(values), np.nan)
            found[self._present] = values[self._present].astype(np.float64)
        else:
            return None
        if column.codes is None:
            return np.where(self._present, found, np.nan)
        spread = np.full(column.rows, np.nan)
        spread[self._present] = found[column.codes[self._present].astype(np.intp)]
        return spread

    def _parsed(self) -> Array | None:
        try:
            return column_array(self._data, ColumnRule(self._name, "FP64"), texts=True)
        except FrameError:
            pass
        try:
            return column_array(self._data, ColumnRule(self._name, "FP64", unit="us"), texts=True) / 1e6
        except FrameError:
            return None

    def texts(self) -> Counter[str]:
        """The values that are not null as texts, with their counts."""
        column = self._column
        if column.codes is not None:
            times = np.bincount(column.codes[self._present].astype(np.intp), minlength=len(column.values))
            pairs = list(zip(column.values.tolist(), times.tolist(), strict=True))
        elif column.values.dtype.kind == "O":
            pairs = list(Counter(column.values[self._present].tolist()).items())
        else:
            distinct, found = np.unique(column.values[self._present], return_counts=True)
            pairs = list(zip(distinct.tolist(), found.tolist(), strict=True))
        counts: Counter[str] = Counter()
        for value, count in pairs:
            if count:
                counts[value_text(value)] += count
        return counts
