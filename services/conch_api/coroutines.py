"""Runs coroutines of bound functions on an event loop of their instance, while the instance's thread waits.

Callers (decorators, the instance) pass each result through `resolve_awaitable`: an awaitable becomes its
result, an async generator an iterator. No other code handles coroutines.

Threads: one event loop per instance, created for its first coroutine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import isawaitable
from typing import Any

from conch.backends.python.runtime.event_loop import EventLoop

_END = object()


class Coroutines:
    """The event loop of one instance.

    Args:
        name: The instance's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: EventLoop | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Waits for an awaitable; returns or raises its outcome."""
        with self._lock:
            if self._loop is None:
                self._loop = EventLoop(self._name)
        result, error = self._loop.run(awaitable).result()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Waits for running coroutines and ends the loop."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes `resolve_awaitable` use this loop on this thread during the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[Coroutines | None] = ContextVar("conch_coroutines", default=None)


def resolve_awaitable(returned: Any) -> Any:
    """Returns a function's result; runs a coroutine, wraps an async generator as an iterator."""
    if isinstance(returned, AsyncIterator):
        return _steps(returned)
    return _run(returned) if isawaitable(returned) else returned


def resolve_awaitables(returned: Sequence[Any], alone: bool) -> list[Any]:
    """Resolves several results, coroutines concurrently; an exception is raised only if `alone`."""
    waiting = [each for each in returned if isawaitable(each)]
    results = iter(_run(_gathered(waiting, alone)) if waiting else ())
    return [next(results) if isawaitable(each) else resolve_awaitable(each) for each in returned]


async def _gathered(waiting: Sequence[Awaitable[Any]], alone: bool) -> list[Any]:
    return await asyncio.gather(*waiting, return_exceptions=not alone)


def _run(awaitable: Awaitable[Any]) -> Any:
    coroutines = _current.get()
    if coroutines is not None:
        return coroutines.run(awaitable)
    return asyncio.run(_awaited(awaitable))  # called outside a server, as in a unit test


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _steps(stream: AsyncIterator[Any]) -> Iterator[Any]:
    """Iterates over an async generator; closes it if the loop ends early."""
    try:
        while (item := _run(_next(stream))) is not _END:
            yield item
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            _run(close())


async def _next(stream: AsyncIterator[Any]) -> Any:
    return await anext(stream, _END)
