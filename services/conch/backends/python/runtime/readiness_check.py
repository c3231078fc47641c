"""Calls a model's `is_ready` with a time limit.

Threads: ``conch-<instance>-ready`` runs one check at a time. Locks: `_lock` guards the start of the thread
and what was logged last.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import numpy as np

from conch.backends.python.runtime.event_loop import EventLoop
from conch.backends.python.runtime.tracebacks import model_exc_info
from conch.core.errors import message_of

log = logging.getLogger(__name__)

BUDGET_S = 5.0
"""Time limit of a check, in seconds."""


class ReadinessCheck:
    """Runs `is_ready` on its own thread; concurrent callers share the result.

    A check over the time limit means not ready, and so does each later query until it ends; there is never
    more than one thread. `loop` runs `is_ready` if that is a coroutine function.
    """

    def __init__(
        self, name: str, is_ready: Callable[[], Any], loop: EventLoop | None, budget_s: float = BUDGET_S
    ) -> None:
        self._name = name
        self._is_ready = is_ready
        self._loop = loop
        self._budget_s = budget_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._started = 0.0
        self._answer = False
        self._last_reported = True

    def start(self) -> None:
        """Starts a check unless one is running."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._check, name=f"conch-{self._name}-ready", daemon=True
                )
                self._started = time.monotonic()
                try:
                    self._thread.start()
                except RuntimeError as error:  # out of memory or threads
                    self._thread, self._answer = None, False
                    log.error("is_ready of model '%s' can't be asked: %s", self._name, error)

    def result(self) -> bool:
        """True if the instance reports ready within the time limit."""
        ready = self._ended() and self._answer
        with self._lock:
            changed, self._last_reported = self._last_reported != ready, ready
        if changed:
            log.warning("model '%s' says that it is %s", self._name, "ready" if ready else "not ready")
        return ready

    def close(self) -> None:
        """Waits for a running check, up to its time limit."""
        if not self._ended():
            log.error("is_ready of model '%s' still runs while the model is unloaded", self._name)

    def _ended(self) -> bool:
        thread = self._thread
        if thread is None:
            return True
        thread.join(max(self._started + self._budget_s - time.monotonic(), 0.0))
        return not thread.is_alive()

    def _await(self, awaitable: Awaitable[Any]) -> Any:
        assert self._loop is not None, "coroutine functions have a loop"
        future = self._loop.run(awaitable)
        try:
            answer, error = future.result(self._budget_s)
        except (TimeoutError, FutureTimeoutError):  # distinct types before Python 3.11, which workers may run
            future.cancel()
            raise TimeoutError(f"it took longer than {self._budget_s} s") from None
        if error is not None:
            raise error
        return answer

    def _check(self) -> None:
        self._answer = False
        try:
            answer = self._is_ready()
            if self._loop is not None and inspect.isawaitable(answer):
                answer = self._await(answer)
            if not isinstance(answer, bool | np.bool_):
                raise TypeError(f"is_ready must return a bool, not {type(answer).__name__}")
            self._answer = bool(answer)
        except BaseException as error:  # a model may raise anything; the thread must survive
            log.error(
                "is_ready of model '%s' failed: %s",
                self._name,
                message_of(error),
                exc_info=model_exc_info(error),
            )
