"""Changes of the counters of all model versions since the last look, in a compact form.

A line for each version that has changed: its number, failures, pending and running requests, and the buckets
of its latencies. Buckets are powers of two of nanoseconds: `A` is up to 2**10, the next letter twice that,
and behind each letter stands its count in base 36, so a line takes about 25 bytes.

Owns: the last counters. Threads and locks: event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final

from conch.core.model_statistics import ModelStatistics
from conch.core.registry import Registry
from conch.core.servable import Servable
from conch.core.statistics_snapshot import StatisticsSnapshot

Key = tuple[str, int]
"""Identifier and version."""

Details = Mapping[str, list[dict[str, Any]]]
"""Objects of the versions, by model."""

_FIRST_BUCKET: Final = 10  # 1 us
_LAST_BUCKET: Final = 35  # 34 s and more
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_ZERO: Final = ModelStatistics().snapshot()


class _Version:
    """One version in the stream: its number, and its counters at the last look."""

    __slots__ = ("gauges", "identity", "mark", "number", "snapshot")

    def __init__(self, number: int) -> None:
        self.number = number
        self.identity: object = None
        self.mark: tuple[int, ...] = ()
        self.gauges = (0, 0)
        self.snapshot = _ZERO

    def look(self, model: Servable) -> tuple[StatisticsSnapshot, bool]:
        """Takes the counters; returns those before, and whether they or the gauges have changed."""
        statistics = model.statistics
        mark, gauges = statistics.mark, (model.pending, statistics.gauges()[1])
        changed, self.gauges = self.gauges != gauges, gauges
        before = self.snapshot
        if self.identity is not statistics.identity:
            before = _ZERO  # a load begins with counters of its own
        elif self.mark == mark:
            return before, changed
        self.identity, self.mark = statistics.identity, mark
        self.snapshot = statistics.snapshot()
        return before, True


class LiveCounts:
    """Compares the counters of all versions with those before."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._numbers = count()
        self._versions: dict[Key, _Version] = {}
        self._new: list[list[Any]] = []

    def start(self) -> None:
        """Takes the counters as they are: the next look shows only what comes after."""
        for key, model in self._models():
            self._find(key).look(model)

    def names(self) -> list[list[Any]]:
        """The number, identifier and version of all versions."""
        return [[version.number, *key] for key, version in self._versions.items()]

    def new_names(self) -> list[list[Any]]:
        """Returns `names` of the versions that are new since the last call."""
        new, self._new = self._new, []
        return new

    def changes(
        self, detailed: frozenset[str], step: Callable[[], None] = lambda: None
    ) -> tuple[list[list[Any]], Details]:
        """The lines of versions that have changed, and all of `detailed` models; `step` follows each."""
        lines: list[list[Any]] = []
        details: dict[str, list[dict[str, Any]]] = {name: [] for name in detailed}
        there: set[Key] = set()
        for key, model in self._models():
            there.add(key)
            version = self._find(key)
            before, changed = version.look(model)
            if changed:
                lines.append(_line(version, before))
            if key[0] in details:
                details[key[0]].append(_detail(key[1], version, before))
            step()
        for key in self._versions.keys() - there:
            del self._versions[key]
        return lines, details

    def _find(self, key: Key) -> _Version:
        version = self._versions.get(key)
        if version is None:
            version = self._versions[key] = _Version(next(self._numbers))
            self._new.append([version.number, *key])
        return version

    def _models(self) -> Iterator[tuple[Key, Servable]]:
        for name, entry in self._registry.entries.items():
            for version, model in entry.ready.items():
                yield (name, version), model


def _line(version: _Version, before: StatisticsSnapshot) -> list[Any]:
    now = version.snapshot
    failed = now.fail.count - before.fail.count
    return [version.number, failed, *version.gauges, _latencies(now, before)]


def _detail(number: int, version: _Version, before: StatisticsSnapshot) -> dict[str, Any]:
    """The charts of one version: outcomes, latencies, stages and batch sizes since the last look."""
    now = version.snapshot
    rejected = sum(now.rejected.values()) - sum(before.rejected.values())
    cancelled = sum(now.cancelled.values()) - sum(before.cancelled.values())
    failed = now.fail.count - before.fail.count
    stages = [
        (now.queue.ns - before.queue.ns, now.queue.count - before.queue.count),
        *(
            (after.ns - first.ns, after.count - first.count)
            for after, first in (
                (now.compute_input, before.compute_input),
                (now.compute_infer, before.compute_infer),
                (now.compute_output, before.compute_output),
            )
        ),
    ]
    batches = {
        str(size): runs
        for size, row in now.batches.items()
        if (
            runs := row.compute_infer.count
            - (before.batches[size].compute_infer.count if size in before.batches else 0)
        )
    }
    return {
        "version": number,
        "ok": now.success.count - before.success.count,
        "rejected": rejected,
        "cancelled": cancelled,
        "failed": failed - rejected - cancelled,
        "hits": now.cache_hit.count - before.cache_hit.count,
        "pending": version.gauges[0],
        "running": version.gauges[1],
        "latencies": _latencies(now, before),
        "stages_us": [round(ns / number_of / 1000, 1) if number_of else 0 for ns, number_of in stages],
        "batches": batches,
    }


def _latencies(now: StatisticsSnapshot, before: StatisticsSnapshot) -> str:
    if now.latencies is None:
        return ""
    return packed_buckets(now.latencies.request, () if before.latencies is None else before.latencies.request)


def packed_buckets(now: Sequence[int], before: Sequence[int] = ()) -> str:
    """The growth of the buckets of a histogram as letters and numbers."""
    found: dict[int, int] = {}
    for place, total in enumerate(now):
        grown = total - before[place] if before else total
        if grown:
            bucket = min(max(place, _FIRST_BUCKET), _LAST_BUCKET)
            found[bucket] = found.get(bucket, 0) + grown
    return "".join(
        f"{chr(ord('A') + bucket - _FIRST_BUCKET)}{_base36(grown)}" for bucket, grown in found.items()
    )


def _base36(number: int) -> str:
    text = ""
    while number:
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
    return text or "0"
