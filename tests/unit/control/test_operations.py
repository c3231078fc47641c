"""Whose turn it is, and who is told that something newer has come."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from conch.core.errors import UnavailableError
from conch_control.lifecycle.load_queue import Operation, Operations, SupersededError
from conch_control.repository.layout import Fingerprint

OLD: Fingerprint = (("f", 1, 1, 1),)
NEW: Fingerprint = (("f", 2, 2, 2),)
TEXT = "Newer operation has been applied to the model lifecycle, current load operation is out-dated."


def an_operation(
    operations: Operations, state: Fingerprint = OLD, override: str | None = None, name: str = "m"
) -> Operation:
    return Operation(name, operations.ticket(), operations.ticket(), state, override)


def entered(operations: Operations, state: Fingerprint = OLD, override: str | None = None) -> Operation:
    operation = an_operation(operations, state, override)
    assert operations.enter(operation) is operation
    return operation


def test_the_same_is_shared_and_something_else_is_not() -> None:
    operations = Operations(4)
    first = entered(operations)
    assert operations.enter(an_operation(operations)) is first
    before = first.stopped
    second = entered(operations, NEW)
    assert before is None
    assert isinstance(first.stopped, SupersededError)
    assert first.stopped.message == TEXT
    assert second.stopped is None


def test_a_plain_load_is_served_by_one_with_another_config_but_not_the_other_way_round() -> None:
    operations = Operations(4)
    first = entered(operations, override="{}")
    assert operations.enter(an_operation(operations)) is first
    assert operations.enter(an_operation(operations, override="{}")) is first
    plain = entered(operations, NEW)
    entered(operations, NEW, "{}")
    assert plain.stopped is not None


def test_an_older_look_at_the_files_is_taken_again() -> None:
    operations = Operations(4)
    stale = an_operation(operations)
    newer = entered(operations, NEW)
    assert operations.enter(stale) is None
    stale.looked = operations.ticket()
    stale.state = NEW
    assert operations.enter(stale) is newer


def test_an_older_call_with_another_config_is_told() -> None:
    operations = Operations(4)
    older = an_operation(operations, override="older")
    newer = entered(operations, override="newer")
    older.looked = operations.ticket()
    with pytest.raises(SupersededError):
        operations.enter(older)
    assert newer.stopped is None


def test_what_has_fetched_newer_files_serves_those_who_want_them() -> None:
    operations = Operations(4)
    first = entered(operations)
    operations.fetched(first, NEW, operations.ticket())
    assert operations.enter(an_operation(operations, NEW)) is first


def test_an_unload_stops_what_was_asked_for_before_it_only() -> None:
    operations = Operations(4)
    with operations.call() as asked:
        running = entered(operations)
        refreshing = an_operation(operations)
        operations.join(refreshing)
        operations.unload("m")
        assert isinstance(running.stopped, SupersededError)
        assert isinstance(refreshing.stopped, SupersededError)
        with pytest.raises(SupersededError):
            operations.enter(Operation("m", asked, operations.ticket(), OLD))
        assert operations.enter(again := an_operation(operations)) is again
        operations.enter(Operation("other", asked, operations.ticket(), OLD))
    operations.unload("m")
    assert again.stopped is not None


def test_turns() -> None:
    """One at a time for a model, and so many altogether; who is stopped while waiting does not run."""
    operations = Operations(2)
    started: list[str] = []
    release = threading.Event()
    going = threading.Semaphore(0)

    def run(operation: Operation) -> None:
        with operations.turn(operation):
            started.append(operation.name)
            going.release()
            assert release.wait(20)

    first = entered(operations)
    others = [an_operation(operations, name=name) for name in ("a", "b")]
    for other in others:
        operations.enter(other)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(run, first)]
        assert going.acquire(timeout=20)
        second = entered(operations, NEW)
        waiting = pool.submit(run, second)
        futures += [pool.submit(run, other) for other in others]
        assert going.acquire(timeout=20)
        assert not going.acquire(timeout=0.02)
        entered(operations, OLD)
        with pytest.raises(SupersededError):
            waiting.result(20)
        release.set()
        for future in futures:
            future.result(20)
    assert sorted(started) == ["a", "b", "m"]
    assert first.finished


def test_waiting_for_others() -> None:
    operations = Operations(1)
    first = entered(operations)
    with pytest.raises(ZeroDivisionError), operations.turn(first):
        raise ZeroDivisionError
    assert isinstance(operations.wait(first), ZeroDivisionError)
    second = entered(operations)
    operations.unload("m")
    with pytest.raises(SupersededError):
        operations.wait(second)


def test_closed() -> None:
    operations = Operations(1)
    first = entered(operations)
    operations.close(UnavailableError("Server exiting"))
    with pytest.raises(UnavailableError, match="Server exiting"):
        operations.enter(an_operation(operations))
    with pytest.raises(UnavailableError, match="Server exiting"), operations.turn(first):
        pass
    assert operations.wait_ended(0)
