"""An object store for any thread: an event loop on a thread of its own, retries, and limits of time."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from conch.core.errors import ConchError
from conch_control.repository.storage.credentials import CredentialReader, redacted
from conch_control.repository.storage.locations import Location
from conch_control.repository.storage.stores import BusyError, OpenStore, Store

log = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class StoreTimeouts:
    """How long a store may take.

    Attributes:
        total_s: How long to go on trying.
        silence_s: How long it may say nothing.
        try_s: How long one listing may take; reading a block may take as long as bytes come in.
        block_s: How long reading one block may take in any case.
        first_wait_s: How long to wait before the second try; twice as long before each further one.
        longest_wait_s: The longest wait.
        open_s: How long making the client may take, which is work for this machine more than for the store.
    """

    total_s: float = 30.0
    silence_s: float = 10.0
    try_s: float = 30.0
    block_s: float = 300.0
    first_wait_s: float = 0.2
    longest_wait_s: float = 5.0
    open_s: float = 30.0

    @classmethod
    def of(cls, total_s: float) -> StoreTimeouts:
        """What fits a limit in seconds."""
        return cls(total_s, total_s / 3, total_s, total_s * 10, min(0.2, total_s / 10), total_s / 6)


class Connection:
    """The way to one store. Its thread is started by the first call.

    Args:
        location: Where it is.
        open_store: Opens it.
        credentials: Finds the credentials for it.
        patience: How long it may take.
    """

    def __init__(
        self,
        location: Location,
        open_store: OpenStore,
        credentials: CredentialReader,
        timeouts: StoreTimeouts,
    ) -> None:
        self.location = location
        self.timeouts = timeouts
        self._open_store = open_store
        self._credentials = credentials
        self._secrets: tuple[str, ...] = ()
        self._store: Store | None = None  # this and the next two are the loop's
        self._opening = asyncio.Lock()
        self._retried = ""  # why something is tried again, as it was logged last
        self._closing = threading.Lock()  # held while it is closed
        self._lock = threading.Lock()  # guards what follows
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._running: set[Future[Any]] = set()
        self._closed = False

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Runs something on the loop.

        Raises:
            OSError: The connection has been closed.
        """
        with self._lock:
            if self._closed:
                raise OSError(f"model repository '{self.location}' has been closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._serve, args=(self._loop,), name="conch-storage", daemon=True
                )
                self._thread.start()
            future = asyncio.run_coroutine_threadsafe(work(), self._loop)
            self._running.add(future)
        future.add_done_callback(self._ended)
        return future

    def call(self, operation: Callable[[Store], Awaitable[T]], try_s: float | None = None) -> T:
        """Carries an operation out, with retries, and waits for it.

        Raises:
            OSError: It failed, or took too long; the text names the repository.
        """
        timeouts = self.timeouts
        future = self.start(lambda: self.trying(operation, try_s or timeouts.try_s))
        limit_s = timeouts.open_s + timeouts.total_s + (try_s or timeouts.try_s) + 1.0
        try:
            # The loop keeps the time too, unless a library holds it up.
            return future.result(limit_s)
        except FutureCancelledError:
            raise OSError(f"model repository '{self.location}' has been closed") from None
        except TimeoutError as error:
            future.cancel()
            raise self.failure(error) from None

    async def trying(self, operation: Callable[[Store], Awaitable[T]], try_s: float) -> T:
        """Carries an operation out, with retries.

        Raises:
            OSError: It failed; the text names the repository.
            ConchError: The credentials are wrong.
        """
        timeouts = self.timeouts
        loop = asyncio.get_running_loop()
        deadline = None
        wait_s = timeouts.first_wait_s
        while True:
            store: Store | None = None
            try:
                async with asyncio.timeout(timeouts.open_s):
                    store = await self._opened()
                deadline = deadline or loop.time() + timeouts.total_s
                async with asyncio.timeout(try_s):
                    result = await operation(store)
                self._retried = ""
                return result
            except ConchError:
                raise
            except PermissionError as error:
                await self._forget()  # the next call looks whether there are other credentials
                raise self.failure(error) from None
            except TimeoutError:
                limit_s = timeouts.open_s if store is None else try_s
                failure: OSError = BusyError(f"no answer within {limit_s:g} s")
            except BusyError as error:
                failure = error
            except OSError as error:
                raise self.failure(error) from None
            except Exception as error:
                # A library's own kinds; and what it says of connections that were just closed under it.
                text = f"{type(error).__name__}: {error}"
                if store is None or store is self._store:
                    raise self.failure(OSError(text)) from None
                failure = BusyError(text)
            pause_s = wait_s * random.uniform(0.5, 1.0)  # so that servers do not come back all at once
            if deadline is None or loop.time() + pause_s >= deadline:
                raise self.failure(failure) from None
            reason = str(self.failure(failure))
            if reason != self._retried:  # else the log has it, from another try or from something beside this
                self._retried = reason
                log.info("%s; trying again", reason)
            await asyncio.sleep(pause_s)
            wait_s = min(wait_s * 2, timeouts.longest_wait_s)

    def failure(self, error: BaseException) -> OSError:
        """An error as it is to be seen: it names the repository, and no secrets."""
        reason = redacted(str(error) or "no answer", self._secrets)
        text = f"model repository '{self.location}': {reason}"
        for kind in (FileNotFoundError, PermissionError, BusyError):
            if isinstance(error, kind):
                return kind(text)
        return OSError(text)

    def close(self) -> None:
        """Ends what is under way, and the thread; a second call waits for the first one."""
        with self._closing:
            self._close()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            loop, thread, running = self._loop, self._thread, list(self._running)
        if loop is None or thread is None:
            return
        for future in running:
            future.cancel()
        ended = asyncio.run_coroutine_threadsafe(self._end(), loop)
        with suppress(TimeoutError, FutureCancelledError):
            ended.result(_CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_S)
        with self._lock:
            self._loop = self._thread = None

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()

    def _ended(self, future: Future[Any]) -> None:
        with self._lock:
            self._running.discard(future)

    async def _opened(self) -> Store:
        async with self._opening:
            if self._store is None:
                credentials = await asyncio.to_thread(self._credentials.read, self.location)
                self._secrets = credentials.secrets()
                try:
                    self._store = await self._open_store(self.location, credentials, self.timeouts.silence_s)
                except (OSError, ConchError):
                    raise
                except Exception as error:  # a library's own kinds: what is wrong with its settings
                    raise OSError(str(error) or type(error).__name__) from None
            return self._store

    async def _forget(self) -> None:
        self._credentials.forget()
        async with self._opening:
            store, self._store = self._store, None
        if store is not None:
            with suppress(Exception):
                await store.close()

    async def _end(self) -> None:
        current = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not current]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        store, self._store = self._store, None
        if store is not None:
            with suppress(Exception):  # it is being given up anyway
                await store.close()
        loop = asyncio.get_running_loop()
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()
