"""One stream of a connection: which sides are open, its windows, and data that waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from conch.frontends.grpc.http2.field_rules import Pairs

Buffer = bytes | bytearray | memoryview


_START = memoryview(b"")  # before each message


class SendQueue:
    """Data and trailers of a stream that wait for its flow-control windows."""

    __slots__ = ("_buffers", "_position", "count", "end", "trailers")

    def __init__(self) -> None:
        self._buffers: deque[memoryview] = deque()
        self._position = 0  # in the first of them
        self.count = 0
        # END_STREAM on the last DATA frame, or trailers with it.
        self.end = False
        self.trailers: Pairs | None = None

    def put(self, buffers: Sequence[Buffer], count: int) -> None:
        """Adds a message, which is not copied."""
        self._buffers.append(_START)
        self._buffers.extend(memoryview(one) for one in buffers if len(one))
        self.count += count

    @property
    def whole(self) -> bool:
        """True if no part of the first message was taken."""
        return self._buffers[0] is _START

    def cut(self, count: int) -> list[memoryview]:
        """Takes the first `count` bytes."""
        self.count -= count
        buffers, position = self._buffers, self._position
        taken: list[memoryview] = []
        while count:
            first = buffers[0]
            stop = position + count
            if first is not _START:
                taken.append(first[position:stop])
            if stop < len(first):
                self._position = stop
                return taken
            count = stop - len(first)
            buffers.popleft()
            position = self._position = 0
        return taken


class Stream:
    """A stream that is open (both sides), half-closed (remote: only sending; local: only receiving)."""

    __slots__ = (
        "answered",
        "content_left",
        "freed",
        "headed",
        "id",
        "moved",
        "queue",
        "receiving",
        "send_used",
        "sending",
        "unread",
        "waits",
    )

    def __init__(self, stream_id: int, headed: bool, receiving: bool, content_left: int | None) -> None:
        self.id = stream_id
        self.receiving = receiving
        self.sending = True
        # Data was sent: the peer's reset, as of a stream that it has had enough of, costs nothing more.
        self.answered = False
        # The head of the peer's message was received, so that what follows it are trailers.
        self.headed = headed
        # Of the peer's content-length, if it gave one.
        self.content_left = content_left
        # Sent less granted since: with the peer's SETTINGS_INITIAL_WINDOW_SIZE it makes the window, which so
        # follows each change of that setting, below zero where need be (section 6.9.2).
        self.send_used = 0
        # Received and not consumed; consumed and not granted again yet.
        self.unread = self.freed = 0
        self.queue: SendQueue | None = None
        # Calls of `stuck_streams` since the queue began or moved enough; bytes moved since the last call.
        self.waits = self.moved = 0
