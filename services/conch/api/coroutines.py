"""Coroutines of bound functions, run on an event loop of their instance while its thread waits for them.

What stands above a function, a decorator or the instance, settles what the function returns: an awaitable
becomes its result, an async generator a plain one. So nothing else has to know of coroutines.
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
    """The event loop of one instance, made for its first coroutine.

    Args:
        name: The instance's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: EventLoop | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Waits for an awaitable; returns or raises what it does."""
        with self._lock:
            if self._loop is None:
                self._loop = EventLoop(self._name)
        result, error = self._loop.run(awaitable).result()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Waits for what runs and ends the loop."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Has `resolve_awaitable` use this loop on this thread meanwhile."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[Coroutines | None] = ContextVar("conch_coroutines", default=None)


def resolve_awaitable(returned: Any) -> Any:
    """What a function returned, with its coroutine or its async generator run."""
    if isinstance(returned, AsyncIterator):
        return _steps(returned)
    return _run(returned) if isawaitable(returned) else returned


def resolve_awaitables(returned: Sequence[Any], alone: bool) -> list[Any]:
    """The same of what several calls returned; their coroutines run side by side.

    Args:
        returned: What they returned.
        alone: Whether an exception is raised; else it stands in place of the result.
    """
    waiting = [each for each in returned if isawaitable(each)]
    results = iter(_run(_gathered(waiting, alone)) if waiting else ())
    return [next(results) if isawaitable(each) else resolve_awaitable(each) for each in returned]


async def _gathered(waiting: Sequence[Awaitable[Any]], alone: bool) -> list[Any]:
    return await asyncio.gather(*waiting, return_exceptions=not alone)


def _run(awaitable: Awaitable[Any]) -> Any:
    coroutines = _current.get()
    if coroutines is not None:
        return coroutines.run(awaitable)
    return asyncio.run(_awaited(awaitable))  # a function that no server calls, as in a test of its own


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _steps(stream: AsyncIterator[Any]) -> Iterator[Any]:
    """What an async generator yields; one that is left early is closed."""
    try:
        while (item := _run(_next(stream))) is not _END:
            yield item
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            _run(close())


async def _next(stream: AsyncIterator[Any]) -> Any:
    return await anext(stream, _END)
