"""The threads on which requests wait that must not hold up the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from conch.core.errors import UnavailableError
from conch.frontends.http.parsing import ParsingPool
from conch.frontends.thread_pool import OperationPools

T = TypeVar("T")


class Pools:
    """The thread pools of the REST front end.

    Attributes:
        operations: Run operations that block.
        parsing: Reads bodies, and writes large ones.
    """

    def __init__(self) -> None:
        self.operations = OperationPools("conch-http")
        self.parsing = ParsingPool()

    def close(self, left: Callable[[], float]) -> bool:
        """Takes no more work, gives up what has not begun, and waits for what has.

        Args:
            left: How many seconds there are left for that.

        Returns:
            Whether all has ended.
        """
        parsed = self.parsing.close(left())
        return self.operations.close(left) and parsed


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
