"""The thread that all workers of a program share."""

from __future__ import annotations

import errno
import os
import selectors
import threading

import pytest
from tests.support.servers import WAIT_S, eventually

from conch.core.errors import UnavailableError
from conch.workers.environment import server_environment
from conch.workers.supervision.child_process import start_worker
from conch.workers.supervision.process_monitor import ProcessMonitor

S = 1_000_000_000


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "conch-workers"]


def _full(*args: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_timer_that_is_further_away_than_the_kernel_can_wait() -> None:
    monitor = ProcessMonitor()
    monitor.hold()
    try:
        timers = [monitor.at(monitor.clock() + days * 86_400 * S, lambda: None) for days in (30, 10**9)]
        over = threading.Event()
        monitor.call(lambda: monitor.call(over.set))
        assert over.wait(WAIT_S)
        assert len(timers) == 2
    finally:
        monitor.release()
    eventually(lambda: not _threads(), "the thread ends")


@pytest.mark.parametrize("missing", ["eventfd", "epoll"])
@pytest.mark.process
def test_a_hold_that_fails_does_not_count(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = ProcessMonitor()
    with monkeypatch.context() as patch:
        if missing == "eventfd":
            patch.setattr(os, "eventfd", _full)
        else:
            patch.setattr(selectors, "DefaultSelector", _full)
        with pytest.raises(UnavailableError, match="can't be started: Too many open files"):
            start_worker(monitor, "model_0_0", server_environment(), "serve")
    process, ours = start_worker(monitor, "model_0_0", server_environment(), "serve")
    with ours:
        process.kill()
        assert process.wait(WAIT_S)
    eventually(lambda: not _threads(), "the thread ends")


@pytest.mark.parametrize("watched", range(6))
@pytest.mark.process
def test_a_process_that_can_not_be_watched_does_not_go_on(
    watched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leak fixture finds what would be left of it."""
    monitor = ProcessMonitor()
    watch, count = monitor.watch, 0

    def fails(*args: object) -> None:
        nonlocal count
        count += 1
        if count > watched:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        watch(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(monitor, "watch", fails)
    with pytest.raises(UnavailableError, match="can't be started: No space left"):
        start_worker(monitor, "model_0_0", server_environment(), "serve")
    eventually(lambda: not _threads(), "the thread ends")
