"""Writes responses of senders to the server, many in one frame where they come together.

A response is encoded when it is sent, so the model may use its arrays again, and then waits to be written:

    ============================================  ===========================================================
    sent                                          is written
    ============================================  ===========================================================
    on a plain thread                             at once, unless a thread is writing, which goes on with it
    on a plain thread less than `_QUICK_NS`       with the next one that is written, at the latest `HELD_NS`
    after the one before, small and not final     after the last write, by the thread "conch-flusher"
    in a turn of an event loop                    when the turn ends: at the loop's next one (`call_soon`)
    as the first of a turn, if the last turn had  at once
    a single response
    when a frame is full, or in a block           at once
    when a turn has lasted `_LATE_NS`, or as      at once, with what waits: the model blocks its loop
    long again
    ============================================  ===========================================================

So a step of an engine whose outputs reach their coroutines in one turn is one frame, and so is what a thread
sends in a quick row after its first response, at half of the processor time of single packets. The response
of a model that has one stream leaves without a detour.

Race of a thread that adds and one that writes: the one that writes looks again after it has let the lock go,
and the one that adds tries the lock after it has added. One of the two finds the response.

Guarantees: responses of one thread are written in their order, and so are those of one request, as its sender
has a lock. A process that is killed loses the responses that wait; its requests end with an error.

Threads and locks: any thread, and "conch-flusher" from the first quick row on. `_writing` is held to write,
`_starting` to start that thread. Turns need no lock: each event loop ends those that it has begun and then
writes what waits, so loops that overwrite each other's turn only write earlier.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from queue import SimpleQueue
from typing import NamedTuple

from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError
from conch.core.response_errors import unsendable
from conch.ipc.channel import MOST_INLINE, ChannelClosedError, Kind
from conch.ipc.codec import ERROR, FINAL, PRESENT, encode_error, encode_responses
from conch.ipc.tensors import MessageStream, Payload, joined_payload

MOST_RESPONSES = 64
"""Responses of a frame: the server's loop handles a frame before it turns to other sockets."""

HELD_NS = 500_000
"""Ns after a write for which small responses of a quick row wait."""

_LATE_NS = 5_000_000
_QUICK_NS = 100_000
_SMALL = MOST_INLINE // MOST_RESPONSES


class SentResponse(NamedTuple):
    """A response, encoded.

    Attributes:
        number: The request's.
        text: Its error or its parameters, empty for none.
        payload: Its tensors; None for none.
        nbytes: Bytes that count in a frame; more than `MOST_INLINE` in a block.
    """

    number: int
    flags: int
    text: bytes
    payload: Payload | None
    nbytes: int


