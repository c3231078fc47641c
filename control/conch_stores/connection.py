"""Thread-safe access to an object store: an event loop on its own thread, with retries and timeouts.

Owns: the store client. Threads: `conch-storage`, started by the first call. Locks: `_lock` guards loop and
futures; `_closing` serialises `close`.
"""

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
from typing import Any, Generic, Protocol, TypeVar

from conch.core.errors import ConchError
from conch_stores.credentials import redacted
from conch_stores.stores import Store, StoreBusyError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Place(Protocol):
    """Location of a store; `str` gives its text for logs."""

    @property
    def text(self) -> str:
        """The location as given."""


class Secrets(Protocol):
    """Credentials."""

    def secrets(self) -> tuple[str, ...]:
        """Values to hide."""


PlaceT = TypeVar("PlaceT", bound=Place)
PlaceT_contra = TypeVar("PlaceT_contra", bound=Place, contravariant=True)
SecretsT = TypeVar("SecretsT", bound=Secrets)
SecretsT_co = TypeVar("SecretsT_co", bound=Secrets, covariant=True)
StoreT = TypeVar("StoreT", bound=Store)


class Credentialed(Protocol[PlaceT_contra, SecretsT_co]):
    """Reads the credentials of a location; see `CredentialReader`."""

    def read(self, location: PlaceT_contra, /) -> SecretsT_co:
        """The credentials."""

    def forget(self) -> None:
        """Drops what is cached after an authentication error."""


_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class StoreTimeouts:
    """Timeouts of a store, in seconds.

    Attributes:
        silence_s: Longest silence on a connection.
        attempt_s: Time for one listing; block reads are limited by silence instead.
        block_s: Time for reading one block in any case.
        first_wait_s: Pause before the second attempt; doubles each time.
        longest_wait_s: Longest pause.
        open_s: Time for creating the client, which is mostly local work.
    """

    total_s: float = 30.0
    silence_s: float = 10.0
    attempt_s: float = 30.0
    block_s: float = 300.0
    first_wait_s: float = 0.2
    longest_wait_s: float = 5.0
    open_s: float = 30.0

    @classmethod
    def of(cls, total_s: float) -> StoreTimeouts:
        """Timeouts derived from a total."""
        return cls(total_s, total_s / 3, total_s, total_s * 10, min(0.2, total_s / 10), total_s / 6)


class Connection(Generic[PlaceT, StoreT]):
    """A connection to one store.

    Args:
        location: Its location.
        open_store: Opens it; the float is the longest silence in seconds.
        credentials: Read when it is opened.
        timeouts: Limits of all operations.
    """

    def __init__(
        self,
        location: PlaceT,
        open_store: Callable[[PlaceT, SecretsT, float], Awaitable[StoreT]],
        credentials: Credentialed[PlaceT, SecretsT],
        timeouts: StoreTimeouts,
    ) -> None:
        self._secrets: tuple[str, ...] = ()

        async def opened() -> StoreT:
            found = await asyncio.to_thread(credentials.read, location)
            self._secrets = found.secrets()
            return await open_store(location, found, timeouts.silence_s)

        self.location = location
        self.timeouts = timeouts
        self._open_store = opened
        self._forget_credentials = credentials.forget
        self._store: StoreT | None = None  # this and the next two belong to the loop
        self._opening = asyncio.Lock()
        self._retried = ""  # last logged reason for a retry
        self._closing = threading.Lock()  # held by `close`
        self._lock = threading.Lock()  # guards the next attributes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._running: set[Future[Any]] = set()
        self._closed = False

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Runs a coroutine on the loop. Raises OSError: the connection is closed."""
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

    def call(self, operation: Callable[[StoreT], Awaitable[T]], attempt_s: float | None = None) -> T:
        """Runs an operation with retries, and waits.

        Raises:
            OSError: It failed or timed out; the text names the repository.
        """
        timeouts = self.timeouts
        future = self.start(lambda: self.retry(operation, attempt_s or timeouts.attempt_s))
        limit_s = timeouts.open_s + timeouts.total_s + (attempt_s or timeouts.attempt_s) + 1.0
        try:
            # The loop has its own timeouts, unless a library blocks it.
            return future.result(limit_s)
        except FutureCancelledError:
            raise OSError(f"model repository '{self.location}' has been closed") from None
        except TimeoutError as error:
            future.cancel()
            raise self.failure(error) from None

    async def retry(self, operation: Callable[[StoreT], Awaitable[T]], attempt_s: float) -> T:
        """Runs an operation with retries.

        Raises:
            OSError: It failed; the text names the repository.
            ConchError: The credentials are wrong.
        """
        timeouts = self.timeouts
        loop = asyncio.get_running_loop()
        deadline = None
        wait_s = timeouts.first_wait_s
        while True:
            store: StoreT | None = None
            try:
                async with asyncio.timeout(timeouts.open_s):
                    store = await self._opened()
                deadline = deadline or loop.time() + timeouts.total_s
                async with asyncio.timeout(attempt_s):
                    result = await operation(store)
                self._retried = ""
                return result
            except ConchError:
                raise
            except PermissionError as error:
                await self._drop_client()  # the next call reads the credentials again
                raise self.failure(error) from None
            except TimeoutError:
                limit_s = timeouts.open_s if store is None else attempt_s
                failure: OSError = StoreBusyError(f"no answer within {limit_s:g} s")
            except StoreBusyError as error:
                failure = error
            except OSError as error:
                raise self.failure(error) from None
            except Exception as error:
                # Boundary: a store's library, also its errors about connections closed meanwhile.
                text = f"{type(error).__name__}: {error}"
                if store is None or store is self._store:
                    raise self.failure(OSError(text)) from None
                failure = StoreBusyError(text)
            pause_s = wait_s * random.uniform(0.5, 1.0)  # jitter, so that servers do not retry in step
            if deadline is None or loop.time() + pause_s >= deadline:
                raise self.failure(failure) from None
            reason = str(self.failure(failure))
            if reason != self._retried:  # log each reason once
                self._retried = reason
                log.info("%s; trying again", reason)
            await asyncio.sleep(pause_s)
            wait_s = min(wait_s * 2, timeouts.longest_wait_s)

    def failure(self, error: BaseException) -> OSError:
        """The error to report: with the repository's name and without secrets."""
        reason = redacted(str(error) or "no answer", self._secrets)
        text = f"model repository '{self.location}': {reason}"
        for kind in (FileNotFoundError, PermissionError, StoreBusyError):
            if isinstance(error, kind):
                return kind(text)
        return OSError(text)

    def close(self) -> None:
        """Cancels everything and ends the thread; concurrent calls wait for each other."""
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

    async def _opened(self) -> StoreT:
        async with self._opening:
            if self._store is None:
                try:
                    self._store = await self._open_store()
                except (OSError, ConchError):
                    raise
                except Exception as error:  # boundary: the library, about its settings
                    raise OSError(str(error) or type(error).__name__) from None
            return self._store

    async def _drop_client(self) -> None:
        self._forget_credentials()
        async with self._opening:
            store, self._store = self._store, None
        if store is not None:
            with suppress(Exception):  # boundary: the library; the store is given up anyway
                await store.close()

    async def _end(self) -> None:
        current = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not current]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        store, self._store = self._store, None
        if store is not None:
            with suppress(Exception):  # boundary: the library; closing anyway
                await store.close()
        loop = asyncio.get_running_loop()
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()
