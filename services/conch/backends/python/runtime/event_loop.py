"""An event loop on a thread of its own, for models whose `execute` is a coroutine."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any

from conch.backends.python.runtime.tracebacks import model_exc_info

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
"""How long `EventLoop.close` waits for coroutines before it cancels them."""

Outcome = tuple[Any, BaseException | None]
"""What a coroutine returned, or what it raised."""


class EventLoop:
    """Runs the coroutines of one instance; tasks they start go on after they return.

    It runs until it is closed, whatever a model does to it: asyncio lets `SystemExit` and `KeyboardInterrupt`
    of a task end the loop, and any code that runs on it may stop it, but others wait for what it runs.

    Args:
        name: The instance's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"conch-{name}-loop", daemon=True)
        self._thread.start()

    def run(self, awaitable: Awaitable[Any]) -> Future[Outcome]:
        """Starts a coroutine; its future never holds an exception."""
        return asyncio.run_coroutine_threadsafe(_outcome(awaitable), self._loop)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Waits for everything that runs, cancels what is left, and ends the thread."""
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
                # That task has failed, and whoever waits for it is told. The others are to go on.
                log.error(
                    "a background task of model '%s' raised %s; its event loop goes on",
                    self._name,
                    type(error).__name__,
                    exc_info=model_exc_info(error),
                )
            else:
                if not self._closing:
                    log.error("model '%s' stopped its event loop, which goes on", self._name)


async def _outcome(awaitable: Awaitable[Any]) -> Outcome:
    # SystemExit and KeyboardInterrupt too: asyncio would end the loop with them.
    try:
        return await awaitable, None
    except BaseException as error:
        return None, error


async def _drain(timeout_s: float) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