class ResponseFrames:
    """Writes responses of a model to a stream.

    Attributes:
        used: True if a response has been put.
    """

    def __init__(self, name: str, stream: MessageStream) -> None:
        self._name = name
        self._stream = stream
        self._writing = threading.Lock()
        self._waiting: deque[SentResponse] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None  # in whose turn responses wait
        self._since_ns = 0  # when the turn has begun, or has last been found late
        self._count = 0  # responses of the turn
        self._bytes = 0
        self._alone = True  # the last turn had one response
        self._put_ns = self._written_ns = 0  # of plain threads' last response, and of the last write
        self._flushes: SimpleQueue[bool] = SimpleQueue()  # wakes the thread of held responses, or ends it
        self._starting = threading.Lock()
        self._flusher: threading.Thread | None = None
        self._closed = threading.Event()
        self._flushing = False  # it is awake, and has not looked yet at what waits
        self.used = False

    def put(self, response: SentResponse) -> None:
        """Writes a response now, or leaves it to the end of the turn.

        Raises:
            ChannelClosedError: The server has closed the socket.
        """
        self.used = True
        loop: asyncio.AbstractEventLoop | None
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        self._waiting.append(response)
        if not (self._joins_row(response) if loop is None else self._joins_turn(loop, response)):
            self._write()

    def flush(self) -> None:
        """Writes all that has been put, also what another thread is writing.

        Raises:
            ChannelClosedError: The server has closed the socket.
        """
        with self._writing:
            self._write_frames()

    def close(self) -> None:
        """Ends the thread that writes held responses, after a `flush`."""
        self._closed.set()
        self._flushes.put(False)
        if self._flusher is not None:
            self._flusher.join()

    def _joins_turn(self, loop: asyncio.AbstractEventLoop, response: SentResponse) -> bool:
        """True if a response made in a turn of an event loop waits for others of the turn."""
        if self._loop is None:
            self._loop, self._count, self._bytes = loop, 0, 0
            self._since_ns = monotonic_ns()
            loop.call_soon(self._end_turn)
        elif self._loop is not loop:
            return False
        self._count += 1
        self._bytes += response.nbytes
        if self._count == 1 and self._alone:
            return False
        if self._count % MOST_RESPONSES == 0 or self._bytes > MOST_INLINE:
            self._bytes = 0
            return False
        now = monotonic_ns()
        if now - self._since_ns < _LATE_NS:
            return True
        self._since_ns = now
        return False

    def _joins_row(self, response: SentResponse) -> bool:
        """True if a plain thread's response waits for those that follow quickly."""
        now = monotonic_ns()
        quick, self._put_ns = now - self._put_ns < _QUICK_NS, now
        if (
            not quick
            or now - self._written_ns >= HELD_NS
            or response.flags & FINAL
            or response.nbytes > _SMALL
            or len(self._waiting) >= MOST_RESPONSES
        ):
            return False
        if not self._flushing:
            try:
                self._start_flusher()
            except RuntimeError:  # no memory, or too many threads
                return False
            self._flushing = True
            self._flushes.put(True)
        return True

    def _start_flusher(self) -> None:
        with self._starting:
            if self._flusher is None:
                flusher = threading.Thread(target=self._flush_held, name="conch-flusher", daemon=True)
                flusher.start()
                self._flusher = flusher

    def _flush_held(self) -> None:
        while self._flushes.get():
            self._closed.wait(HELD_NS / 1e9)
            self._flushing = False  # before it looks: a response that comes now wakes it again
            try:
                self._write()
            except ChannelClosedError:
                return  # the thread that reads notices, and ends the process

    def _end_turn(self) -> None:
        self._loop, self._alone = None, self._count == 1
        try:
            self._write()
        except ChannelClosedError:
            pass  # the thread that reads notices, and ends the process

    def _write(self) -> None:
        """Writes what waits, unless another thread does."""
        while self._waiting and self._writing.acquire(blocking=False):
            try:
                self._write_frames()
            finally:
                self._writing.release()

    def _write_frames(self) -> None:
        """Writes what waits; the caller has the lock."""
        while self._waiting:
            frame = self._take()
            try:
                self._send(frame)
            except ChannelClosedError:
                raise
            except (OSError, MemoryError, ConchError) as error:  # no memory or descriptor
                self._send_failures(frame, error)
        self._written_ns = monotonic_ns()

    def _take(self) -> list[SentResponse]:
        """Takes the responses of the next frame; one in a block, or a long one, has its own."""
        waiting = self._waiting
        frame = [waiting.popleft()]
        nbytes = frame[0].nbytes
        while waiting and len(frame) < MOST_RESPONSES:
            nbytes += waiting[0].nbytes
            if nbytes > MOST_INLINE:
                break
            frame.append(waiting.popleft())
        return frame

    def _send(self, frame: list[SentResponse]) -> None:
        texts = [response.text for response in frame]
        if not any(texts):
            texts = []
        numbers = [response.number for response in frame]
        fields = encode_responses(
            len(frame), [response.flags for response in frame], texts != [], numbers=numbers
        )
        payload = joined_payload([each.payload for each in frame if each.payload is not None])
        # A frame of several is never so large that it travels in a file, which may be lost.
        self._stream.send(Kind.RESPONSES, numbers[0] if len(frame) == 1 else 0, fields, payload, texts)

    def _send_failures(self, frame: list[SentResponse], error: Exception) -> None:
        """Ends the requests of responses that can't be written."""
        text = encode_error(unsendable(self._name, None, error))
        for response in frame:
            self._send([SentResponse(response.number, PRESENT | ERROR | FINAL, text, None, len(text))])
