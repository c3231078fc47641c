"""From the loop to the core and back: requests go in, responses come back in few wake-ups."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, TypeVar

from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.server_core import ServerCore
from conch.frontends.http.connection import CONNECTION, Connection
from conch.frontends.http.loop import LoopThread

log = logging.getLogger(__name__)

_MOST_UNREAD_BYTES = 64 << 20
_T = TypeVar("_T")


class Mailbox:
    """Hands results from any thread to futures on the loop; those that come close together in one wake-up.

    Args:
        thread: The loop's thread.
    """

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._filled: deque[tuple[asyncio.Future[Any], Any]] = deque()
        self._waking = False

    def put(self, future: asyncio.Future[_T], result: _T) -> None:
        """Sets the result of a future; from any thread, without a lock."""
        self._filled.append((future, result))
        if not self._waking:
            self._waking = True
            with suppress(RuntimeError):  # the loop has been closed: nobody waits
                self._thread.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._waking = False  # before looking: what comes from here on wakes the loop again
        filled = self._filled
        while filled:
            future, result = filled.popleft()
            if not future.done():
                future.set_result(result)


class ResponseStream:
    """The responses to one request as they come.

    It is the request's responder, and an iterator on the loop. A model that is far ahead of a client that
    reads slowly has to wait.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._changed = threading.Condition()
        self._unread: deque[tuple[InferenceResponse | None, bool]] = deque()
        self._unread_bytes = 0
        self._awaited: asyncio.Future[None] | None = None
        self._closed = False

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Takes a response from any thread; may wait for the client."""
        size = _size(response)
        with self._changed:
            if not final:
                self._changed.wait_for(
                    lambda: self._closed or not self._unread or self._unread_bytes < _MOST_UNREAD_BYTES
                )
            if self._closed:
                return
            self._unread.append((response, final))
            self._unread_bytes += size
            awaited, self._awaited = self._awaited, None
        if awaited is not None:
            self._mailbox.put(awaited, None)

    def close(self) -> None:
        """Lets everything go that is not read yet, and whoever waits with more."""
        with self._changed:
            self._closed = True
            self._unread.clear()
            self._changed.notify_all()

    async def next(self) -> tuple[InferenceResponse | None, bool]:
        """The next response, and whether it is the last."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if self._unread:
                    response, final = self._unread.popleft()
                    self._unread_bytes -= _size(response)
                    self._changed.notify_all()
                    return response, final
                self._awaited = awaited = loop.create_future()
            await awaited


def _size(response: InferenceResponse | None) -> int:
    return 0 if response is None else sum(tensor.nbytes for tensor in response.outputs)


class Exchange:
    """Runs requests for coroutines on the loop.

    Args:
        core: Runs the requests.
        thread: The loop's thread.
    """

    def __init__(self, core: ServerCore, thread: LoopThread) -> None:
        self._core = core
        self.mailbox = Mailbox(thread)

    def stream(self) -> ResponseStream:
        """A responder for a request that `responses` is to run."""
        return ResponseStream(self.mailbox)

    async def responses(
        self, request: InferenceRequest, stream: ResponseStream, scope: Any
    ) -> AsyncIterator[tuple[InferenceResponse | None, bool]]:
        """Runs a request; gives each response, and whether it is the last.

        The request is cancelled when its client goes away, and when the iterator is closed before its end.

        Args:
            request: A request whose responder is `stream`.
            stream: Made by `stream`.
            scope: The scope of the HTTP request.

        Raises:
            ConchError: The request can't be run.
        """
        connection: Connection | None = scope.get(CONNECTION)
        request.responses_wait = True  # so that the model does not write to what has not been sent yet
        final = False
        self._core.check_takes(request)
        self._core.submit(request, False, self._core.model_for(request))
        watch(connection, self._core, request)
        try:
            while not final:
                response, final = await stream.next()
                yield response, final
        finally:
            if connection is not None:
                connection.on_disconnect = None
            if not final:
                self._core.cancel(request)
            stream.close()


def watch(connection: Connection | None, core: ServerCore, request: InferenceRequest) -> None:
    """Has a request cancelled when its client goes away, or at once if it is gone."""
    if connection is None:
        return
    if connection.lost:
        core.cancel(request)
    else:
        connection.on_disconnect = lambda: core.cancel(request)
