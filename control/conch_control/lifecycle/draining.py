"""What finishes in the background: versions that are no longer published, instances that are not needed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from conch.core.errors import ConchError
from conch.core.registry import Entry, Registry
from conch.core.servable import Servable
from conch_control.lifecycle.ensemble_loader import parts_of
from conch_control.lifecycle.memory_usage import give_back, log_given_back, resident_bytes
from conch_control.lifecycle.staging import Lease
from conch_control.lifecycle.version_states import Book
from conch_control.port import VersionStatus

log = logging.getLogger(__name__)


class Drains:
    """The threads that wait for the last requests of what is going.

    Args:
        lock: Guards what is going; re-entrant.
        registry: Where models are reached that are going and have begun something.
        book: Where versions are said to be gone.
    """

    def __init__(self, lock: threading.Condition, registry: Registry, book: Book) -> None:
        self._lock = lock
        self._registry = registry
        self._book = book
        self._going: dict[threading.Thread, Servable] = {}
        self._stopping = False

    def keep_in_reach(self, models: Iterable[Servable], needed: bool = False) -> None:
        """Keeps versions in reach of those who have begun something on them, until they are closed.

        Args:
            models: The versions, which are still published.
            needed: Whether requests of ensembles need them.
        """
        for model in models:
            if needed or model.spec.sequence is not None:
                self._registry.begin_draining(model.spec.identifier, model)

    def users_of(self, name: str) -> list[threading.Thread]:
        """Threads that wait for the last requests of ensembles which need a model."""
        with self._lock:
            return [
                thread
                for thread, user in self._going.items()
                if name in parts_of(Entry({user.spec.version: user}))
            ]

    def retire(
        self,
        model: Servable,
        lease: Lease | None,
        status: VersionStatus | None = None,
        done: Callable[[], None] = lambda: None,
        users: Iterable[threading.Thread] = (),
    ) -> None:
        """Closes a version that is no longer published.

        Args:
            model: The version.
            lease: The files it is served from.
            status: What is said of it now, to be changed at the end unless something else has become of it.
                None where a successor has taken over.
            done: What to do after that.
            users: What `users_of` said when it was taken out of service: they are waited for first.
        """

        def unload() -> None:
            spec = model.spec
            try:
                for user in users:
                    user.join()
                model.close()
                log.info("successfully unloaded '%s' version %d", spec.identifier, spec.version)
            finally:
                self._registry.end_draining(spec.identifier, model)
                if lease is not None:
                    lease.drop()
                if status is not None:
                    self._book.drained(spec.identifier, status)
                done()

        self.start(model, unload, lease is not None and lease.early)

    def start(self, model: Servable, drain: Callable[[], None], early: bool = False) -> threading.Thread:
        """Has what is no longer wanted of a model finish on a thread of its own.

        Args:
            model: The model.
            drain: Waits, and closes it.
            early: Whether it was loaded while the process started.

        Returns:
            The thread, for `join`.
        """
        what = f"'{model.spec.name}' version {model.spec.version}"
        todo = [drain]

        def run() -> None:
            before = resident_bytes()
            try:
                todo.pop()()  # nothing may refer to the model when its memory is collected
            finally:
                thread = threading.current_thread()
                with self._lock:
                    stopping = self._stopping
                    del self._going[thread]
                    self._lock.notify_all()
            if not stopping:
                give_back(early)
                log_given_back(what, before)

        thread = threading.Thread(target=run, name=f"conch-unload-{model.spec.name}", daemon=True)
        with self._lock:
            self._going[thread] = model
            thread.start()  # here, so that whoever finds it can join it
        return thread

    def join(self, threads: Iterable[threading.Thread], given_up: Callable[[], bool]) -> None:
        """Waits for threads of `start`, or until the wait is given up; called without the lock held."""
        waited = set(threads)
        with self._lock:
            self._lock.wait_for(lambda: given_up() or waited.isdisjoint(self._going))

    def stop(self) -> None:
        """Says that the process ends: memory need not be given back."""
        with self._lock:
            self._stopping = True

    def wait(self, deadline: float) -> None:
        """Waits until all that is going now is gone, or for the monotonic time to be over."""
        with self._lock:
            threads = list(self._going)
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def give_up(self, error: ConchError) -> bool:
        """Answers what is still queued with an error; whether there was anything left to wait for."""
        with self._lock:
            left = list(self._going.values())
        for model in left:
            model.fail_queued(error)
        return bool(left)


def waves(entries: Mapping[str, Entry]) -> Iterable[list[str]]:
    """All models, ensembles before what they are made of: their requests need it to the end."""
    left = set(entries)
    while left:
        needed = {part for name in left for part in parts_of(entries[name]) if part != name}
        wave = sorted(left - needed) or sorted(left)
        yield wave
        left -= set(wave)
