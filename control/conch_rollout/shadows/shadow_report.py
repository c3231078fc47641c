"""Report of a shadow's comparisons: counts, histograms of differences, and the worst pairs.

Threads and locks: any thread; one lock.
"""

from __future__ import annotations

import heapq
import math
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conch.core.tensor import Tensor
from conch_rollout.shadows.comparison import Difference, Figures
from conch_rollout.shadows.pair_files import PairFiles

WORST_PAIRS = 32
"""Pairs that a report keeps."""
EDGES = tuple(float(f"{digit}e{decade}") for decade in range(-9, 7) for digit in range(1, 10))
"""Upper bounds of the buckets of differences, nine for each power of ten; a last bucket has larger ones."""

_MOST_OUTPUTS = 256
_MOST_FIGURES = 8
_STRUCTURAL = frozenset(Difference) - {Difference.VALUES, Difference.TOP}


@dataclass(frozen=True, slots=True)
class Spread:
    """A histogram of largest absolute differences, one for each pair.

    Attributes:
        counts: By bucket, as `EDGES`, and one for larger differences, infinite ones among them.
        total: Sum of the finite ones.
    """

    counts: Sequence[int]
    total: float


@dataclass(frozen=True, slots=True)
class WorstPair:
    """A pair that differs.

    Attributes:
        request_id: The client's request id, or empty.
        at: Seconds since 1970.
        figures: Those of outputs that differ, the worst ones.
        file: Name of the file with its tensors; empty for none.
    """

    request_id: str
    at: float
    figures: Sequence[Figures]
    file: str = ""

    def as_json(self) -> dict[str, Any]:
        """The pair for operators."""
        found = {
            "request_id": self.request_id,
            "at": round(self.at, 3),
            "outputs": [each.as_json() for each in self.figures],
        }
        return found | ({"file": self.file} if self.file else {})


class ShadowReport:
    """The comparisons of one rollout.

    Args:
        files: Keeps the tensors of the worst pairs; None for none.

    Attributes:
        compared: Pairs that were compared.
        mismatches: Those of them in which an output differs.
    """

    def __init__(self, files: PairFiles | None = None) -> None:
        self._files = files
        self._lock = threading.Lock()
        self.compared = 0
        self.mismatches = 0
        self._kinds: Counter[str] = Counter()
        self._counts: dict[str, list[int]] = {}
        self._totals: dict[str, float] = {}
        self._number = 0
        self._worst: list[tuple[float, int, WorstPair]] = []  # a heap, the least bad one first

    def add(
        self, request_id: str, at: float, figures: Sequence[Figures], tensors: Mapping[str, Tensor]
    ) -> None:
        """Adds a compared pair.

        Args:
            request_id: The client's request id.
            at: Seconds since 1970.
            figures: Results of the comparison.
            tensors: The pair's tensors, for a file.
        """
        bad = sorted((each for each in figures if each.difference is not None), key=_badness, reverse=True)
        with self._lock:
            self.compared += 1
            for each in figures:
                self._count(each)
            if not bad:
                return
            self.mismatches += 1
            self._kinds.update({each.difference.value for each in bad if each.difference is not None})
            self._number += 1
            key = _badness(bad[0]), -self._number  # of two as bad as each other, the earlier one stays
            if len(self._worst) == WORST_PAIRS and key < self._worst[0][:2]:
                return
        file = "" if self._files is None else self._files.write(tensors)
        pair = WorstPair(request_id, at, bad[:_MOST_FIGURES], file)
        with self._lock:
            heapq.heappush(self._worst, (*key, pair))
            left = heapq.heappop(self._worst)[2] if len(self._worst) > WORST_PAIRS else None
        if self._files is not None and left is not None:
            self._files.remove(left.file)

    def _count(self, figures: Figures) -> None:
        value = figures.max_abs
        if value is None:
            return
        counts = self._counts.get(figures.output)
        if counts is None:
            if len(self._counts) == _MOST_OUTPUTS:
                return
            counts = self._counts[figures.output] = [0] * (len(EDGES) + 1)
            self._totals[figures.output] = 0.0
        counts[bisect_left(EDGES, value)] += 1
        if math.isfinite(value):
            self._totals[figures.output] += value

    def spreads(self) -> Mapping[str, Spread]:
        """Histograms of the largest absolute differences, by output."""
        with self._lock:
            return {name: Spread(tuple(counts), self._totals[name]) for name, counts in self._counts.items()}

    def worst(self) -> list[WorstPair]:
        """The worst pairs, the worst first."""
        with self._lock:
            found = sorted(self._worst, key=lambda each: each[:2], reverse=True)
        return [pair for _, _, pair in found]

    def as_json(self) -> dict[str, Any]:
        """The report for operators; histograms have their buckets that are not empty."""
        with self._lock:
            counts = {"compared": self.compared, "mismatches": self.mismatches, "kinds": dict(self._kinds)}
        bounds = (*EDGES, None)
        histograms = {
            name: [[bound, count] for bound, count in zip(bounds, spread.counts, strict=True) if count]
            for name, spread in self.spreads().items()
        }
        return counts | {"max_abs": histograms, "worst": [pair.as_json() for pair in self.worst()]}


def _badness(figures: Figures) -> float:
    if figures.difference in _STRUCTURAL:
        return math.inf
    return 1.0 - figures.within if figures.max_abs is None else figures.max_abs
