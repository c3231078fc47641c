"""The calls of Ray Serve as conch's handlers answer them: `UnaryRpc` and `StreamRpc` on asyncio.

Owns: each call's answer, or its unsent messages. Threads and locks: calls are made, read and ended on the
replica's event loop; handlers answer from any thread. A stream has one condition.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from conch.access.principals import Grant
from conch.core.errors import ConchError
from conch.core.request import Reader
from conch.frontends.grpc.rpc_calls import Metadata

_MOST_UNSENT_BYTES = 64 << 20


class RefusalError(Exception):
    """The error status with which a handler ended a call."""

    def __init__(self, status: int, details: str, trailing: Metadata | None = None) -> None:
        super().__init__(details)
        self.status = status
        self.details = details
        self.trailing = tuple(trailing or ())


class RayCall:
    """Metadata and client of a call.

    Ray passes on no deadline of the client: it cancels the call.

    Args:
        context: Ray's `RayServegRPCContext`; None for a call through a deployment handle.

    Attributes:
        read_ns: 0, as in `Caller`.
        path: Empty, as in `Caller`.
        access: The client's grant by the access policy.
        certificate_names: None: Ray's proxy asks for no certificates.
        client: Address of the client; empty for a handle.
        metadata: The client's metadata, and that the call was forwarded: a client is never local.
    """

    read_ns = 0
    path = ""
    access: Grant | None = None
    certificate_names: tuple[str, ...] = ()

    def __init__(self, context: Any | None) -> None:
        self._loop = asyncio.get_running_loop()
        self.client: str = "" if context is None else context.peer()
        sent: list[tuple[str, str | bytes]] = [] if context is None else context.invocation_metadata()
        self.metadata: Metadata = (*sent, ("x-forwarded-for", self.client))

    @property
    def caller(self) -> RayCall:
        """Itself, as the context of a request."""
        return self

    def header(self, name: str) -> str:
        """The first value of a text key of the metadata; empty without it."""
        return next((each for key, each in self.metadata if key == name and isinstance(each, str)), "")

    def header_values(self, name: str) -> list[str]:
        """All values of a text key of the metadata."""
        return [each for key, each in self.metadata if key == name and isinstance(each, str)]

    def add_response_metadata(self, name: str, value: str) -> None:
        """Sends none: metadata of answers is the proxy's."""

    def deadline_ns(self, now_ns: int) -> int | None:
        """None, see above."""
        return None

    def _on_loop(self, work: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(work, *arguments)
        except RuntimeError:
            pass  # the loop of a stopped replica is closed; nothing waits for the answer


class RayUnaryCall(RayCall):
    """One request, answered once."""

    def __init__(self, context: Any | None) -> None:
        super().__init__(context)
        self._answer: asyncio.Future[bytes | RefusalError] = self._loop.create_future()
        self._on_cancel: Callable[[Any], None] | None = None
        self._subject: Any = None

    def watch(self, on_cancel: Callable[[Any], None], subject: Any) -> None:
        """Calls `on_cancel` with the subject if the caller is cancelled."""
        self._on_cancel, self._subject = on_cancel, subject

    def reply(self, message: bytes) -> None:
        """Answers, from any thread."""
        self._on_loop(self._set, message)

    def reply_with(self, message: bytes, compression: str | None, trailing: Metadata | None) -> None:
        """Answers without compression and metadata, which are the proxy's."""
        self.reply(message)

    def abort(self, status: int, details: str, trailing: Metadata | None = None) -> None:
        """Answers with an error, from any thread."""
        self._on_loop(self._set, RefusalError(status, details, trailing))

    async def answer(self) -> bytes:
        """Waits for the answer; cancels the request if the caller is cancelled."""
        try:
            answer = await self._answer
        except asyncio.CancelledError:
            if self._on_cancel is not None:
                self._on_cancel(self._subject)
            raise
        finally:
            self._on_cancel = self._subject = None  # breaks a reference cycle
        if isinstance(answer, RefusalError):
            raise answer
        return answer

    def _set(self, answer: bytes | RefusalError) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)


