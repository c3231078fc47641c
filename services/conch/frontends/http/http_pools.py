"""Thread pools of the REST front end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from conch.core.admission import Admission
from conch.core.errors import UnavailableError
from conch.core.servable import Servable
from conch.frontends.fair_pool import FairPool
from conch.frontends.http.http_exchange import ClientDisconnectError, HttpExchange

T = TypeVar("T")


class Pools:
    """The thread pools of the REST front end.

    Attributes:
        parsing: Parses and encodes large bodies.
    """

    def __init__(self) -> None:
        self.parsing = FairPool("conch-http-parse")

    def close(self, left: Callable[[], float]) -> bool:
        """Cancels queued work and waits for running work, up to `left()` seconds.

        Returns:
            True if all work ended.
        """
        return self.parsing.close(left())


async def result_of(begin: Callable[[], Future[T]]) -> T:
    """Begins work on a pool and waits for its result without blocking the loop.

    Raises:
        UnavailableError: The pool was closed before the work started.
    """
    try:
        future = begin()
    except RuntimeError:  # the pool is closed
        raise UnavailableError("Server exiting") from None
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if future.cancelled() and not (task and task.cancelling()):
            raise UnavailableError("Server exiting") from None
        raise


async def loaded(exchange: HttpExchange, admission: Admission, name: str, version: str) -> Servable | None:
    """The version for a request, once it is in memory; see `Admission.resolve_name`.

    Raises:
        ClientDisconnectError: The client has disconnected.
        ConchError: There is no such model, it can't be loaded, or the request can't wait.
    """

    def begin() -> Future[Servable | None]:
        if exchange.lost:
            raise ClientDisconnectError
        future = admission.loaded(name, version, exchange, exchange.size)
        exchange.on_disconnect = future.cancel
        return future

    return await result_of(begin)
