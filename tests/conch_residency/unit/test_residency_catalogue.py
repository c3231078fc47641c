"""Records of residency about models, and the bounds of the requests that wait for them."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InternalError, ResourceExhaustedError
from conch.core.model_statistics import ModelStatistics
from conch_control.repository.local import LocalRepository
from conch_control.repository.source import Scan
from conch_residency.catalogue import Catalogue
from conch_residency.cold_queue import ColdQueue, Waiter
from conch_residency.segments import Room

if TYPE_CHECKING:
    from pathlib import Path

    from conch.core.errors import ConchError

S = 1_000_000_000
FILES = (("1/model.onnx", 10, 1, 1),)
OTHER_FILES = (("1/model.onnx", 10, 2, 1),)


def ignore(error: ConchError | None) -> None:
    """Ends a waiter."""


def test_a_model_of_the_catalogue_takes_less_than_1_kb(tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / f"model-{number:06}-with-a-name-of-usual-length").mkdir()
    repository, catalogue = LocalRepository(tmp_path), Catalogue()
    counters = ModelStatistics()
    gc.disable()  # what ends in a collection, of any test before, would count as ours
    tracemalloc.start(10)
    try:
        catalogue.replace(Scan(repository.models()), 0)
        for name in catalogue.scan.models:
            catalogue.measured(name, FILES, Room(1 << 20, 1))
            catalogue.loaded(name, S)
            catalogue.keep_totals(name, ((1, counters.keep()),))
        # Not what threads of other tests allocate meanwhile.
        ours = tracemalloc.Filter(True, __file__, all_frames=True)
        traced = tracemalloc.take_snapshot().filter_traces([ours]).statistics("filename")
        taken = sum(each.size for each in traced)
    finally:
        tracemalloc.stop()
        gc.enable()
    assert len(catalogue) == 2000
    assert 100 < taken / 2000 < 1000


def test_failures_are_remembered_longer_each_time_until_the_files_change() -> None:
    catalogue, error, now = Catalogue(), InternalError("broken"), 0
    pauses = []
    for _ in range(8):
        catalogue.failed("m", error, FILES, now)
        assert catalogue.failure("m", now) is error
        ends = next(end for end in range(100) if catalogue.failure("m", now + end * S) is None)
        pauses.append(ends)
        now += ends * S
        assert catalogue.load_failed("m")
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    catalogue.failed("m", error, OTHER_FILES, now)
    assert catalogue.failure("m", now + S) is None, "with other files it is the first failure"
    catalogue.failed("m", error, OTHER_FILES, now)
    assert catalogue.failed_states(now) == {"m": OTHER_FILES}
    for forget in (catalogue.changed, lambda name: catalogue.loaded(name, 0)):
        catalogue.failed("m", error, OTHER_FILES, now)
        forget("m")
        assert catalogue.failure("m", now) is None
        assert not catalogue.load_failed("m")


def test_sizes_belong_to_the_files_that_were_measured() -> None:
    catalogue = Catalogue()
    catalogue.measured("m", FILES, Room(7, 1))
    assert (catalogue.size("m", FILES), catalogue.size("m", OTHER_FILES)) == (Room(7, 1), None)


def test_unknown_names_ask_for_one_listing_in_five_seconds() -> None:
    catalogue = Catalogue()
    catalogue.replace(Scan({}), 0)
    assert not catalogue.rescan_due(60 * S)
    listings = 0
    for tick in range(100):  # 10 s
        catalogue.unknown()
        if catalogue.rescan_due(tick * S // 10):
            listings += 1
            catalogue.replace(Scan({}), tick * S // 10)
    assert listings == 1


_EVENTS = st.tuples(
    st.sampled_from(["add", "leave", "end", "expire"]), st.sampled_from("abc"), st.integers(0, 9)
)


@given(st.lists(_EVENTS, max_size=40))
def test_each_waiting_request_leaves_the_queue_once(events: list[tuple[str, str, int]]) -> None:
    """By its own cancellation, the end of its load or its time; whatever else happens meanwhile."""
    queue = ColdQueue(4, 0)
    added: list[Waiter] = []
    left: list[Waiter] = []
    for now, (event, name, number) in enumerate(events):
        if event == "add":
            queue.add_wanted(name)
            waiter = Waiter(ignore, 1, now + number)
            with suppress(ResourceExhaustedError):
                queue.add(name, waiter, waiter)
                added.append(waiter)
        elif event == "leave" and number < len(added) and queue.leave(name, added[number]):
            left.append(added[number])
        elif event == "end":
            left += queue.take_waiters(name)
        elif event == "expire":
            left += [waiter for _, waiter in queue.expire(now)]
        assert len(queue) == len(added) - len(left)
    for name in queue.in_order:
        left += queue.take_waiters(name)
    assert Counter(map(id, left)) == Counter(map(id, added))


def test_waiting_requests_are_bounded_for_each_model() -> None:
    queue = ColdQueue(2, 100)
    assert queue.add_wanted("a")
    assert not queue.add_wanted("a")
    first = Waiter(ignore, 60, 5 * S)
    queue.add("a", 1, first)
    with pytest.raises(ResourceExhaustedError, match=r"--cold-queue-bytes allows 100"):
        queue.add("a", 3, Waiter(ignore, 41, 5 * S))
    second = Waiter(ignore, 40, 9 * S)
    queue.add("a", 2, second)
    with pytest.raises(ResourceExhaustedError, match=r"--cold-queue-size allows"):
        queue.add("a", 3, Waiter(ignore, 0, 5 * S))
    queue.add_wanted("b")
    queue.add("b", 1, Waiter(ignore, 100, 7 * S))
    assert (len(queue), queue.next_end_ns()) == (3, 5 * S)
    assert queue.expire(6 * S) == [("a", first)]
    assert not queue.leave("a", 1)
    queue.add("a", 3, third := Waiter(ignore, 60, 9 * S))
    assert queue.leave("a", 2)
    assert queue.take_waiters("a") == [third]
    assert queue.take_waiters("a") == []
    assert "a" not in queue


def test_models_are_loaded_by_priority_then_by_their_first_request() -> None:
    queue = ColdQueue(0, 0)
    for name, priority in (("none", 0), ("low", 5), ("high", 1), ("late", 0), ("none", 5)):
        queue.add_wanted(name)
        queue.add(name, object(), Waiter(ignore, 0, S, priority))
    assert queue.in_order == ["high", "none", "low", "late"]
