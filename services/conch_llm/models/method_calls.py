"""Runs `chat` and `complete`: any mixture of functions, coroutines and generators, once for each choice.

Async ones run on the event loop of their instance, others on threads, since they may block. A thread sends
what its generator yields. Responses of an async generator are yielded to the runtime, which sends them.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, aclosing, suppress
from typing import Any, TypeVar

from conch.backends.python.api.pb_request import ReceivedRequest
from conch.backends.python.api.pb_response import InferenceResponse
from conch_llm.deltas import Delta
from conch_llm.models.answers import MethodCall

Result = TypeVar("Result")
Responses = AsyncGenerator[InferenceResponse, None]

_MOST_THREADS = 1024
"""Enough for methods that block; further calls wait for a thread."""


class Threads:
    """Threads for functions that may block."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_MOST_THREADS, "conch-text")

    def run(self, function: Callable[[], Result]) -> Awaitable[Result]:
        """Runs a function; what it calls of the server belongs to the caller's request."""
        within = contextvars.copy_context().run
        return asyncio.get_running_loop().run_in_executor(self._pool, within, function)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function, or a coroutine function on the event loop."""
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        result = await self.run(lambda: function(*args))
        return await result if inspect.isawaitable(result) else result

    async def generate(self, method: Callable[[Any], Any], asked: Any, call: MethodCall) -> Responses:
        """Runs a method to its end, or until nothing more is wanted, and closes its generator."""
        if inspect.isasyncgenfunction(method) or inspect.iscoroutinefunction(method):
            result = method(asked)
        else:
            result = await self.run(lambda: _send_all(method(asked), call))
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, AsyncIterator):
            async with AsyncExitStack() as stack:
                if hasattr(result, "aclose"):
                    stack.push_async_callback(result.aclose)
                async for item in result:
                    for response in call.take(item):
                        yield response
                    if call.over:
                        return
        elif result is not None:
            await self.run(lambda: _send_all(result, call))

    def close(self) -> None:
        """Ends threads that have nothing to do."""
        self._pool.shutdown(wait=False)


def _send_all(result: Any, call: MethodCall) -> Any:
    """Sends a result's items; returns a result that only the event loop can run."""
    if isinstance(result, str | Delta):
        call.send(result)
    elif isinstance(result, AsyncIterator) or inspect.isawaitable(result):
        return result
    elif isinstance(result, Iterable) and not isinstance(result, bytes | Mapping):
        with ExitStack() as stack:
            if hasattr(result, "close"):
                stack.callback(result.close)
            for item in result:
                call.send(item)
                if call.over:
                    break
    else:
        raise TypeError(f"a model must yield or return str or conch_llm.Delta, not {type(result).__name__}")
    return None


async def merged(streams: Sequence[Responses]) -> Responses:
    """Runs streams concurrently; the first exception ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as responses:
            async for response in responses:
                yield response
        return
    queue: asyncio.Queue[InferenceResponse | BaseException | None] = asyncio.Queue(1)

    async def pump(stream: Responses) -> None:
        try:
            async with aclosing(stream) as responses:
                async for response in responses:
                    await queue.put(response)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # boundary: the model's code; raised below
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.ensure_future(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                running -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Cancellation:
    """Cancels the running task when its request is cancelled, but only while it waits for the model."""

    def __init__(self, request: ReceivedRequest) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._waits = False
        request.call_if_cancelled(self._cancelled)

    async def wait_for(self, awaitable: Awaitable[Result]) -> Result:
        """Waits for the model. Raises CancelledError: the request is cancelled, or the task."""
        self._waits = True
        try:
            return await awaitable
        finally:
            self._waits = False

    def _cancelled(self) -> None:
        with suppress(RuntimeError):  # the instance has closed its loop
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._waits and self._task is not None:
            self._task.cancel()
