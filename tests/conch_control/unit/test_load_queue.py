"""The order of loads, and those that learn of something newer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.waiting import PATIENCE_S

from conch.core.errors import UnavailableError
from conch_control.lifecycle.load_queue import LoadQueue, QueuedLoad, SupersededError
from conch_control.repository.layout import Fingerprint

OLD: Fingerprint = (("f", 1, 1, 1),)
NEW: Fingerprint = (("f", 2, 2, 2),)
TEXT = "Newer operation has been applied to the model lifecycle, current load operation is out-dated."


def an_operation(
    queue: LoadQueue, state: Fingerprint = OLD, override: str | None = None, name: str = "m"
) -> QueuedLoad:
    return QueuedLoad(name, queue.ticket(), queue.ticket(), state, override)


def entered(queue: LoadQueue, state: Fingerprint = OLD, override: str | None = None) -> QueuedLoad:
    operation = an_operation(queue, state, override)
    assert queue.submit(operation) is operation
    return operation


def test_the_same_is_shared_and_something_else_is_not() -> None:
    queue = LoadQueue(4)
    first = entered(queue)
    assert queue.submit(an_operation(queue)) is first
    before = first.stopped
    second = entered(queue, NEW)
    assert before is None
    assert isinstance(first.stopped, SupersededError)
    assert first.stopped.message == TEXT
    assert second.stopped is None


def test_a_plain_load_is_served_by_one_with_another_config_but_not_the_other_way_round() -> None:
    queue = LoadQueue(4)
    first = entered(queue, override="{}")
    assert queue.submit(an_operation(queue)) is first
    assert queue.submit(an_operation(queue, override="{}")) is first
    plain = entered(queue, NEW)
    entered(queue, NEW, "{}")
    assert plain.stopped is not None


def test_an_older_look_at_the_files_is_taken_again() -> None:
    queue = LoadQueue(4)
    stale = an_operation(queue)
    newer = entered(queue, NEW)
    assert queue.submit(stale) is None
    stale.scanned_ticket = queue.ticket()
    stale.state = NEW
    assert queue.submit(stale) is newer


def test_an_older_call_with_another_config_is_told() -> None:
    queue = LoadQueue(4)
    older = an_operation(queue, override="older")
    newer = entered(queue, override="newer")
    older.scanned_ticket = queue.ticket()
    with pytest.raises(SupersededError):
        queue.submit(older)
    assert newer.stopped is None


def test_what_has_fetched_newer_files_serves_those_who_want_them() -> None:
    queue = LoadQueue(4)
    first = entered(queue)
    queue.fetched(first, NEW, queue.ticket())
    assert queue.submit(an_operation(queue, NEW)) is first


def test_an_unload_stops_what_was_asked_for_before_it_only() -> None:
    queue = LoadQueue(4)
    with queue.call() as asked:
        running = entered(queue)
        refreshing = an_operation(queue)
        queue.append(refreshing)
        queue.unload("m")
        assert isinstance(running.stopped, SupersededError)
        assert isinstance(refreshing.stopped, SupersededError)
        with pytest.raises(SupersededError):
            queue.submit(QueuedLoad("m", asked, queue.ticket(), OLD))
        assert queue.submit(again := an_operation(queue)) is again
        queue.submit(QueuedLoad("other", asked, queue.ticket(), OLD))
    queue.unload("m")
    assert again.stopped is not None


def test_turns() -> None:
    """One at a time for a model, and so many altogether; who is stopped while waiting does not run."""
    queue = LoadQueue(2)
    started: list[str] = []
    release = threading.Event()
    going = threading.Semaphore(0)
    running: set[str] = set()
    most: list[int] = []

    def run(operation: QueuedLoad) -> None:
        with queue.running(operation):
            running.add(operation.name)
            most.append(len(running))
            started.append(operation.name)
            going.release()
            assert release.wait(PATIENCE_S)
            running.remove(operation.name)

    first = entered(queue)
    others = [an_operation(queue, name=name) for name in ("a", "b")]
    for other in others:
        queue.submit(other)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(run, first)]
        assert going.acquire(timeout=PATIENCE_S)
        second = entered(queue, NEW)
        waiting = pool.submit(run, second)
        futures += [pool.submit(run, other) for other in others]
        assert going.acquire(timeout=PATIENCE_S)
        entered(queue, OLD)
        with pytest.raises(SupersededError):
            waiting.result(PATIENCE_S)
        release.set()
        for future in futures:
            future.result(PATIENCE_S)
    assert sorted(started) == ["a", "b", "m"]
    assert max(most) == 2
    assert first.finished


def test_waiting_for_others() -> None:
    queue = LoadQueue(1)
    first = entered(queue)
    with pytest.raises(ZeroDivisionError), queue.running(first):
        raise ZeroDivisionError
    assert isinstance(queue.wait(first), ZeroDivisionError)
    second = entered(queue)
    queue.unload("m")
    with pytest.raises(SupersededError):
        queue.wait(second)


def test_closed() -> None:
    queue = LoadQueue(1)
    first = entered(queue)
    queue.close(UnavailableError("Server exiting"))
    with pytest.raises(UnavailableError, match="Server exiting"):
        queue.submit(an_operation(queue))
    with pytest.raises(UnavailableError, match="Server exiting"), queue.running(first):
        pass
    assert queue.wait_idle(0)
