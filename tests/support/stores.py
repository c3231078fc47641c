"""A repository whose storage hangs, fails and comes back as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from tests.support.waiting import PATIENCE_S

from conch_control.repository.source import ModelSource, Repository

WAIT_S = PATIENCE_S


class HangingStore:
    """A `Repository` in front of another one, or of models that a test gives it.

    Attributes:
        models_now: Its models, unless it is in front of another one.
        error: Error that a listing fails with when it ends, if any.
        begun: Released for each listing that begins.
        listings: Number of listings that have begun.
        most: The most that were under way at the same time.
        threads: Those that have listed it.
    """

    def __init__(self, location: str = "s3://bucket", behind: Repository | None = None) -> None:
        self.location = location
        self.models_now: dict[str, ModelSource] = {}
        self.error: Exception | None = None
        self.begun = threading.Semaphore(0)
        self.listings = self.most = 0
        self.threads: set[threading.Thread] = set()
        self._behind = behind
        self._going = threading.Event()
        self._going.set()
        self._lock = threading.Lock()
        self._under_way = 0

    def hang(self) -> None:
        """Has listings wait from now on."""
        self._going.clear()

    def go_on(self) -> None:
        """Has all listings that wait end."""
        self._going.set()

    def check(self) -> None:
        """It is there."""

    def models(self) -> Mapping[str, ModelSource]:
        """Models at the time when the listing began."""
        with self._lock:
            self.listings += 1
            self._under_way += 1
            self.most = max(self.most, self._under_way)
            self.threads.add(threading.current_thread())
        try:
            found = dict(self.models_now if self._behind is None else self._behind.models())
            self.begun.release()
            assert self._going.wait(WAIT_S)
            if self.error is not None:
                raise self.error
            return found
        finally:
            with self._lock:
                self._under_way -= 1

    def close(self) -> None:
        """It goes on hanging: that is what storage does."""


T = TypeVar("T")


def on_a_thread(function: Callable[[], T]) -> Future[T]:
    """Runs something that may hang on a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future
