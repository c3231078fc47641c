"""The profile of a training set: the file ``profile.json`` of a version, and PSI. Pure.

The file has, for each column, what `conch profile` could count: a column of whole numbers with few values is
one of numbers and one of categories, as only the model tells which it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite, log
from pathlib import Path
from typing import Any

import orjson

FILE_NAME = "profile.json"
"""The file in a version's directory."""

FORMAT = 1
"""The number of the format, in the file."""

MOST_TEXTS = 1000
"""Categories of a column that the file has; with more, new ones can't be told."""

MOST_BINNED = 20
"""Categories of a column that PSI compares one by one; others are one bin."""

RANKS = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
"""Ranks of the quantiles that are shown."""

_MOST_BYTES = 64 << 20
_MOST_EDGES = 100
_LEAST_SHARE = 1e-4  # of an empty bin


class TrainingFileError(Exception):
    """A file is no profile of a training set; the text says why."""


@dataclass(frozen=True, slots=True)
class TrainingNumbers:
    """Numbers of a column.

    Attributes:
        edges: Upper bounds of all bins but the last, ascending.
        counts: Count of each bin.
        infinities: Infinite values, which are in no bin.
        quantiles: Values at `RANKS`; empty without a finite value.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    infinities: int = 0
    quantiles: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingTexts:
    """Categories of a column.

    Attributes:
        counts: Count of each text, the most frequent first.
        others: Values that are not among `counts`; 0 if these are all.
    """

    counts: Mapping[str, int]
    others: int = 0

    @property
    def binned(self) -> tuple[str, ...]:
        """The texts that have a bin each."""
        return tuple(self.counts)[:MOST_BINNED]

    @property
    def bins(self) -> list[int]:
        """Count of each bin; the last one has all other texts."""
        counts = list(self.counts.values())
        return [*counts[:MOST_BINNED], sum(counts[MOST_BINNED:]) + self.others]


@dataclass(frozen=True, slots=True)
class TrainingColumn:
    """A column of a training set.

    Attributes:
        nulls: Rows without a value.
        numbers: Its numbers; None if it has other values.
        texts: Its categories; None for numbers with many values.
    """

    nulls: int
    numbers: TrainingNumbers | None = None
    texts: TrainingTexts | None = None


@dataclass(frozen=True, slots=True)
class TrainingProfile:
    """A training set.

    Attributes:
        rows: Number of rows.
        columns: Its columns by name.
    """

    rows: int
    columns: Mapping[str, TrainingColumn] = field(default_factory=dict)

    def text(self) -> str:
        """The file's content."""
        columns = {name: _column_object(each) for name, each in self.columns.items()}
        content = {"format": FORMAT, "rows": self.rows, "columns": columns}
        return orjson.dumps(content, option=orjson.OPT_INDENT_2).decode() + "\n"


def psi(expected: Sequence[int], found: Sequence[int]) -> float:
    """The population stability index of two counts of the same bins; each has a count above 0.

    A bin that one of them has not counts as 0.01 % there; one that neither has is left out.
    """
    all_expected, all_found, total = sum(expected), sum(found), 0.0
    for before, now in zip(expected, found, strict=True):
        if before or now:
            share = max(before / all_expected, _LEAST_SHARE)
            other = max(now / all_found, _LEAST_SHARE)
            total += (other - share) * log(other / share)
    return total


def read_training(path: Path) -> TrainingProfile | None:
    """Reads the file; None if there is none.

    Raises:
        TrainingFileError: It can't be read, or is no profile.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TrainingFileError(f"{FILE_NAME} can't be read: {error.strerror}") from None
    if len(content) > _MOST_BYTES:
        raise TrainingFileError(f"{FILE_NAME} has more than {_MOST_BYTES} bytes")
    try:
        return _profile(orjson.loads(content))
    except orjson.JSONDecodeError as error:
        raise TrainingFileError(f"{FILE_NAME} is no JSON: {error}") from None
    except _MalformedError as error:
        raise TrainingFileError(f"{FILE_NAME}: {error}; write it anew with `conch profile`") from None


def _column_object(column: TrainingColumn) -> dict[str, Any]:
    found: dict[str, Any] = {"nulls": column.nulls}
    if column.numbers is not None:
        numbers = column.numbers
        found["numbers"] = {
            "edges": numbers.edges,
            "counts": numbers.counts,
            "infinities": numbers.infinities,
            "quantiles": numbers.quantiles,
        }
    if column.texts is not None:
        found["categories"] = {"counts": dict(column.texts.counts), "others": column.texts.others}
    return found


class _MalformedError(Exception):
    """A member of the file is not as it must be."""


def _member(value: Any, name: str, kind: type, where: str) -> Any:
    found = value.get(name) if isinstance(value, dict) else None
    if type(found) is not kind:
        raise _MalformedError(f"{where} must have '{name}', {_KINDS[kind]}")
    return found


_KINDS = {int: "a whole number", list: "a list", dict: "an object"}


def _count(value: Any, name: str, where: str) -> int:
    found: int = _member(value, name, int, where)
    if found < 0:
        raise _MalformedError(f"'{name}' of {where} is below 0")
    return found


def _profile(content: Any) -> TrainingProfile:
    if _member(content, "format", int, "the profile") != FORMAT:
        raise _MalformedError(f"its format is {content['format']}, and this server reads {FORMAT}")
    columns = _member(content, "columns", dict, "the profile")
    read = {name: _column(each, f"column '{name}'") for name, each in columns.items()}
    return TrainingProfile(_count(content, "rows", "the profile"), read)


def _column(content: Any, where: str) -> TrainingColumn:
    nulls = _count(content, "nulls", where)
    numbers = _numbers(content["numbers"], where) if "numbers" in content else None
    texts = _texts(content["categories"], where) if "categories" in content else None
    return TrainingColumn(nulls, numbers, texts)


def _numbers(content: Any, where: str) -> TrainingNumbers:
    edges, counts = _member(content, "edges", list, where), _member(content, "counts", list, where)
    quantiles = _member(content, "quantiles", list, where)
    floats = all(type(each) in (int, float) and isfinite(each) for each in (*edges, *quantiles))
    if not floats or len(edges) > _MOST_EDGES or any(low >= high for low, high in pairwise(edges)):
        raise _MalformedError(f"'edges' and 'quantiles' of {where} must be numbers, and edges ascend")
    if len(counts) != len(edges) + 1 or not all(type(each) is int and each >= 0 for each in counts):
        raise _MalformedError(f"'counts' of {where} must be whole numbers, one more than edges")
    if len(quantiles) not in (0, len(RANKS)):
        raise _MalformedError(f"'quantiles' of {where} must be {len(RANKS)} numbers, or none")
    infinities = _count(content, "infinities", where)
    return TrainingNumbers(tuple(map(float, edges)), tuple(counts), infinities, tuple(map(float, quantiles)))


def _texts(content: Any, where: str) -> TrainingTexts:
    counts = _member(content, "counts", dict, where)
    if len(counts) > MOST_TEXTS or not all(type(each) is int and each >= 0 for each in counts.values()):
        raise _MalformedError(f"'counts' of {where} must be whole numbers, of at most {MOST_TEXTS} texts")
    return TrainingTexts(counts, _count(content, "others", where))
