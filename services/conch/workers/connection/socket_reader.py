"""Reads a worker's socket on the I/O loop, and passes messages to their handlers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from conch.core.clock import monotonic_ns
from conch.ipc import codec
from conch.ipc.channel import Kind, WireError
from conch.ipc.loop import IoLoop, SharedLoop
from conch.ipc.tensors import MessageStream, ReceivedMessage

_MOST_AT_ONCE = 64
"""Messages that `SocketReader.catch_up` handles before other sockets have their turn."""

Handler = Callable[[int, ReceivedMessage], None]
"""Handles a message about a subject."""


class SocketReader:
    """Reads a worker's messages, from `start` until the socket is closed or a message is malformed.

    Args:
        stream: The socket's messages.
        shared_loop: The loop, held while the socket is read.
        handle: Handles a message, on the loop's thread; returns at once.
        on_end: Called once when reading has ended, on the loop's thread, with a `ChannelClosedError`, a
            `WireError`, or what `handle` has raised. It leads to `close`.
    """

    def __init__(
        self,
        stream: MessageStream,
        shared_loop: SharedLoop,
        handle: Callable[[ReceivedMessage], None],
        on_end: Callable[[BaseException], None],
    ) -> None:
        self._stream = stream
        self._shared_loop = shared_loop
        self._handle = handle
        self._on_end = on_end
        self._loop: IoLoop | None = None
        self._file = -1
        self._ended = False

    def start(self) -> None:
        """Starts to read.

        Raises:
            OSError: No descriptor is free.
            RuntimeError: There are too many threads.
        """
        loop = self._shared_loop.hold()
        try:
            self._file = self._stream.channel.fileno()
            self._loop = loop
            loop.register(self._file, self)
        except BaseException:
            self._loop = None
            self._shared_loop.release()
            raise

    @property
    def on_thread(self) -> bool:
        """True if the caller is the thread that reads."""
        loop = self._loop
        return loop is not None and loop.on_thread

    def on_ready(self, events: int) -> None:
        """See `conch.ipc.loop.Ready`: handles one message, so that other sockets have their turn."""
        self._read(1)

    def catch_up(self, timeout_s: float) -> None:
        """Has all handled that has arrived; gives up after a time."""
        loop = self._loop
        if loop is None:
            return
        end_ns = monotonic_ns() + int(timeout_s * 1e9)
        caught_up = threading.Event()

        def read() -> None:
            if self._read(_MOST_AT_ONCE) and monotonic_ns() < end_ns:
                loop.call_soon(read)
            else:
                caught_up.set()

        loop.call_soon(read)
        caught_up.wait(timeout_s)

    def close(self) -> None:
        """Frees the loop, once reading has ended or without a start."""
        if self._loop is not None:
            self._loop = None
            self._shared_loop.release()

    def _read(self, most: int) -> bool:
        """Handles messages; False if there are no more."""
        if self._ended:
            return False
        try:
            for _ in range(most):
                self._handle(self._stream.receive(wait=False))
        except BlockingIOError:
            return False
        except BaseException as error:  # boundary: the loop serves others too
            self._ended = True
            assert self._loop is not None, "it has started"
            self._loop.unregister(self._file)
            self._on_end(error)
            return False
        return True


class MessageDispatcher:
    """Passes each message of a worker to the handler of its kind; HELLO must come first."""

    def __init__(self, handlers: Mapping[Kind, Handler]) -> None:
        self._handlers = dict(handlers)
        self._greeted = False

    def handle(self, received: ReceivedMessage) -> None:
        """Handles a message.

        Raises:
            WireError: The kind is not allowed now.
        """
        kind = received.kind
        if not self._greeted:
            if kind is not Kind.HELLO:
                raise WireError("it does not begin with HELLO")
            codec.check_hello(received.fields, "worker")
            self._greeted = True
            return
        handler = self._handlers.get(kind)
        if handler is None:
            raise WireError(f"a message {kind.name} was not expected")
        handler(received.subject, received)


def json_fields(handle: Callable[[int, dict[str, Any]], None]) -> Handler:
    """Wraps a handler of messages whose fields are JSON."""

    def handler(subject: int, received: ReceivedMessage) -> None:
        handle(subject, codec.decode_json(received.fields))

    return handler
