"""The numbers of the live stream: complete, small, and those of the newest load."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st
from tests.support.core import make_model, make_spec

from conch.core.latencies import PLACES
from conch.core.model_version import Model
from conch.core.registry import Entry, Registry
from conch_console.live_counts import LiveCounts, packed_buckets

counts = st.lists(st.integers(0, 10**6), min_size=PLACES, max_size=PLACES)


def unpacked(text: str) -> dict[int, int]:
    return {
        ord(letter) - ord("A") + 10: int(count, 36)
        for letter, count in re.findall("([A-Z])([0-9a-z]+)", text)
    }


@given(counts, counts)
def test_buckets_lose_no_request(before: list[int], grown: list[int]) -> None:
    now = [first + more for first, more in zip(before, grown, strict=True)]
    expected: dict[int, int] = {}
    for place, more in enumerate(grown):
        if more:
            bucket = min(max(place, 10), 35)
            expected[bucket] = expected.get(bucket, 0) + more
    assert unpacked(packed_buckets(now, before)) == expected


def version(name: str) -> Model:
    model = make_model(make_spec(name=name))
    model.statistics.keep_latencies()
    return model


def publish(registry: Registry, *models: Model) -> None:
    for model in models:
        registry.publish(model.spec.name, Entry(ready=MappingProxyType({1: model})))


def test_only_what_has_changed_is_told_and_a_reload_begins_at_zero() -> None:
    registry = Registry()
    first, other = version("a"), version("b")
    publish(registry, first, other)
    first.statistics.record_failure(5)
    live = LiveCounts(registry)
    live.start()
    assert live.names() == live.new_names() == [[0, "a", 1], [1, "b", 1]]
    assert live.changes(frozenset()) == ([], {})
    first.statistics.record_failure(5)
    first.statistics.record_hit(1, 2, 2**20)
    assert live.changes(frozenset())[0] == [[0, 1, 0, 0, "L1"]]
    again = version("a")
    again.statistics.record_failure(5)
    publish(registry, again)
    lines, details = live.changes(frozenset({"a", "unknown"}))
    assert lines == [[0, 1, 0, 0, ""]]
    assert details["unknown"] == [] and details["a"][0]["failed"] == 1
    registry.remove("b")
    live.changes(frozenset())
    assert live.names() == [[0, "a", 1]]
    for model in (first, other, again):
        model.close()


def test_a_look_at_50_busy_models_takes_2_kb() -> None:
    registry = Registry()
    models = [version(f"model_{number}") for number in range(50)]
    publish(registry, *models)
    live = LiveCounts(registry)
    live.start()
    for number, model in enumerate(models):
        for request in range(200):  # 10,000 requests in the second, over seven buckets
            model.statistics.record_hit(1000, 2000, 2 ** (17 + request % 7) + number)
        model.statistics.record_failure(5)
    lines: list[Any] = live.changes(frozenset())[0]
    assert len(lines) == 50
    assert len(orjson.dumps(lines)) <= 2048
    for model in models:
        model.close()
