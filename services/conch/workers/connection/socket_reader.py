"""Chooses the thread of the server that reads a worker's socket, and passes messages to their handlers.

Each connection has a reader thread. A thread that starts a short batch may claim the socket until the batch
is done: the reader thread stays asleep, which saves a wake-up.

Owns: the epoll set. Threads and locks: the thread that reads holds `_read_lock`.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from conch.core.clock import monotonic_ns
from conch.core.scheduling.scheduler import Batch
from conch.workers.protocol import codec
from conch.workers.protocol.busy_poll import BusyPoll
from conch.workers.protocol.channel import ChannelClosedError, Kind, PacketChannel, WireError
from conch.workers.protocol.tensors import MessageStream, ReceivedMessage

_ASLEEP = 0
_AWAKE = select.EPOLLIN | select.EPOLLONESHOT


Handler = Callable[[int, ReceivedMessage], None]
"""Handles a message about a subject."""


class SocketReader:
    """Reads a worker's messages, on the reader thread or on a thread that has claimed the socket.

    1. Thread A claims: it takes `_read_lock` and disarms the socket in the epoll set.
    2. The reader thread sleeps in epoll; a message wakes A only.
    3. A releases: it arms the socket before it frees the lock, so no message is missed.
    4. If A failed, it left `_failure` and shut the socket down; the reader thread wakes and raises it.
    """

    def __init__(self, channel: PacketChannel, stream: MessageStream) -> None:
        self._channel = channel
        self._stream = stream
        self._read_lock = threading.Lock()
        self._file = channel.fileno()
        self._epoll = select.epoll()
        self._epoll.register(self._file, _AWAKE)
        self._closed = False
        self._failure: Exception | None = None  # of a thread that had claimed the socket
        self._reader_poll = select.poll()
        self._reader_poll.register(self._file, select.POLLIN)
        self._busy_poll = BusyPoll(partial(self._reader_poll.poll, 0))

    def read(self, handle: Callable[[ReceivedMessage], None]) -> None:
        """Reads until the socket is closed; runs on the reader thread.

        Raises:
            ChannelClosedError: The socket is closed.
            WireError: A message is malformed.
            Exception: `handle` failed, on this or on another thread.
        """
        while True:
            try:
                self._epoll.poll()
            except (OSError, ValueError):
                raise ChannelClosedError("closed before its thread began to read") from None
            with self._read_lock:
                if self._closed:
                    raise ChannelClosedError("the connection is closed")
                if self._failure is not None:
                    raise self._failure
                try:
                    while True:
                        handle(self._stream.receive(wait=False))
                except BlockingIOError:
                    self._epoll.modify(self._file, _AWAKE)

    def claim(self) -> bool:
        """Claims the socket for the calling thread; False if another thread reads."""
        if not self._read_lock.acquire(blocking=False):
            return False
        if self._closed:
            self._read_lock.release()
            return False
        self._epoll.modify(self._file, _ASLEEP)
        return True

    def read_until(self, batch: Batch, handle: Callable[[ReceivedMessage], None], end_ns: int) -> None:
        """Reads on the thread that has claimed the socket until the batch is done, or until `end_ns`."""
        try:
            if not batch.settled:
                self._busy_poll.wait()
            while not batch.settled:
                left_ns = end_ns - monotonic_ns()
                if left_ns <= 0 or not self._reader_poll.poll(left_ns / 1e6):
                    return
                handle(self._stream.receive(wait=False))
        except (BlockingIOError, ChannelClosedError):
            pass  # the reader thread finds it closed too, and reports it
        except Exception as error:  # a handler of messages: the reader thread raises it
            self._fail(error)

    def catch_up(self, handle: Callable[[ReceivedMessage], None], timeout_s: float) -> None:
        """Handles what has arrived, on the calling thread; gives up after a time.

        What is handled under the lock by another thread has been handled when this one gets it.
        """
        end_ns = monotonic_ns() + int(timeout_s * 1e9)
        if not self._read_lock.acquire(timeout=timeout_s):
            return
        try:
            while not self._closed and monotonic_ns() < end_ns:
                handle(self._stream.receive(wait=False))
        except (BlockingIOError, ChannelClosedError):
            pass
        except Exception as error:  # a handler of messages: the reader thread raises it
            self._fail(error)
        finally:
            self._read_lock.release()

    def _fail(self, error: Exception) -> None:
        """Has the reader thread report the loss and fail what is in flight: that takes time."""
        self._failure = error
        self._channel.shut_down()

    def release(self) -> None:
        """Returns the socket to the reader thread."""
        self._epoll.modify(self._file, _AWAKE)
        self._read_lock.release()

    def close(self) -> None:
        """Ends reading; the socket can be closed then."""
        with self._read_lock:
            self._closed = True
            self._epoll.close()


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
