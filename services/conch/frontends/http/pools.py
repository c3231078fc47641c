"""The threads on which requests wait that must not hold up the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from conch.core.errors import UnavailableError

T = TypeVar("T")

_QUICK_THREADS = 2
_UNLOAD_THREADS = 2
_LOAD_THREADS = 32
_CHECK_THREADS = 4


class Pools:
    """Pools that are apart so that what waits in one holds up nothing of the others.

    Attributes:
        quick: Runs what reads the repository, opens regions or parses large bodies.
        unloads: Runs unloads: an index may wait for storage that hangs, whoever wants a model gone must not.
        loads: Runs loads, however many and slow.
        checks: Waits for models that look whether they are ready.
    """

    def __init__(self) -> None:
        self.quick = ThreadPoolExecutor(_QUICK_THREADS, "conch-http-quick")
        self.unloads = ThreadPoolExecutor(_UNLOAD_THREADS, "conch-http-unload")
        self.loads = ThreadPoolExecutor(_LOAD_THREADS, "conch-http-load")
        self.checks = ThreadPoolExecutor(_CHECK_THREADS, "conch-http-ready")

    def close(self, wait: bool) -> None:
        """Takes no more work, and gives up what has not begun.

        Args:
            wait: Whether to wait for what has; a load may take longer than anybody waits.
        """
        for pool in (self.quick, self.unloads, self.checks, self.loads):
            pool.shutdown(wait=wait, cancel_futures=True)


async def run_on(pool: Executor, work: Callable[..., T], *arguments: object) -> T:
    """Runs something on a pool without blocking the loop.

    Raises:
        UnavailableError: The pool was closed before it could begin.
    """
    try:
        future = pool.submit(work, *arguments)
    except RuntimeError:  # the pool is closed
        raise UnavailableError("Server exiting") from None
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if future.cancelled() and not (task and task.cancelling()):
            raise UnavailableError("Server exiting") from None
        raise