class RayStreamCall(RayCall, Reader):
    """One bidirectional stream; `responses` sends what handlers write.

    Args:
        context: As in `RayCall`.
        receive: Returns the next message as bytes; None at half-close. Raises ConnectionError if the client
            has cancelled, ConchError to close the stream with an error.
    """

    def __init__(self, context: Any | None, receive: Callable[[], Awaitable[bytes | None]]) -> None:
        super().__init__(context)
        self._receive = receive
        self._on_message: Callable[[bytes | None], None] | None = None
        self._on_cancel: Callable[[], None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._lock = threading.Lock()  # guards the fields below
        self._deferred: list[Callable[[], object]] = []
        self._outbox: deque[bytes] = deque()
        self._unsent = 0
        self._paused = False
        self._finished = False
        self._closing: RefusalError | None = None
        self.on_drain: Callable[[int, str], None] = self.close

    def start(
        self,
        on_message: Callable[[bytes | None], None],
        on_cancel: Callable[[], None],
        compression: str | None = None,
    ) -> None:
        """Reads the first message; compression is the proxy's."""
        self._on_message, self._on_cancel = on_message, on_cancel
        self.read_next()

    def read_next(self) -> None:
        """Reads the next message, at once or when enough has been sent."""
        with self._lock:
            if self._unsent > _MOST_UNSENT_BYTES:
                self._paused = True
                return
        self._on_loop(self._start_reading)

    def write(self, message: bytes) -> None:
        """Sends a message, from any thread; dropped once the stream is over."""
        with self._lock:
            if self._finished or self._closing is not None:
                return
            self._unsent += len(message)
            self._outbox.append(message)
        self._on_loop(self._wake.set)

    @property
    def backpressure(self) -> bool:
        """True if too many bytes are unsent."""
        return self._unsent > _MOST_UNSENT_BYTES

    def when_writable(self, work: Callable[[], object]) -> None:
        """See `Reader.when_writable`."""
        with self._lock:
            waits = self.backpressure and not self._finished and self._closing is None
            if waits:
                self._deferred.append(work)
        if not waits:
            work()

    def close(self, status: int = 0, details: str = "", trailing: Metadata | None = None) -> None:
        """Closes the stream once all is sent; the first status counts."""
        with self._lock:
            if self._closing is None:
                self._closing = RefusalError(status, details, trailing)
        self._call_read()
        self._on_loop(self._wake.set)

    def refuse(self, status: int, details: str, trailing: Metadata | None = None) -> None:
        """Closes the stream with an error."""
        self.close(status, details, trailing)

    async def responses(self) -> AsyncGenerator[bytes, None]:
        """Yields the messages until the stream is closed; cancels its requests if it is left before."""
        try:
            while True:
                self._wake.clear()
                while self._outbox:
                    message = self._outbox.popleft()
                    yield message
                    self._sent(len(message))
                if self._closing is not None and not self._outbox:
                    break
                await self._wake.wait()
        finally:
            self._finish()
        if self._closing.status:
            raise self._closing

    def _sent(self, size: int) -> None:
        with self._lock:
            self._unsent -= size
            resumes = self._paused and self._unsent <= _MOST_UNSENT_BYTES
            self._paused = self._paused and not resumes
        self._call_read()
        if resumes:
            self._start_reading()

    def _call_read(self) -> None:
        """Lets models go on, once the client has read enough or the stream ends."""
        with self._lock:
            read: list[Callable[[], object]] = []
            if self._finished or self._closing is not None or not self.backpressure:
                read, self._deferred = self._deferred, []
        for work in read:
            work()

    def _start_reading(self) -> None:
        if not self._finished:
            self._reading = self._loop.create_task(self._read())

    async def _read(self) -> None:
        try:
            message = await self._receive()
        except ConnectionError:
            self._finish()
            self._wake.set()
            return
        except ConchError as error:
            self.close(error.grpc_status, error.message)
            return
        if self._on_message is not None:
            self._on_message(message)

    def _finish(self) -> None:
        """Ends reading and waiting; cancels the requests of a stream that was not closed."""
        with self._lock:
            left = not self._finished and self._closing is None
            self._finished = True
            self._outbox.clear()
            if self._closing is None:
                self._closing = RefusalError(0, "")
        self._call_read()
        reading, self._reading = self._reading, None
        if reading is not None and reading is not asyncio.current_task():
            reading.cancel()
        on_cancel, self._on_cancel, self._on_message = self._on_cancel, None, None
        if left and on_cancel is not None:
            on_cancel()
