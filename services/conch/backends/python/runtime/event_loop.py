"""An event loop on its own thread, for models whose `execute` is a coroutine.

Threads: ``conch-<instance>-loop``, one per instance; `run` and `close` may be called from any other thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from conch.backends.python.runtime.tracebacks import model_exc_info

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
"""Seconds that `EventLoop.close` waits for coroutines before it cancels them."""

TaskEnd = tuple[Any, BaseException | None]
"""Return value or exception of a coroutine."""


def in_coroutine() -> bool:
    """True if an event loop runs on this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class EventLoop:
    """Runs the coroutines of one instance; tasks they start go on after they return.

    The loop runs until it is closed. asyncio ends a loop on `SystemExit` or `KeyboardInterrupt` of a task,
    and model code may stop it; the thread then restarts it for the other coroutines.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"conch-{name}-loop", daemon=True)
        self._thread.start()

    def run(self, awaitable: Awaitable[Any]) -> Future[TaskEnd]:
        """Starts a coroutine; its future never holds an exception."""
        return asyncio.run_coroutine_threadsafe(_outcome(awaitable), self._loop)

    def call(self, function: Callable[[], None]) -> None:
        """Calls a function on the loop's thread; on this one if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            function()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Waits for all tasks, cancels those left at the timeout, and ends the thread."""
        asyncio.run_coroutine_threadsafe(_drain(timeout_s), self._loop).result()
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        while not self._closing and not self._loop.is_closed():
            try:
                self._loop.run_forever()
            except BaseException as error:
                # The task has failed and its waiter has been notified; other tasks go on.
                log.error(
                    "a background task of model '%s' raised %s; its event loop goes on",
                    self._name,
                    type(error).__name__,
                    exc_info=model_exc_info(error),
                )
            else:
                if not self._closing:
                    log.error("model '%s' stopped its event loop, which goes on", self._name)


async def _outcome(awaitable: Awaitable[Any]) -> TaskEnd:
    try:
        return await awaitable, None
    except BaseException as error:  # boundary: a model; its SystemExit would end the loop
        return None, error


async def _drain(timeout_s: float) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
