"""Several repositories, one of which hangs: only what needs it waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.profiles import scaled
from tests.support.servers import eventually
from tests.support.stores import WAIT_S, HangingStore, on_a_thread

from conch_control.repository import repositories as module
from conch_control.repository.local import LocalModel
from conch_control.repository.repositories import Repositories
from conch_control.repository.source import ModelSource, Scan

T = TypeVar("T")


def model(name: str, root: str = "/store") -> ModelSource:
    return LocalModel(Path(root, name))


@pytest.fixture
def store() -> Iterator[HangingStore]:
    made = HangingStore()
    made.models_now = {"theirs": model("theirs")}
    yield made
    made.go_on()


@pytest.fixture
def local() -> Iterator[HangingStore]:
    made = HangingStore("/local")
    made.models_now = {"ours": model("ours", "/local")}
    yield made
    made.go_on()


def now(function: Callable[[], T]) -> T:
    """The result of something that must not hang."""
    return on_a_thread(function).result(WAIT_S)


def asked_for(repositories: Repositories, number: int) -> None:
    """Waits until a thread wants a listing of the second repository that has not begun."""
    eventually(lambda: repositories.listers[1].requested_number >= number, "a further listing is wanted")


def no_call() -> None:
    raise AssertionError("nothing was late")


def test_one_repository_is_listed_by_whoever_asks(store: HangingStore) -> None:
    repositories = Repositories([store, store])
    for scan in (repositories.scan(), repositories.list_available(), repositories.poll(no_call)):
        assert scan == Scan(store.models_now)
    assert store.threads == {threading.current_thread()}
    repositories.close()


def test_several_are_listed_side_by_side(store: HangingStore, local: HangingStore) -> None:
    together = threading.Barrier(2)
    for each in (store, local):
        listed = each.models

        def models(listed: Callable[[], Mapping[str, ModelSource]] = listed) -> Mapping[str, ModelSource]:
            together.wait(WAIT_S)
            return listed()

        each.models = models  # type: ignore[method-assign]
    repositories = Repositories([local, store])
    assert now(repositories.scan) == Scan({**local.models_now, **store.models_now})
    assert threading.current_thread() not in store.threads | local.threads
    repositories.close()


def test_a_glance_goes_on_without_one_that_hangs(
    store: HangingStore, local: HangingStore, caplog: pytest.LogCaptureFixture
) -> None:
    repositories = Repositories([local, store], timeout_s=0.0)
    repositories.scan()
    store.hang()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            scan = now(repositories.list_available)
            assert scan.models == local.models_now
            assert scan.unreadable.keys() == scan.late == {store.location}
            assert scan.unreadable[store.location].startswith("has not answered for ")
            assert scan.remembered == store.models_now
        store.go_on()
        assert now(repositories.scan) == Scan({**local.models_now, **store.models_now})
    assert [caplog.text.count(text) for text in ("has not answered for", "answers again")] == [1, 1]
    repositories.close()


def test_nobody_is_patient_until_another_one_has_answered(store: HangingStore, local: HangingStore) -> None:
    repositories = Repositories([local, store], timeout_s=0.0)
    for each in (store, local):
        each.hang()
    available = on_a_thread(repositories.list_available)
    for each in (store, local):
        assert each.begun.acquire(timeout=WAIT_S)
    assert not available.done()
    store.go_on()
    scan = available.result(WAIT_S)
    assert scan.models == store.models_now
    assert scan.late == {local.location}
    local.go_on()
    repositories.close()


def test_one_that_fails_has_not_answered(store: HangingStore, local: HangingStore) -> None:
    repositories = Repositories([local, store], timeout_s=0.0)
    local.error = OSError("gone")
    store.hang()
    available = on_a_thread(repositories.list_available)
    eventually(lambda: repositories.listers[0].newest, "the first one has failed")
    assert not available.done()
    store.go_on()
    assert available.result(WAIT_S) == Scan(store.models_now, unreadable={local.location: "gone"})
    repositories.close()


def test_what_is_known_to_hang_is_not_waited_for_again(store: HangingStore, local: HangingStore) -> None:
    ticks = [0]
    repositories = Repositories([local, store], timeout_s=0.1, clock=lambda: ticks[0])
    store.hang()
    available = on_a_thread(repositories.list_available)
    assert store.begun.acquire(timeout=WAIT_S)
    eventually(lambda: not repositories.listers[0].busy, "the other one has answered")
    assert not available.done()

    def given_up() -> bool:
        ticks[0] += 10**9
        return available.done()

    # The waiting thread may note the first answer only after a tick: the clock ticks until it gives up.
    eventually(given_up, "the second one has timed out")
    assert available.result(WAIT_S).late == {store.location}
    # The clock stands still from here on: a wait would never end.
    assert now(repositories.list_available).late == {store.location}
    # That its listing fails in the end is no answer either.
    store.error = OSError("timed out")
    store.go_on()
    eventually(lambda: not repositories.listers[1].busy, "it has failed")
    store.hang()
    store.error = None
    assert now(repositories.list_available).late == {store.location}
    store.go_on()
    now(repositories.scan)
    assert now(repositories.list_available).late == frozenset()
    repositories.close()


def test_many_who_ask_share_one_listing(store: HangingStore, local: HangingStore) -> None:
    repositories = Repositories([local, store], timeout_s=0.0)
    store.hang()
    repositories.list_available()
    before = threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(repositories.list_available) for _ in range(100)]:
            assert future.result(WAIT_S).late == {store.location}
    assert (store.listings, store.most, local.most) == (1, 1, 1)
    assert threading.active_count() <= before + 1  # of the local one, if anything
    store.go_on()
    repositories.close()


def test_who_asks_sees_what_was_there_before(store: HangingStore, local: HangingStore) -> None:
    repositories = Repositories([local, store])
    store.hang()
    first = on_a_thread(repositories.scan)
    assert store.begun.acquire(timeout=WAIT_S)
    store.models_now = {**store.models_now, "new": model("new")}
    second = on_a_thread(repositories.scan)
    asked_for(repositories, 2)
    store.go_on()
    assert "theirs" in first.result(WAIT_S).models
    assert "new" in second.result(WAIT_S).models
    assert (store.listings, store.most) == (2, 1)
    repositories.close()


def test_a_glance_does_not_take_what_was_listed_before(store: HangingStore, local: HangingStore) -> None:
    """Or a load would not find a model that is there."""
    repositories = Repositories([local, store], timeout_s=0.0)
    repositories.scan()
    store.hang()
    assert now(repositories.list_available).late == {store.location}
    store.models_now = {**store.models_now, "new": model("new")}
    local.hang()
    while local.begun.acquire(blocking=False):
        pass
    available = on_a_thread(repositories.list_available)
    assert local.begun.acquire(timeout=WAIT_S)
    store.go_on()
    eventually(lambda: not repositories.listers[1].busy, "the old listing has ended")
    local.go_on()
    assert available.result(WAIT_S).late == {store.location}
    repositories.close()


def test_who_follows_takes_it_and_is_told_how_old_it_is(store: HangingStore, local: HangingStore) -> None:
    repositories = Repositories([local, store], timeout_s=0.0)
    repositories.scan()
    store.hang()
    assert now(lambda: repositories.poll(lambda: None)).late == {store.location}
    local.hang()
    while local.begun.acquire(blocking=False):
        pass
    follow = on_a_thread(lambda: repositories.poll(lambda: None))
    assert local.begun.acquire(timeout=WAIT_S)
    assert not follow.done()
    store.go_on()
    followed = follow.result(WAIT_S)
    assert followed.models == store.models_now
    assert followed.age_ns > 0
    local.go_on()
    repositories.close()


def test_who_has_seen_it_fail_does_not_wait_for_another_try(store: HangingStore, local: HangingStore) -> None:
    repositories = Repositories([local, store])
    store.hang()
    first = on_a_thread(repositories.scan)
    assert store.begun.acquire(timeout=WAIT_S)
    second = on_a_thread(repositories.scan)
    asked_for(repositories, 2)
    store.error = OSError("timed out")
    store.go_on()
    for each in (first, second):
        assert each.result(WAIT_S).unreadable == {store.location: "timed out"}
    assert store.listings == 1
    # But a later caller does not get an old failure.
    store.error = None
    assert now(repositories.scan).unreadable == {}
    repositories.close()


def test_an_error_that_nobody_expects_is_one_of_the_repository(
    store: HangingStore, local: HangingStore
) -> None:
    repositories = Repositories([local, store])
    store.error = ValueError("boom")
    assert now(repositories.scan) == Scan(
        local.models_now, unreadable={store.location: "it could not be read"}
    )
    repositories.close()


def test_who_follows_is_told_of_a_late_answer(store: HangingStore, local: HangingStore) -> None:
    repositories = Repositories([local, store], timeout_s=0.0)
    repositories.scan()
    told = threading.Semaphore(0)
    store.hang()
    for _ in range(3):
        assert now(lambda: repositories.poll(told.release)).late == {store.location}
    assert not told.acquire(blocking=False)
    store.models_now = {"theirs": model("theirs"), "ours": model("ours")}
    store.go_on()
    assert told.acquire(timeout=WAIT_S)
    late = repositories.late()
    assert late.models == {"theirs": model("theirs")}
    assert late.unreadable.keys() == {local.location}
    assert late.age_ns > 0
    assert store.listings == 2
    # It is there once, and is reported once.
    assert repositories.late().models == {}
    assert not told.acquire(blocking=False)
    repositories.close()


def test_what_comes_late_and_is_elsewhere_too_is_there_twice(
    store: HangingStore, local: HangingStore
) -> None:
    repositories = Repositories([local, store], timeout_s=0.0)
    repositories.scan()
    told = threading.Semaphore(0)
    store.models_now = {"theirs": model("theirs"), "ours": model("ours")}
    store.hang()
    repositories.poll(told.release)
    store.go_on()
    assert told.acquire(timeout=WAIT_S)
    late = repositories.late()
    assert late.models == {"theirs": model("theirs")}
    assert late.duplicates == {"ours"}
    repositories.close()


class ForeignModel(LocalModel):
    """A model of a registry that others may write to."""

    data_only = "and that is off"
    checked_backends = ()


def test_a_registry_takes_no_name_of_an_operators_model(
    store: HangingStore, local: HangingStore, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = {name: ForeignModel(Path("/registry", name)) for name in ("ours", "theirs")}
    store.models_now = {**foreign}
    repositories = Repositories([local, store], timeout_s=0.0)
    both = {"ours": model("ours", "/local"), "theirs": foreign["theirs"]}
    for _ in range(2):
        scan = repositories.scan()
        assert (scan.models, scan.duplicates) == (both, frozenset())
    assert caplog.text.count("ignoring model 'ours', as the name is that of a model of another") == 1
    # Nor while the operator's repository can't be read, or the other one answers late.
    local.error = OSError("away")
    assert repositories.scan().models == {"theirs": foreign["theirs"]}
    local.error = None
    told = threading.Semaphore(0)
    for slow, late in ((store, {"theirs": foreign["theirs"]}), (local, {"ours": both["ours"]})):
        slow.hang()
        repositories.poll(told.release)
        slow.go_on()
        assert told.acquire(timeout=WAIT_S)
        found = repositories.late()
        assert (found.models, found.duplicates) == (late, frozenset())
    repositories.close()


def test_a_late_failure_is_none_of_the_answers_that_are_told(
    store: HangingStore, local: HangingStore
) -> None:
    repositories = Repositories([local, store], timeout_s=0.0)
    told = threading.Semaphore(0)
    store.hang()
    now(lambda: repositories.poll(told.release))
    store.error = OSError("timed out")
    store.go_on()
    eventually(lambda: not repositories.listers[1].busy, "it has failed")
    assert not told.acquire(blocking=False)
    store.error = None
    now(repositories.scan)  # any caller may have it listed: it has answered
    assert told.acquire(timeout=WAIT_S)
    assert repositories.late().models == store.models_now
    repositories.close()


def test_who_follows_waits_for_one_that_always_takes_long(local: HangingStore, store: HangingStore) -> None:
    """Else what is gone would never be seen to be gone: something would be unreadable at every look."""
    ticks = [0]
    repositories = Repositories([local, store], timeout_s=0.0, clock=lambda: ticks[0])

    def take(seconds: int, function: Callable[[], Scan]) -> Scan:
        store.hang()
        scan = on_a_thread(function)
        assert store.begun.acquire(timeout=WAIT_S)
        eventually(lambda: not repositories.listers[0].busy, "the other one has answered")
        ticks[0] += seconds * 10**9
        store.go_on()
        return scan.result(WAIT_S)

    for seconds in (3, 3, 3):
        take(seconds, repositories.scan)
    assert repositories.listers[1].took_ns == 3 * 10**9
    assert take(5, lambda: repositories.poll(no_call)) == Scan({**local.models_now, **store.models_now})
    # One exception does not make it one that always takes that long.
    take(1000, repositories.scan)
    assert repositories.listers[1].took_ns < 12 * 10**9
    repositories.close()


def test_a_close_ends_all_waiting_and_leaves_what_hangs(
    store: HangingStore, local: HangingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.01)
    repositories = Repositories([local, store])
    store.hang()
    scan = on_a_thread(repositories.scan)
    assert store.begun.acquire(timeout=WAIT_S)
    eventually(lambda: local.listings and not repositories.listers[0].busy, "the other one has answered")
    now(repositories.close)
    assert scan.result(WAIT_S).unreadable == {store.location: "it has been closed"}
    assert now(repositories.scan).unreadable.keys() == {local.location, store.location}
    assert (local.listings, store.listings) == (1, 1)


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "hang", "go on", "fail", "scan", "list_available", "poll"]),
        st.integers(0, 1),
    ),
    max_size=25,
)


@settings(max_examples=scaled(60), deadline=None)
@given(STEPS)
def test_whatever_happens_everybody_sees_what_was_written_before(steps: list[Step]) -> None:
    stores = (HangingStore("/a"), HangingStore("/b"))
    repositories = Repositories(stores, timeout_s=0.0)
    late = threading.Event()
    scans: list[tuple[tuple[set[str], set[str]], Future[Scan]]] = []
    for number, (step, which) in enumerate(steps):
        each = stores[which]
        match step:
            case "write":
                name = f"m{which}-{number}"
                each.models_now = {**each.models_now, name: model(name)}
            case "hang":
                each.hang()
            case "go on":
                each.error = None
                each.go_on()
            case "fail":
                each.error = OSError("failed")
                each.go_on()
            case _:
                written = (set(stores[0].models_now), set(stores[1].models_now))
                functions: dict[str, Callable[[], Scan]] = {
                    "scan": repositories.scan,
                    "list_available": repositories.list_available,
                    "poll": lambda: repositories.poll(late.set),
                }
                scans.append((written, on_a_thread(functions[step])))
    for each in stores:
        each.error = None
        each.go_on()
    for written, future in scans:
        scan = future.result(WAIT_S)
        for each, names in zip(stores, written, strict=True):
            assert scan.age_ns or each.location in scan.unreadable or names <= scan.models.keys()
        assert scan.late <= scan.unreadable.keys()
    eventually(lambda: not any(each.busy for each in repositories.listers), "what was given up has ended")
    assert max(each.most for each in stores) <= 1
    last = now(repositories.scan)
    assert last == Scan({**stores[0].models_now, **stores[1].models_now})
    repositories.close()
    eventually(lambda: not any(lister.busy for lister in repositories.listers), "nothing is left")
