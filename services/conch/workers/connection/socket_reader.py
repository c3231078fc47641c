"""Which thread of the server reads a worker's socket.

A link has a thread that reads whenever something comes. Who begins a batch that will be done soon can take
its place for that long: the link's thread is left asleep, and does not have to be woken for the answer.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from conch.core.backend import Outcome
from conch.core.clock import monotonic_ns
from conch.workers.connection.busy_poll import Spinning
from conch.workers.connection.message_stream import Exchange
from conch.workers.connection.packet_channel import Channel, ChannelClosedError
from conch.workers.protocol.received_message import ReceivedMessage

_ASLEEP = 0
_AWAKE = select.EPOLLIN | select.EPOLLONESHOT


class Turns:
    """The right to read from a worker.

    Args:
        channel: Its socket.
        exchange: Reads from it.
    """

    def __init__(self, channel: Channel, exchange: Exchange) -> None:
        self._channel = channel
        self._exchange = exchange
        self._turn = threading.Lock()
        self._file = channel.fileno()
        self._arrivals = select.epoll()
        self._arrivals.register(self._file, _AWAKE)
        self._closed = False
        self._failure: Exception | None = None  # of another thread that had the turn
        # For those who take the turn; they come one at a time.
        self._answers = select.poll()
        self._answers.register(self._file, select.POLLIN)
        self._spinning = Spinning(partial(self._answers.poll, 0))

    def read(self, handle: Callable[[ReceivedMessage], None]) -> None:
        """Reads until there is nothing more to come; for the link's thread.

        Raises:
            ChannelClosedError: Always, in the end.
            WireError: What has come is no message.
            Exception: What `handle` has raised, also on another thread.
        """
        while True:
            try:
                self._arrivals.poll()
            except (OSError, ValueError):
                raise ChannelClosedError("the link was closed before its thread began to read") from None
            with self._turn:
                if self._closed:
                    raise ChannelClosedError("the link is closed")
                if self._failure is not None:
                    raise self._failure
                try:
                    while True:
                        handle(self._exchange.receive(wait=False))
                except BlockingIOError:
                    self._arrivals.modify(self._file, _AWAKE)

    def take(self) -> bool:
        """Takes the turn on the calling thread; False if somebody has it."""
        if not self._turn.acquire(blocking=False):
            return False
        if self._closed:
            self._turn.release()
            return False
        self._arrivals.modify(self._file, _ASLEEP)
        return True

    def read_until(
        self, done: Callable[[], bool], handle: Callable[[ReceivedMessage], None], end_ns: int
    ) -> None:
        """Reads until something has come or time is up; for who has taken the turn.

        Args:
            done: Whether it has come.
            handle: Sees to each message.
            end_ns: When time is up, on the monotonic clock.
        """
        try:
            if not done():
                self._spinning.wait()
            while not done():
                left_ns = end_ns - monotonic_ns()
                if left_ns <= 0 or not self._answers.poll(left_ns / 1e6):
                    return
                handle(self._exchange.receive(wait=False))
        except (BlockingIOError, ChannelClosedError):
            pass  # the link's thread finds it closed too, and says so
        except Exception as error:
            # Giving the worker up takes time: the link's thread does it, and answers what the worker had.
            self._failure = error
            self._channel.shut()

    def give_back(self) -> None:
        """Gives the turn back to the link's thread."""
        self._arrivals.modify(self._file, _AWAKE)
        self._turn.release()

    def close(self) -> None:
        """Has nobody read any more; the socket can be closed then."""
        with self._turn:
            self._closed = True
            self._arrivals.close()


class Receives(Protocol):
    """A link, for who has the turn to receive from it."""

    def wait_for(self, turn: Turn, timeout_ns: int) -> None:
        """Receives until a batch is done; gives the turn back."""

    def give_back(self) -> None:
        """Gives the turn back."""


class Turn:
    """The turn to receive, while a batch runs; see `Awaited`.

    Args:
        link: Whose it is.
        done: Takes the outcome of the batch.

    Attributes:
        ended: Whether there is an outcome.
    """

    __slots__ = ("_done", "_link", "ended")

    def __init__(self, link: Receives, done: Callable[[Outcome], None]) -> None:
        self._link = link
        self._done = done
        self.ended = False

    def __call__(self, outcome: Outcome) -> None:
        """Takes the outcome."""
        self.ended = True
        self._done(outcome)

    def wait(self, timeout_ns: int) -> None:
        """See `Awaited.wait`."""
        self._link.wait_for(self, timeout_ns)

    def detach(self) -> None:
        """See `Awaited.leave`."""
        self._link.give_back()
