"""Threads of operations: one pool for each kind that may block, so that slow loads delay only loads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from conch.core.server_state import ServerState
from conch.door.operation_table import RunsOn
from conch.door.thread_pool import QueueBounds, ThreadPool

T = TypeVar("T")

_KINDS = {
    RunsOn.DESCRIPTION: ("describe", 2, "calls for metadata and configs"),
    RunsOn.STATISTICS: ("statistics", 2, "calls for statistics"),
    RunsOn.REPOSITORY: ("repository", 2, "calls for the repository index"),
    RunsOn.UNLOAD: ("unload", 2, "unloads"),
    RunsOn.READINESS: ("ready", 4, "checks of readiness"),
    RunsOn.MEMORY: ("memory", 2, "calls for shared memory"),
    RunsOn.LOAD: ("load", 32, "loads"),
}


class OperationPools:
    """The pools of a server."""

    def __init__(self) -> None:
        self._pools = {
            runs_on: ThreadPool(threads, f"conch-{suffix}", bounds=QueueBounds(what))
            for runs_on, (suffix, threads, what) in _KINDS.items()
        }

    def submit(
        self, runs_on: RunsOn, core: ServerState, size: int, work: Callable[[], None]
    ) -> Future[None] | None:
        """Runs work on the thread for its kind: at once on this thread, which returns None, or on a pool.

        Raises:
            RuntimeError: The pool is closed, or no thread can be started.
            ResourceExhaustedError: Too much waits already.
        """
        match runs_on:
            case RunsOn.CALLER:
                needed = False
            case RunsOn.READINESS:
                needed = any(core.readiness())
            case _:
                needed = True
        if needed:
            return self._pools[runs_on].submit_sized(size, work)
        work()
        return None

    def close(self, remaining_s: Callable[[], float]) -> bool:
        """Closes all pools within the time that `remaining_s` returns; returns whether all work has ended."""
        return all([pool.close(remaining_s()) for pool in self._pools.values()])
