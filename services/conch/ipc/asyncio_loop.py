"""Coroutines on an I/O loop: `AsyncioLoop` is the event loop of asyncio's tasks and futures there.

It has what tasks, futures, timeouts and asyncio's own locks need: callbacks, timers, readers, and work on
threads. Connections of asyncio need its own loops: their methods raise NotImplementedError.

asyncio has a running loop for each thread. Here it is set while a callback runs and not between, as models
run on the same thread, whose code may call ``asyncio.run``.

Threads and locks: the I/O loop's thread, but for `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from asyncio.events import _set_running_loop  # for implementations of loops, says its docstring
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from conch.ipc.loop import IoLoop, Timer

log = logging.getLogger(__name__)

_NS = 1e9

_T = TypeVar("_T")


class Callback:
    """A callback that is to run; see `asyncio.Handle`."""

    __slots__ = ("_arguments", "_context", "_loop", "_work")

    def __init__(
        self,
        loop: AsyncioLoop,
        work: Callable[..., object],
        arguments: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        self._loop = loop
        self._work: Callable[..., object] | None = work
        self._arguments = arguments
        self._context = contextvars.copy_context() if context is None else context

    def __call__(self) -> None:
        """Runs it, unless it was cancelled."""
        work = self._work
        if work is None:
            return
        _set_running_loop(self._loop)
        try:
            self._context.run(work, *self._arguments)
        except Exception as error:  # boundary: the loop goes on
            self._loop.call_exception_handler({"message": f"{work!r} failed", "exception": error})
        finally:
            _set_running_loop(None)

    def cancel(self) -> None:
        """Drops it unless it has begun."""
        self._work = None
        self._arguments = ()

    def cancelled(self) -> bool:
        """True if it was cancelled."""
        return self._work is None


class TimedCallback(Callback):
    """A callback of a timer; see `asyncio.TimerHandle`."""

    __slots__ = ("_timer", "_when")

    def __init__(
        self,
        loop: AsyncioLoop,
        when: float,
        work: Callable[..., object],
        arguments: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        Callback.__init__(self, loop, work, arguments, context)
        self._when = when
        self._timer: Timer = loop.io.call_at(round(when * _NS), self)

    def cancel(self) -> None:
        """Drops it unless it has begun."""
        Callback.cancel(self)
        self._timer.cancel()

    def when(self) -> float:
        """Time at which it runs, in seconds of the loop's clock."""
        return self._when


class _Reader:
    """Runs a callback for each event of a descriptor."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def on_ready(self, events: int) -> None:
        self._callback()


class AsyncioLoop(asyncio.AbstractEventLoop):
    """The event loop of coroutines on an I/O loop.

    Args:
        io: The I/O loop, which has been started.

    Attributes:
        io: The I/O loop.
    """

    def __init__(self, io: IoLoop) -> None:
        self.io = io
        self._closed = False
        self._readers: set[int] = set()
        self._threads: ThreadPoolExecutor | None = None

    # The signatures are those of typeshed, whose handles are classes of asyncio.

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Callback:
        """See `asyncio.AbstractEventLoop`. Raises RuntimeError: the loop is closed."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        called = Callback(self, callback, args, context)
        self.io.call_soon(called)
        return called

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> TimedCallback:
        """See `asyncio.AbstractEventLoop`."""
        return TimedCallback(self, time.monotonic() + delay, callback, args, context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> TimedCallback:
        """See `asyncio.AbstractEventLoop`."""
        return TimedCallback(self, when, callback, args, context)

    def time(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def create_future(self) -> asyncio.Future[Any]:
        """See `asyncio.AbstractEventLoop`."""
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, _T] | Generator[Any, None, _T], **options: Any
    ) -> asyncio.Task[_T]:
        """See `asyncio.AbstractEventLoop`."""
        return asyncio.Task(coro, loop=self, **options)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        """See `asyncio.AbstractEventLoop`; `asyncio.to_thread` calls it."""
        if executor is None:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(thread_name_prefix="conch-asyncio")
            executor = self._threads
        return asyncio.wrap_future(executor.submit(func, *args), loop=self)

    def add_reader(  # type: ignore[override]
        self, fd: Any, callback: Callable[..., object], *args: Any
    ) -> None:
        """Calls `callback` when a descriptor, or an object that has one, can be read."""
        file = fd if isinstance(fd, int) else fd.fileno()
        self.io.register(file, _Reader(Callback(self, callback, args, None)))
        self._readers.add(file)

    def remove_reader(self, fd: Any) -> bool:
        """Ends `add_reader`; False without one."""
        file = fd if isinstance(fd, int) else fd.fileno()
        if file not in self._readers:
            return False
        self._readers.remove(file)
        self.io.unregister(file)
        return True

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Logs an error that no task or future has."""
        log.error("%s", context.get("message"), exc_info=context.get("exception"))

    def get_debug(self) -> bool:
        """False."""
        return False

    def is_running(self) -> bool:
        """True until it is closed."""
        return not self._closed

    def is_closed(self) -> bool:
        """True once it is closed."""
        return self._closed

    def close(self) -> None:
        """Takes no more callbacks; blocks until its threads have ended."""
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown()

    async def cancel_tasks(self) -> None:
        """Cancels all other tasks, and waits for their end."""
        others = asyncio.all_tasks(self) - {asyncio.current_task(self)}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def asyncio_loop(io: IoLoop) -> AsyncioLoop:
    """The event loop of coroutines on an I/O loop that has been started."""
    return AsyncioLoop(io)  # type: ignore[abstract]  # what asyncio leaves to loops raises NotImplementedError
