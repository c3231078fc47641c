"""The threads on which requests wait that must not hold up the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from conch.core.errors import UnavailableError
from conch.frontends.http.parsing import ParsingPool
from conch.frontends.pool import Pool

T = TypeVar("T")

_QUICK_THREADS = 2
_UNLOAD_THREADS = 2
_LOAD_THREADS = 32
_CHECK_THREADS = 4


class Pools:
    """Pools that are apart so that what waits in one holds up nothing of the others.

    Attributes:
        index: Runs what reads the repository, which may wait for storage that hangs.
        quick: Opens regions.
        unloads: Runs unloads.
        loads: Runs loads, however many and slow.
        checks: Waits for models that look whether they are ready.
        parsing: Reads bodies, and writes large ones.
    """

    def __init__(self) -> None:
        self.index = Pool(_QUICK_THREADS, "conch-http-index")
        self.quick = Pool(_QUICK_THREADS, "conch-http-quick")
        self.unloads = Pool(_UNLOAD_THREADS, "conch-http-unload")
        self.loads = Pool(_LOAD_THREADS, "conch-http-load")
        self.checks = Pool(_CHECK_THREADS, "conch-http-ready")
        self.parsing = ParsingPool()

    def close(self, left: Callable[[], float]) -> bool:
        """Takes no more work, gives up what has not begun, and waits for what has.

        Args:
            left: How many seconds there are left for that.

        Returns:
            Whether all has ended.
        """
        pools = (self.parsing, self.index, self.quick, self.unloads, self.checks, self.loads)
        return all([pool.close(left()) for pool in pools])


async def run_on(pool: Executor, work: Callable[..., T], *arguments: object) -> T:
    """Runs something on a pool without blocking the loop.

    Raises:
        UnavailableError: The pool was closed before it could begin.
    """
    return await _result_of(lambda: pool.submit(work, *arguments))


async def parse_on(
    pool: ParsingPool, client: str, gone: Callable[[], bool], work: Callable[..., T], *arguments: object
) -> T:
    """Runs something on the pool for parsing without blocking the loop.

    Args:
        pool: The pool.
        client: The client's address.
        gone: Whether the client has hung up; asked on any thread.
        work: What to run.
        arguments: What it takes.

    Raises:
        AbandonedError: The client has hung up before it was done.
        UnavailableError: The pool was closed before it could begin.
    """
    return await _result_of(lambda: pool.submit_for(client, gone, work, *arguments))


async def _result_of(begin: Callable[[], Future[T]]) -> T:
    try:
        future = begin()
    except RuntimeError:  # the pool is closed
        raise UnavailableError("Server exiting") from None
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if future.cancelled() and not (task and task.cancelling()):
            raise UnavailableError("Server exiting") from None
        raise
