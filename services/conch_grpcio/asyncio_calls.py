"""The calls of handlers that an event loop awaits: `UnaryRpc` and `StreamRpc` on asyncio.

Owns: each call's answer, or its unsent messages. Threads and locks: calls are made, read and ended on the
loop's thread; handlers answer from any thread. A stream has one lock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple

from conch.access.principals import Grant
from conch.core.errors import ConchError, InternalError
from conch.core.reader import Reader
from conch.core.tensor import Buffer
from conch.frontends.grpc.open_calls import OpenCalls
from conch.frontends.grpc.rpc_calls import Metadata

log = logging.getLogger(__name__)

HANDLER_FAILED = "the server failed to handle the call; its log has the cause"
"""Details of a call whose handler has raised, with status INTERNAL."""

Receive = Callable[[], Awaitable[bytes | None]]
"""Receives a stream's next message; None at half-close.

Raises ConnectionError if the client has cancelled, ConchError to end the stream with an error.
"""


class CallHead(NamedTuple):
    """Facts of a call before its first message.

    Attributes:
        client: Address of the client.
        metadata: The client's metadata.
        deadline_ns: Monotonic time of the client's deadline; None without one.
        certificate_names: Names in the client's certificate, such as ``cn:web``.
    """

    client: str
    metadata: Metadata
    deadline_ns: int | None = None
    certificate_names: tuple[str, ...] = ()


class Answer(NamedTuple):
    """Answer of a unary call with status OK.

    Attributes:
        message: The message.
        compression: gRPC's compression of the message, such as ``gzip``; None for none.
        trailing: Trailing metadata.
    """

    message: bytes
    compression: str | None = None
    trailing: Metadata = ()


class CallEnd(NamedTuple):
    """Status with which a handler ends a call, and trailing metadata."""

    status: int
    details: str
    trailing: Metadata = ()


class RefusalError(Exception):
    """A handler has ended a call with an error status, which is in `end`."""

    def __init__(self, end: CallEnd) -> None:
        super().__init__(end.details)
        self.end = end


class AsyncioCall:
    """Metadata, client and deadline of a call.

    A model may keep a call for longer than its transport: it holds nothing of it.

    Attributes:
        read_ns: 0, as in `Caller`.
        path: Empty, as in `Caller`.
        access: The client's grant by the access policy.
        client: Address of the client.
        metadata: The client's metadata.
        certificate_names: Names in the client's certificate.
    """

    read_ns = 0
    path = ""
    access: Grant | None = None

    def __init__(self, head: CallHead, open_calls: OpenCalls) -> None:
        self._loop = asyncio.get_running_loop()
        self._open = open_calls
        self.client, self.metadata, self._deadline_ns, self.certificate_names = head

    @property
    def caller(self) -> AsyncioCall:
        """Itself, as the context of a request."""
        return self

    def header(self, name: str) -> str:
        """The first value of a text key of the metadata; empty without it."""
        return next((each for key, each in self.metadata if key == name and isinstance(each, str)), "")

    def header_values(self, name: str) -> list[str]:
        """All values of a text key of the metadata."""
        return [each for key, each in self.metadata if key == name and isinstance(each, str)]

    def add_response_metadata(self, name: str, value: str) -> None:
        """Drops the entry: the requests of a stream share its trailing metadata."""

    def deadline_ns(self, now_ns: int) -> int | None:
        """Returns the client's deadline on the monotonic clock; None without one."""
        return self._deadline_ns

    def _on_loop(self, work: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # a stopped server's loop is closed; nothing waits for the answer
            self._loop.call_soon_threadsafe(work, *arguments)


class UnaryCall(AsyncioCall):
    """One request, answered once; `answer` waits for that."""

    def __init__(self, head: CallHead, open_calls: OpenCalls) -> None:
        super().__init__(head, open_calls)
        self._answer: asyncio.Future[Answer | CallEnd] = self._loop.create_future()
        self._watch: tuple[Callable[[Any], None], Any] | None = None
        self._cancelled = False
        self._added: Metadata = ()

    def watch(self, on_cancel: Callable[[Any], None], subject: Any) -> None:
        """Calls `on_cancel` with the subject if the client cancels."""
        self._watch = on_cancel, subject
        if self._cancelled:
            self._on_loop(self._cancel)

    def add_response_metadata(self, name: str, value: str) -> None:
        """Adds an entry to the trailing metadata of `reply_with` and `abort`."""
        self._added = (*self._added, (name, value))

    def reply(self, message: bytes) -> None:
        """Answers, from any thread."""
        self._finish(Answer(message))

    def reply_with(self, message: bytes, compression: str | None, trailing: Metadata | None) -> None:
        """Answers with a gRPC compression and trailing metadata, from any thread."""
        self._finish(Answer(message, compression, (*(trailing or ()), *self._added)))

    def abort(self, status: int, details: str, trailing: Metadata | None = None) -> None:
        """Answers with an error, from any thread."""
        self._finish(CallEnd(status, details, (*(trailing or ()), *self._added)))

    async def answer(self) -> Answer:
        """Waits for the answer; cancels the request if the caller is cancelled.

        Raises:
            RefusalError: A handler has answered with an error.
        """
        try:
            answer = await self._answer
        except asyncio.CancelledError:
            self._cancelled = True
            self._cancel()
            raise
        finally:
            self._watch = None  # breaks a reference cycle
        if isinstance(answer, CallEnd):
            raise RefusalError(answer)
        return answer

    def _cancel(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            on_cancel, subject = watch
            on_cancel(subject)

    def _finish(self, answer: Answer | CallEnd) -> None:
        self._on_loop(self._set, answer)
        self._open.discard(self)

    def _set(self, answer: Answer | CallEnd) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)


def _ignore_drain(status: int, details: str) -> None:
    """The `on_drain` of a stream that has ended."""


class StreamCall(AsyncioCall, Reader):
    """One bidirectional stream; `responses` has what handlers write.

    Flow control: no message is received while the client has too much to read, see `OpenCalls`. What is
    written is taken in any case: the call is the `Reader` of its requests.

    Guarded by the lock: `_outbox`, `_backlog`, `_paused` (`read_next` waits until the client has caught up),
    `_end` (what follows the outbox; after it `write` drops messages), `_finished`.

    Args:
        head: Facts of the call.
        open_calls: The open calls of its port.
        receive: Receives the messages.

    Attributes:
        started: True once a handler reads.
        compression: gRPC's compression of the messages, such as ``gzip``; None for none.
    """

    def __init__(self, head: CallHead, open_calls: OpenCalls, receive: Receive) -> None:
        super().__init__(head, open_calls)
        self._receive: Receive | None = receive
        self._on_cancel: Callable[[], None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._wanted, self._wake = asyncio.Event(), asyncio.Event()
        self._left = False  # the client has cancelled
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._backlog = open_calls.new_backlog()
        self._paused = self._finished = False
        self._end: CallEnd | None = None
        self.started = False
        self.compression: str | None = None
        self.on_drain: Callable[[int, str], None] = self.close

    # On the loop's thread.

    def start(
        self,
        on_message: Callable[[Buffer | None], None],
        on_cancel: Callable[[], None],
        compression: str | None = None,
    ) -> None:
        """Starts to read; `on_message` gets each message, then None at half-close."""
        assert self._receive is not None, "it has not ended"
        self.started, self.compression, self._on_cancel = True, compression, on_cancel
        self._reading = self._loop.create_task(self._read(self._receive, on_message))
        self._open.add_stream(self)
        self.read_next()

    @property
    def trailing(self) -> Metadata:
        """Trailing metadata, after the last of the responses."""
        return () if self._end is None else self._end.trailing

    async def responses(self) -> AsyncGenerator[bytes, None]:
        """Yields the messages until the stream is closed; cancels its requests if it is left before.

        Raises:
            RefusalError: A handler has closed the stream with an error.
        """
        try:
            while (message := await self._next()) is not None:
                yield message
                self._sent(len(message))
        finally:
            self.finish()
        if self._end is not None and self._end.status:
            raise RefusalError(self._end)

    async def _next(self) -> bytes | None:
        """The next message to send, once there is one; None at the end."""
        while not self._left:
            with self._lock:
                if self._outbox:
                    return self._outbox.popleft()
                if self._end is not None:
                    return None
            self._wake.clear()
            await self._wake.wait()
        return None

    def _sent(self, size: int) -> None:
        with self._lock:
            self._backlog.resize(self._backlog.size - size)
            ready = self._backlog.take_ready()
            resumes = self._paused and not self._backlog.backpressure
            self._paused = self._paused and not resumes
        for work in ready:
            work()
        if resumes:
            self._wanted.set()

    async def _read(self, receive: Receive, on_message: Callable[[Buffer | None], None]) -> None:
        """Delivers one message after the other, each once it is asked for."""
        try:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                message = await receive()
                on_message(message)
                if message is None:
                    return
                del message  # the next one may not come for long
        except ConnectionError:
            self._left = True
            self._wake.set()
        except ConchError as error:
            self.close(error.grpc_status, error.message)
        except Exception:  # boundary: the client gets an answer
            log.exception("a message of a stream could not be handled")
            self.close(InternalError.grpc_status, HANDLER_FAILED)

    def finish(self) -> None:
        """Ends reading and waiting; cancels the requests of a stream that was not closed."""
        with self._lock:
            cancelled = self._end is None
            self._finished = True
            self._outbox.clear()
            self._backlog.resize(0)
            ready = self._backlog.close()
        for work in ready:
            work()
        if self._reading is not None:
            self._reading.cancel()
        on_cancel, self._on_cancel = self._on_cancel, None
        # Breaks reference cycles, and lets go of the transport's call.
        self._reading = self._receive = None
        self.on_drain = _ignore_drain
        self._open.discard_stream(self)
        if cancelled and on_cancel is not None:
            on_cancel()

    # On any thread.

    def read_next(self) -> None:
        """Reads the next message, at once or when enough has been sent."""
        with self._lock:
            self._paused = self._backlog.backpressure
        if not self._paused:
            self._on_loop(self._wanted.set)

    def write(self, message: bytes) -> None:
        """Sends a message after those written before it; drops it once the stream is closed."""
        with self._lock:
            if self._finished or self._end is not None:
                return
            self._backlog.resize(self._backlog.size + len(message))
            self._outbox.append(message)
        self._on_loop(self._wake.set)

    @property
    def backpressure(self) -> bool:
        """True if the client has too many bytes to read."""
        return self._backlog.backpressure

    def when_writable(self, work: Callable[[], object]) -> None:
        """See `Reader.when_writable`."""
        with self._lock:
            waits = self._backlog.defer_until_writable(work)
        if not waits:
            work()

    def close(self, status: int = 0, details: str = "", trailing: Metadata | None = None) -> None:
        """Closes the stream once all is sent; the first status counts."""
        with self._lock:
            if self._finished or self._end is not None:
                return
            self._end = CallEnd(status, details, tuple(trailing or ()))
            ready = self._backlog.close()
        for work in ready:
            work()
        self._on_loop(self._wake.set)

    def refuse(self, status: int, details: str, trailing: Metadata | None = None) -> None:
        """Closes a stream that was not started with an error."""
        self.close(status, details, trailing)
