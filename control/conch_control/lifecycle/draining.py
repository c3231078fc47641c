"""Finishes unloaded versions and removed instances in the background.

Owns: one thread `conch-unload-<model>` per closing version. Locks: the load queue's lock, never held while
waiting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from conch.core.errors import ConchError
from conch.core.registry import Entry, Registry
from conch.core.servable import Servable
from conch_control.agent_api import VersionStatus
from conch_control.lifecycle.ensemble_loader import composing_models
from conch_control.lifecycle.memory_usage import (
    ReleasePace,
    log_released,
    release_memory,
    resident_bytes,
)
from conch_control.lifecycle.staging import Lease
from conch_control.lifecycle.version_states import VersionStates

log = logging.getLogger(__name__)


class Drainer:
    """Runs the threads that wait for the last requests and then close."""

    def __init__(self, lock: threading.Condition, registry: Registry, states: VersionStates) -> None:
        self._lock = lock
        self._registry = registry
        self._states = states
        self._draining: dict[threading.Thread, Servable] = {}
        self._stopping = False
        self._pace = ReleasePace()

    def keep_resolvable(self, models: Iterable[Servable], needed: bool = False) -> None:
        """Keeps versions resolvable until they close, for sequences in flight and, if `needed`, ensembles."""
        for model in models:
            if needed or model.spec.sequence is not None:
                self._registry.begin_draining(model.spec.identifier, model)

    def dependents_of(self, name: str) -> list[threading.Thread]:
        """Threads that drain ensembles which contain a model."""
        with self._lock:
            return [
                thread
                for thread, user in self._draining.items()
                if name in composing_models(Entry({user.spec.version: user}))
            ]

    def retire(
        self,
        model: Servable,
        lease: Lease | None,
        status: VersionStatus | None = None,
        done: Callable[[], None] = lambda: None,
        users: Iterable[threading.Thread] = (),
        gone: Callable[[], None] = lambda: None,
    ) -> None:
        """Closes a version that is no longer published, after the ensembles that use it (`dependents_of`).

        Its `status` becomes UNLOADED unless it has changed since; None for a version that was replaced.
        `done` is called once it is closed, `gone` once its memory is free.
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
                    self._states.mark_unloaded(spec.identifier, status)
                done()

        on_gpu = any(group.kind == "GPU" for group in model.spec.instance_groups)
        taken = None if status is None or on_gpu else status.host_bytes
        self.start(model, unload, lease is not None and lease.early, gone, taken)

    def start(
        self,
        model: Servable,
        drain: Callable[[], None],
        early: bool = False,
        gone: Callable[[], None] = lambda: None,
        taken: int | None = None,
    ) -> threading.Thread:
        """Runs `drain` on a thread of its own and then releases memory; returns the thread for `join`.

        `early` marks a model that was loaded before the garbage collector was frozen. `gone` is called last.
        `taken` is the memory that the model has taken; None if unknown.
        """
        what = f"'{model.spec.name}' version {model.spec.version}"
        todo = [drain]

        def run() -> None:
            before = resident_bytes()
            try:
                todo.pop()()  # drops the last reference before memory is released
            finally:
                thread = threading.current_thread()
                with self._lock:
                    releases = not self._stopping and self._pace.due(None if early else taken)
                    del self._draining[thread]
                    self._lock.notify_all()
            if releases:
                release_memory(early)
                log_released(what, before)
            gone()

        thread = threading.Thread(target=run, name=f"conch-unload-{model.spec.name}", daemon=True)
        with self._lock:
            self._draining[thread] = model
            thread.start()  # under the lock: a listed thread can be joined
        return thread

    def join(self, threads: Iterable[threading.Thread], given_up: Callable[[], bool]) -> None:
        """Waits for threads of `start` or until cancelled; call without holding the lock."""
        waited = set(threads)
        with self._lock:
            self._lock.wait_for(lambda: given_up() or waited.isdisjoint(self._draining))

    def stop(self) -> None:
        """Skips releasing memory from now on, as the process ends."""
        with self._lock:
            self._stopping = True

    def wait(self, deadline: float) -> None:
        """Waits for all current threads until a monotonic deadline in seconds."""
        with self._lock:
            threads = list(self._draining)
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def fail_queued(self, error: ConchError) -> bool:
        """Fails requests that are still queued; returns True if any version was still draining."""
        with self._lock:
            left = list(self._draining.values())
        for model in left:
            model.fail_queued(error)
        return bool(left)


def unload_order(entries: Mapping[str, Entry]) -> Iterable[list[str]]:
    """Yields batches of models to unload, ensembles before their composing models."""
    left = set(entries)
    while left:
        needed = {part for name in left for part in composing_models(entries[name]) if part != name}
        wave = sorted(left - needed) or sorted(left)
        yield wave
        left -= set(wave)
