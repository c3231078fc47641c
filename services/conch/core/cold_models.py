"""Models that are not in memory and are loaded for their first request.

`Registry` raises a `ColdModelError` where it would refuse the name of such a model. Requests wait in
`Admission`; what needs a model before there is a request, such as an operation, waits by `when_loaded`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol, TypeVar

from conch.core.errors import ConchError, UnavailableError
from conch.core.spec import ModelSpec
from conch.core.statistics_snapshot import VersionStatistics

_T = TypeVar("_T")

Then = Callable[[ConchError | None], None]
"""Called once, on any thread: with None if the model is in memory, else with the reason. Returns soon."""


class Payer(Protocol):
    """The principal of a request, with its limit of loads."""

    def pay_load(self) -> None:
        """Pays for a load. Raises ResourceExhaustedError: it has none left for now."""


class ColdModels(Protocol):
    """The models of a server that may be out of memory."""

    def missed(self, name: str) -> None:
        """Takes note that no version serves a name; returns if that is not to change.

        Raises:
            ColdModelError: The model can be loaded.
            ConchError: Its load has failed a short time ago.
        """

    def begin(self, name: str, payer: Payer | None) -> None:
        """Has a model loaded, with no request that waits for it, unless the payer's limit forbids it."""

    def describe(self, name: str) -> Mapping[int, ModelSpec]:
        """Specs by version, from the model's files; empty if only a load tells them. Reads storage."""

    def kept_statistics(self, name: str) -> list[VersionStatistics]:
        """Counters of the versions of a model that was evicted, or of all such models for an empty name."""

    def wait(self, wait: ColdWait) -> None:
        """Has a model loaded, and ends the wait then.

        Raises:
            ConchError: The request can't wait.
        """

    def leave(self, wait: ColdWait) -> bool:
        """Ends a wait without its `then`; False if it has ended."""


class ColdModelError(UnavailableError):
    """The model of a request is not in memory."""

    def __init__(self, name: str, models: ColdModels) -> None:
        super().__init__(f"model '{name}' is not in memory, and is being loaded: send the request again")
        self.name = name
        self._models = models

    def describe(self) -> Mapping[int, ModelSpec]:
        """Specs of the versions, from the model's files; empty if only a load tells them. Reads storage."""
        return self._models.describe(self.name)

    def begin(self, payer: Payer | None = None) -> None:
        """Has the model loaded, unless the payer's limit forbids it."""
        self._models.begin(self.name, payer)

    def wait(
        self,
        then: Then,
        size: int = 0,
        deadline_ns: int | None = None,
        priority: int = 0,
        payer: Payer | None = None,
    ) -> ColdWait:
        """Makes a wait, to be started.

        Args:
            then: Called when it ends.
            size: Bytes that the request holds.
            deadline_ns: The request's deadline on the monotonic clock.
            priority: The request's priority level.
            payer: Pays for the load if the request begins it.
        """
        return ColdWait(self._models, self.name, then, size, deadline_ns, priority, payer)

    def future(self, deadline_ns: int | None = None) -> Future[None]:
        """Starts a wait; its future ends with None or the error, and a cancelled one leaves the queue.

        Raises:
            ConchError: The caller can't wait.
        """
        future: Future[None] = Future()

        def then(error: ConchError | None) -> None:
            if error is None:
                _end(future, None)
            else:
                _fail(future, error)

        wait = self.wait(then, 0, deadline_ns)
        future.add_done_callback(lambda ended: ended.cancelled() and wait.cancel())
        wait.start()
        return future


class ColdWait:
    """The wait of one request.

    Attributes:
        name: The model.
        size: Bytes that the request holds.
        deadline_ns: Its deadline, if it has one.
        priority: Its priority level; 0 for none.
        payer: Pays for the load if the request begins it.
    """

    __slots__ = ("_lock", "_models", "_then", "deadline_ns", "name", "payer", "priority", "size")

    def __init__(
        self,
        models: ColdModels,
        name: str,
        then: Then,
        size: int,
        deadline_ns: int | None,
        priority: int,
        payer: Payer | None,
    ) -> None:
        self._models = models
        self._lock = threading.Lock()
        self._then: Then | None = then
        self.name = name
        self.size = size
        self.deadline_ns = deadline_ns
        self.priority = priority
        self.payer = payer

    def start(self) -> None:
        """Starts it. Raises ConchError: the request can't wait; `then` is not called."""
        try:
            self._models.wait(self)
        except BaseException:
            self._take()
            raise

    def end(self, error: ConchError | None) -> None:
        """Ends it, unless it has ended."""
        then = self._take()
        if then is not None:
            then(error)

    def cancel(self, subject: object = None) -> bool:
        """Ends it without `then`: the client has left. False if it has ended."""
        if self._take() is None:
            return False
        self._models.leave(self)
        return True

    def _take(self) -> Then | None:
        with self._lock:
            then, self._then = self._then, None  # breaks the cycle with the call that waits
            return then


def resident(find: Callable[[], _T], deadline_ns: Callable[[], int | None] = lambda: None) -> _T:
    """Calls a function on this thread until its models are in memory, which it blocks for.

    Raises:
        ConchError: A model can't be loaded, or the function has failed.
    """
    while True:
        try:
            return find()
        except ColdModelError as cold:
            waiting = cold.future(deadline_ns())
        waiting.result()


async def resident_async(find: Callable[[], _T], deadline_ns: int | None = None) -> _T:
    """`resident` for an event loop."""
    while True:
        try:
            return find()
        except ColdModelError as cold:
            waiting = cold.future(deadline_ns)
        await asyncio.wrap_future(waiting)


def when_loaded(
    find: Callable[[], _T],
    size: int = 0,
    deadline_ns: int | None = None,
    priority: int = 0,
    payer: Payer | None = None,
    into: Future[_T] | None = None,
) -> Future[_T]:
    """Calls a function, and again each time a model that it needs has been loaded.

    Args:
        find: The function; called on this thread first, then on those that load models.
        size: Bytes that its caller holds.
        deadline_ns: Its caller's deadline on the monotonic clock.
        priority: Its caller's priority level.
        payer: Pays for a load that it begins.
        into: Gets the result; None for a new one.

    Returns:
        The result of the function or its error, or the reason why a model is not loaded. A cancelled one
        leaves the queue.
    """
    future: Future[_T] = into or Future()

    def look(error: ConchError | None) -> None:
        if error is None:
            try:
                found = find()
            except ColdModelError as cold:
                wait = cold.wait(look, size, deadline_ns, priority, payer)
                future.add_done_callback(lambda ended: ended.cancelled() and wait.cancel())
                try:
                    wait.start()
                except ConchError as refused:
                    error = refused
                else:
                    return
            except Exception as raised:  # boundary: the function; its caller gets the error
                _fail(future, raised.with_traceback(None))
                return
            else:
                _end(future, found)
                return
        _fail(future, error)

    look(None)
    return future


def _end(future: Future[_T], result: _T) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(result)


def _fail(future: Future[_T], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
