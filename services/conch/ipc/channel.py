"""Packets between the server and a worker, and the SOCK_SEQPACKET socket that they travel on.

A message is one packet; the codec tells what its fields say.

    =================  =========================================================================
    part               contents
    =================  =========================================================================
    header             28 bytes, see `HEADER`; the same in all versions, so that HELLO can be read
    passed, if flagged count, 4 bytes; for each block of a third process that it lends its number, 4 bytes
    returned blocks    for each: its number, 4 bytes
    texts, if flagged  count, 4 bytes; for each its number, 4 bytes; then the new ones: length, bytes
    fields             depend on the kind
    padding            to a multiple of eight
    tensors            bytes of small ones, each padded to a multiple of eight
    =================  =========================================================================

Texts are what repeats from packet to packet: layouts of tensors, options of requests, errors. Each end
numbers the texts that it sends. The first packet with a text has its bytes, the next one again with a number,
and then packets have the number only. So texts that come once are never kept, nor are long ones.

    ========================  =========================  ==============================================
    event at the sender       in the packet              at the receiver
    ========================  =========================  ==============================================
    text seen the first time  `NEW`, bytes               uses it, forgets it
    second time               `NEW` with number N, bytes uses it, keeps it as number N, the next one
    later                     N                          uses what it has as number N; none: `WireError`
    table full, send failed   `RESET`, all as if first    forgets all texts, before those of the packet
    ========================  =========================  ==============================================

Packets with numbers are encoded and sent under the channel's lock, so the receiver learns a text before its
number. A packet that travels in a file can be lost, so it has all its texts itself. So has one that is
sent while its thread encodes another: the garbage collector may do that. Tables belong to a connection: a new
worker begins with empty ones.

Threads: any thread sends, one receives. `conch-worker-flush` sends the backlog.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NoReturn

from conch.core.clock import monotonic_ns
from conch.core.errors import InternalError
from conch.core.tensor import Buffer

MAGIC = 0xC7

MOST_INLINE = 32 * 1024
"""Tensors of a message with more bytes in total travel in a block."""

MOST_PACKET = 96 * 1024
"""A message with more bytes travels in a file, announced by an outline."""

RETURNED = 1 << 31
"""Set in the number of a block that belongs to the receiver of the message."""

MOST_RELEASED = 255


class WireError(Exception):
    """A malformed message; its sender can't be trusted any more."""


class Kind(IntEnum):
    """Kinds of messages, sent by S: the server, W: the worker, B: both."""

    HELLO = 1  # B: version
    LOAD = 2  # S: JSON: spec, placement
    LOADED = 3  # W: JSON: abilities of the instance
    FAILED = 4  # W: error: loading failed
    EXECUTE = 5  # S, of a batch: its requests
    DONE = 6  # W, of a batch: its outcome
    RESPONSES = 7  # W, of a request or of several: responses by their senders
    CREDIT = 8  # S: grants more responses to requests
    CANCEL = 9  # S, of a request: its client has left
    RELEASE = 10  # B: returned blocks in the header only
    DROP = 11  # B: freed blocks
    READY = 12  # S, of a check: is the model ready? W: the reply
    CLOSE = 13  # S: finalize and exit
    FORGET = 22  # S, of a request: a rescheduled one does not run again
    CALL = 14  # W, of a call: a request to another model
    CALL_CANCEL = 15  # W, of a call: cancels it
    REPLY = 16  # S, of a call: a response, or an error
    QUERY = 17  # W, of a query: JSON: what the model asks the server
    RESULT = 18  # S, of a query: JSON: the result, or an error
    LOG = 19  # W: JSON: a log record
    METRIC = 20  # W: JSON: a change of a metric
    LEVEL = 21  # S: JSON: the lowest level of records to send
    DEVICES = 23  # S: UUIDs of the GPUs on which outputs may stay
    UNREACHABLE = 24  # W, of a batch: its tensors can't be opened or were lost; the server sends it again
    FREED = 25  # S: UUID and handle of freed memory on a GPU
    UNMAPPED = 26  # B: blocks that can't be mapped: returned, and not to be used again
    LOST = 27  # made by the receiver: stands for a message whose file can't be read
    NOTE = 28  # W: JSON: a conflict between the model and its config
    SPAN = 29  # W, of a request: JSON: a span that the model made
    # Between the core and a front, see `conch.fronts.front_messages`; C: the core, F: the front.
    START = 30  # C: JSON: settings of the port
    CALLERS = 31  # F: JSON: clients that calls name by number
    OPEN = 32  # F, of a call: its beginning
    BEGIN = 33  # C, of a stream: its headers are to be sent, and the first message read
    MESSAGE = 34  # B, of a stream: a message
    READ = 35  # C, of a stream: the next message may come; F: the client has read so many bytes
    ANSWER = 36  # C, of a call: its end
    MODEL = 37  # C, of a model: JSON: its name and version
    STATE = 38  # F: JSON: what its clients have caused
    DRAIN = 39  # C: all connections are to end
    BLOCK = 40  # S, C: a block of a third process, as new block of the message
    HTTP = 41  # B: records of HTTP exchanges, see `conch.fronts.http_messages`
    ALIVE = 43  # S, of a check: does the loop of the model go on? W: the reply
    ADMIT = 42  # F, of a call: its head has come; may it go on?


_KINDS = {int(kind): kind for kind in Kind}

_MOST_BYTES = 2**31 - 1
MOST_FACTS = 1 << 20  # records of the log, errors and the like: senders cut their texts to far less
_WITH_TENSORS = frozenset(
    {
        Kind.EXECUTE,
        Kind.DONE,
        Kind.RESPONSES,
        Kind.CALL,
        Kind.REPLY,
        Kind.OPEN,
        Kind.MESSAGE,
        Kind.ANSWER,
        Kind.HTTP,
    }
)
_WITH_CONFIG_OR_FILES = frozenset({Kind.LOAD, Kind.QUERY, Kind.RESULT})


def most_bytes(kind: Kind) -> int:
    """Largest size of a message of a kind, tensors in blocks not counted."""
    return _MOST_BYTES if kind in _WITH_TENSORS or kind in _WITH_CONFIG_OR_FILES else MOST_FACTS


HEADER = struct.Struct("<BBBBIQIQ")
"""Magic, kind, flags, number of returned blocks, bytes of texts and fields, subject, block: number, size."""

NEW_BLOCK = 1
"""Flag: the block is new; its descriptor comes with the message."""
OUTLINE = 2
"""Flag: the message is in a file; its descriptor comes with this one."""
TEXTS = 4
"""Flag: the message has texts."""
PASSED = 8
"""Flag: it lends blocks of third processes."""
RESET = 1 << 31
"""Set in the count of texts: the receiver forgets all before."""

NEW = 1 << 31
"""Set in the number of a text whose bytes are in the packet; without a number it is not kept."""

MOST_TEXTS = 1024
"""Texts with a number; a full table is emptied."""

MOST_TEXT = 4096
"""Longer texts get no number."""

_HEADER_BYTES = HEADER.size
_NO_FLAGS = ~(NEW_BLOCK | OUTLINE | TEXTS | PASSED)
_PADDING = [bytes(-size % 8) for size in range(8)]
_NUMBER = struct.Struct("<I")


class SentTexts:
    """The texts that one end has sent; used under the channel's lock.

    Attributes:
        encoded: Texts of messages that the receiver has all, as they are sent: most messages need no more.
    """

    def __init__(self) -> None:
        self.encoded: dict[tuple[bytes, ...], bytes] = {}
        self._numbers: dict[bytes, int] = {b"": 0}
        self._once: set[bytes] = set()
        self._reset = False

    def encode(self, texts: tuple[bytes, ...]) -> bytes:
        """Encodes texts of which the receiver may lack some."""
        numbers = self._number(texts)
        encoded = encode_texts(texts, numbers, self._reset)
        if not self._reset and max(numbers) < NEW and len(self.encoded) < MOST_TEXTS:
            self.encoded[texts] = encoded
        self._reset = False
        return encoded

    def forget(self) -> None:
        """Numbers texts anew: the table is full, or a packet was not sent."""
        self._numbers = {b"": 0}
        self._once.clear()
        self.encoded.clear()
        self._reset = True

    def _number(self, texts: tuple[bytes, ...]) -> list[int]:
        """Numbers of texts; `NEW` is set where the receiver needs the bytes."""
        if len(self._numbers) + len(texts) > MOST_TEXTS or len(self.encoded) >= MOST_TEXTS:
            self.forget()
        known, once = self._numbers, self._once
        numbers: list[int] = []
        for text in texts:
            number = known.get(text)
            if number is None:
                number = NEW
                if text in once and len(known) < MOST_TEXTS:
                    once.discard(text)
                    known[text] = len(known)
                    number |= known[text]
                elif len(text) <= MOST_TEXT:
                    once.add(text)
            numbers.append(number)
        if len(once) > MOST_TEXTS:
            once.clear()
        return numbers


def encode_texts(texts: Sequence[bytes], numbers: Sequence[int] | None = None, reset: bool = False) -> bytes:
    """Encodes texts with their numbers, or all of them with their bytes, none to be kept."""
    if not texts:
        return b""
    if numbers is None:
        numbers = [NEW if text else 0 for text in texts]
    count = len(numbers)
    parts = [struct.pack(f"<{count + 1}I", count | RESET if reset else count, *numbers)]
    for text, number in zip(texts, numbers, strict=True):
        if number >= NEW:
            parts += (_NUMBER.pack(len(text)), text)
    return b"".join(parts)


class Text:
    """A received text; `layout` and `options` are what it says as either, once it has been read so."""

    __slots__ = ("content", "layout", "options")

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.layout: object = None
        self.options: object = None


_EMPTY = Text(b"")


class ReceivedTexts:
    """The texts that one end has received with a number."""

    def __init__(self) -> None:
        self.known = [_EMPTY]

    def take_texts(self, message: Message) -> list[Text]:
        """The texts of a message with new ones, which are kept if they have a number.

        Raises:
            WireError: A number is unknown or not the next one, or a text is too long to be kept.
        """
        if message.reset:
            del self.known[1:]
        texts: list[Text] = []
        contents = iter(message.contents)
        for number in message.numbers:
            if number & NEW == 0:
                texts.append(self.at(number))
                continue
            text = Text(next(contents))
            texts.append(text)
            if number == NEW:
                continue
            size, own = len(text.content), number & ~NEW
            if own != len(self.known) or own >= MOST_TEXTS or size > MOST_TEXT:
                raise WireError(f"a text of {size} bytes can't have number {own}")
            self.known.append(text)
        return texts

    def at(self, number: int) -> Text:
        """The text with a number.

        Raises:
            WireError: There is none.
        """
        if number >= len(self.known):
            raise WireError(f"there is no text {number}")
        return self.known[number]


class Message:
    """A packet whose header and texts are read.

    Attributes:
        subject: Number of a batch, a request or a call.
        fields: Fields of this kind of message.
        data: Bytes of small tensors.
        block: Number of the block that comes with it; 0 for none.
        flags: Flags of the header.
        passed: Numbers of third processes' blocks that it lends.
        released: Numbers of returned blocks.
        numbers: Numbers of its texts.
        contents: Bytes of the new ones.
        reset: True if all texts before are to be forgotten.

    Raises:
        WireError: It is malformed.
    """

    __slots__ = (
        "block",
        "block_size",
        "contents",
        "data",
        "fields",
        "flags",
        "kind",
        "numbers",
        "passed",
        "released",
        "reset",
        "subject",
    )

    def __init__(self, packet: memoryview) -> None:
        size = len(packet)
        if size < _HEADER_BYTES:
            raise WireError(f"a message of {size} bytes is too short")
        magic, number, flags, released, length, subject, self.block, self.block_size = HEADER.unpack_from(
            packet
        )
        if magic != MAGIC:
            raise WireError(f"a message begins with {magic:#x}, not {MAGIC:#x}")
        kind = _KINDS.get(number)
        if kind is None:
            raise WireError(f"there is no message of kind {number}")
        first = _HEADER_BYTES
        self.passed: tuple[int, ...] = ()
        if flags & PASSED:
            count = _NUMBER.unpack_from(packet, first)[0] if size >= first + 4 else size
            first += 4 + 4 * count
            if first > size:
                raise WireError(f"a message {kind.name} ends within the numbers of blocks")
            self.passed = struct.unpack_from(f"<{count}I", packet, first - 4 * count)
        start = first + 4 * released
        end = start + length
        if end > size or flags & _NO_FLAGS:
            raise WireError(f"the header of a message {kind.name} does not fit it")
        self.kind: Kind = kind
        self.subject: int = subject
        self.flags: int = flags
        self.released: tuple[int, ...] = (
            struct.unpack_from(f"<{released}I", packet, first) if released else ()
        )
        self.numbers: tuple[int, ...] = ()
        self.contents: Sequence[bytes] = ()
        self.reset = False
        if flags & TEXTS:
            # Counts and lengths are those of any sender: each is checked before it is used.
            count = _NUMBER.unpack_from(packet, start)[0] if start + 4 <= end else size
            self.reset = count >= RESET
            count &= ~RESET
            first, start = start + 4, start + 4 + 4 * count
            if start > end:
                raise WireError(f"a message {kind.name} has not as many texts as it says")
            self.numbers = struct.unpack_from(f"<{count}I", packet, first)
            if count and max(self.numbers) >= NEW:
                self.contents, start = _read_contents(packet, start, end, self.numbers)
        self.fields = packet[start:end]
        self.data: Buffer = packet[end + (-end & 7) :]

    @property
    def new_block(self) -> bool:
        """True if the block's descriptor comes with it."""
        return self.flags & NEW_BLOCK != 0

    @property
    def outline(self) -> bool:
        """True if the message is in a file of `block_size` bytes."""
        return self.flags & OUTLINE != 0


def _read_contents(
    packet: memoryview, start: int, end: int, numbers: Sequence[int]
) -> tuple[list[bytes], int]:
    """The bytes of new texts, and where they end."""
    contents: list[bytes] = []
    for number in numbers:
        if number < NEW:
            continue
        first = start + 4
        start = first + _NUMBER.unpack_from(packet, start)[0] if first <= end else end + 1
        if start > end:
            raise WireError("a text ends behind its message")
        contents.append(bytes(packet[first:start]))
    return contents, start


def encode(
    kind: Kind,
    subject: int = 0,
    fields: bytes = b"",
    data: Sequence[Buffer] = (),
    block: int = 0,
    block_size: int = 0,
    new_block: bool = False,
    released: Sequence[int] = (),
    texts: bytes = b"",
    passed: Sequence[int] = (),
) -> bytes:
    """Encodes a message.

    Args:
        kind: Its kind.
        subject: Number of a batch, a request or a call.
        fields: Its fields.
        data: Parts of tensors; each is padded to a multiple of eight.
        block: Number of the block that comes with it.
        block_size: Size of the block.
        new_block: True if the block's descriptor comes with it.
        released: Numbers of returned blocks.
        texts: Its texts, encoded.
        passed: Numbers of third processes' blocks that it lends.
    """
    length = len(texts) + len(fields)
    flags = (NEW_BLOCK if new_block else 0) | (TEXTS if texts else 0) | (PASSED if passed else 0)
    header = HEADER.pack(MAGIC, kind, flags, len(released), length, subject, block, block_size)
    if not released and not data and not passed:
        return b"".join((header, texts, fields))
    numbers = encode_numbers(released) if released else b""
    if passed:
        numbers = encode_numbers((len(passed), *passed)) + numbers
    parts: list[Buffer] = [header, numbers, texts, fields]
    if data:
        parts.append(_PADDING[_HEADER_BYTES + len(numbers) + length & 7])
        for part in data:
            parts.append(part)
            if rest := len(part) & 7:
                parts.append(_PADDING[rest])
    return b"".join(parts)


def encode_numbers(numbers: Sequence[int]) -> bytes:
    """Encodes numbers of blocks."""
    return struct.pack(f"<{len(numbers)}I", *numbers)


def decode_numbers(fields: Buffer) -> tuple[int, ...]:
    """Decodes numbers of blocks.

    Raises:
        WireError: The length is no multiple of four.
    """
    if len(fields) % 4:
        raise WireError("numbers of blocks have four bytes each")
    return struct.unpack(f"<{len(fields) // 4}I", fields)


def outline(message: Buffer, size: int) -> bytes:
    """Encodes the announcement of a message in a file of `size` bytes, from the message or its beginning.

    It repeats kind, subject and blocks, which the receiver needs if it can't read the file.
    """
    _, kind, flags, _, _, subject, block, _ = HEADER.unpack_from(message)
    passed = b""
    if flags & PASSED:
        end = _HEADER_BYTES + 4 + 4 * _NUMBER.unpack_from(message, _HEADER_BYTES)[0]
        passed = bytes(message[_HEADER_BYTES:end])
    return HEADER.pack(MAGIC, kind, OUTLINE | flags & PASSED, 0, 0, subject, block, size) + passed


def lose(message: Message) -> None:
    """Makes an outline stand for its message, whose file can't be read; `lost_kind` has its kind."""
    message.fields = memoryview(bytes([message.kind]))
    message.kind, message.block = Kind.LOST, 0


def lost_kind(fields: memoryview) -> Kind | None:
    """The kind of a lost message; None if unknown."""
    return _KINDS.get(fields[0]) if len(fields) == 1 else None


# --- the socket --------------------------------------------------------------------------------------------

BUFFER_BYTES = MOST_PACKET + 4096
"""Size of the buffer for `PacketChannel.receive`."""

MOST_WAITING = 256 * 1024 * 1024
"""Backlog in bytes at which a peer that reads nothing for `READ_TIMEOUT_S` is given up."""

ROOM = 16 * 1024 * 1024
"""Backlog in bytes at which `PacketChannel.wait_for_room` blocks."""

READ_TIMEOUT_S = 20.0
"""Time without progress after which a peer counts as not reading."""

_LOOK_S = 0.25
_MOST_FDS = 4
_STAT_BLOCK = 512
_WAITING_COSTS = 512  # bytes of a queued message besides its content
_STEP = 4 << 20
_SEND_BUFFER = 4 * MOST_PACKET
_ANCILLARY = socket.CMSG_SPACE(4 * _MOST_FDS)

# Plain integers: combining flag enums costs more than some system calls.
_RECEIVE = int(socket.MSG_CMSG_CLOEXEC)
_TRY_TO_RECEIVE = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_SEND = int(socket.MSG_NOSIGNAL)
_TRY_TO_SEND = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_TRUNCATED = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_CUT = int(socket.MSG_TRUNC)


class ChannelClosedError(Exception):
    """The other side has closed the channel, or this one has."""


class PacketChannel:
    """One end of a pair of connected sockets.

    Args:
        sock: A socket of type SOCK_SEQPACKET; the channel closes it.
        blocking: Senders wait while the other side does not read. Otherwise messages that can't be sent at
            once are queued, and a thread sends them in order.

    Attributes:
        lock: Held to send; packets whose order matters are encoded under it.
        close_reason: Reason for which this side closed the channel; empty otherwise.
        backlog_bytes: Memory of the messages that wait to be sent.
        flushing: True while a thread sends the backlog.
        waiting_senders: Threads in `wait_for_room`.
        fds_lost: True once descriptors of a message were lost because this process had no room for them.
    """

    def __init__(self, sock: socket.socket, blocking: bool = True) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._sock = sock
        self._patient = blocking
        # Reentrant: the garbage collector or a signal handler may log, and so send, during a send.
        self.lock = threading.RLock()
        self.close_reason = ""
        self.fds_lost = False
        self._backlog: deque[tuple[Sequence[Buffer], list[int], int]] = deque()
        self.backlog_bytes = 0
        self.waiting_senders = 0
        self._waiting: list[Callable[[], object]] = []  # for room
        self._moved_ns = 0  # when the backlog began or last shrank
        self._room = threading.Condition(self.lock)
        self.flushing = False
        self._closed = False

    def send(self, parts: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        """Sends a message of one or more parts; descriptors stay the caller's.

        Raises:
            ChannelClosedError: The channel is closed, perhaps because the peer does not read.
            InternalError: The message has more than 2 GB, tensors in blocks not counted.
            OSError: No memory or no descriptor.
        """
        size = sum(map(len, parts))
        if size > MOST_PACKET:
            self._send_in_file(parts, fds, size)
            return
        flags = _SEND if self._patient else _TRY_TO_SEND
        with self.lock:
            if not self._backlog and not self.flushing:
                try:
                    self._sock.sendmsg(parts, _rights(fds) if fds else [], flags)
                    return
                except BlockingIOError:
                    pass
                except OSError as error:
                    self._not_sent(error, fds)
            if self._closed:
                raise ChannelClosedError("this side has ended the conversation")
            if self.backlog_bytes > MOST_WAITING and not self._is_reading():
                self.close_reason = (
                    f"it has read nothing for {READ_TIMEOUT_S:g} s, while more than {MOST_WAITING >> 20} MiB "
                    f"waited for it; its model may hold the interpreter's lock"
                )
                self._drop_backlog()
                self.shut_down()
                raise ChannelClosedError(self.close_reason)
            cost = _cost(parts, fds)
            self._backlog.append((parts, _duplicates(fds), cost))
            self.backlog_bytes += cost
            if self.flushing:
                return
            self.flushing = True
            self._moved_ns = monotonic_ns()
        try:
            threading.Thread(target=self._flush, name="conch-worker-flush", daemon=True).start()
        except RuntimeError as refused:  # too many threads
            with self.lock:
                self.flushing = False
                self._drop_backlog()
            self.shut_down()
            self._call_waiting()
            raise ChannelClosedError(str(refused)) from None

    def try_send(self, parts: Sequence[Buffer]) -> bool:
        """Sends a small message if that is possible at once; never blocks, not even on the lock.

        Safe everywhere, also when the garbage collector runs within `send`.
        """
        if not self.lock.acquire(blocking=False):
            return False
        try:
            if self._backlog or self.flushing or self._closed:
                return False
            self._sock.sendmsg(parts, [], _TRY_TO_SEND)
            return True
        except OSError:
            return False
        finally:
            self.lock.release()

    @property
    def backpressure(self) -> bool:
        """True if the backlog is longer than `ROOM`."""
        return self.backlog_bytes > ROOM

    def when_room(self, work: Callable[[], object]) -> None:
        """Calls `work` once the backlog is short or the channel is closed, perhaps at once; any thread."""
        with self.lock:
            waits = self.backpressure and not self._closed
            if waits:
                self._waiting.append(work)
        if not waits:
            work()

    def wait_for_room(self) -> None:
        """Blocks while the backlog is long and the peer reads; returns at once if the peer hangs."""
        if not self.backpressure:
            return
        with self._room:
            self.waiting_senders += 1
            while self.backlog_bytes > ROOM // 2 and not self._closed and self._is_reading():
                self._room.wait(_LOOK_S)
            self.waiting_senders -= 1

    def receive(self, buffer: bytearray, wait: bool = True) -> tuple[memoryview, list[int]]:
        """Receives a message; one thread at a time.

        Args:
            buffer: `BUFFER_BYTES` long; holds the message unless it came in a file.
            wait: Blocks until a message arrives.

        Returns:
            The message and its descriptors, which the caller closes. For a file that can't be read: the
            outline (see `Message.outline`).

        Raises:
            BlockingIOError: None has arrived, and `wait` is False.
            ChannelClosedError: The channel is closed.
            WireError: The message is malformed.
        """
        how = _RECEIVE if wait else _TRY_TO_RECEIVE
        try:
            try:
                size, ancillary, flags, _ = self._sock.recvmsg_into([buffer], _ANCILLARY, how)
            except ConnectionResetError:
                # The peer closed without reading everything; what it had sent is still there.
                size, ancillary, flags, _ = self._sock.recvmsg_into([buffer], _ANCILLARY, how)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ChannelClosedError(str(error)) from None
        fds = _descriptors(ancillary) if ancillary else []
        try:
            if not size:
                raise ChannelClosedError("the other side has closed its socket")
            if flags & _TRUNCATED:
                if flags & _CUT:
                    raise WireError("a message is larger than any may be")
                self.fds_lost = True
            packet = memoryview(buffer)[:size]
            if size > 2 and packet[2] & OUTLINE:
                if not fds and self.fds_lost:
                    return packet, fds
                return _read_outline(packet, fds), fds
            return packet, fds
        except BaseException:  # raised again
            _close(fds)
            raise

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def ready(self, timeout_s: float) -> bool:
        """Waits for a message or the end of the channel; False on a timeout."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(timeout_s * 1000))
        except (OSError, ValueError):
            return True  # closed: `receive` reports it

    def shut_down(self) -> None:
        """Shuts the socket down, which wakes senders and receivers on both sides."""
        self._closed = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was first

    def forked(self) -> None:
        """Closes the socket in a fork; the parent's stays open."""
        self._closed = True
        self.lock = threading.RLock()  # a thread that the fork lacks may hold the old one
        self._room = threading.Condition(self.lock)
        self._sock.close()

    def close(self) -> None:
        """Closes the socket; no thread may be receiving."""
        self.shut_down()
        with self.lock:
            self._drop_backlog()
            self._sock.close()
        self._call_waiting()

    def _send_in_file(self, parts: Sequence[Buffer], fds: Sequence[int], size: int) -> None:
        most = most_bytes(Kind(HEADER.unpack_from(parts[0])[1]))
        if size > most:
            raise InternalError(f"a message of {size} bytes is too large: {most} is the most")
        file = os.memfd_create("conch-message", os.MFD_CLOEXEC)
        try:
            with os.fdopen(file, "wb", closefd=False) as target:
                for part in parts:
                    target.write(part)
            self.send([outline(parts[0], size)], [file, *fds])
        finally:
            os.close(file)

    def _is_reading(self) -> bool:
        """True if the peer has read part of the backlog lately."""
        return monotonic_ns() - self._moved_ns < READ_TIMEOUT_S * 1e9

    def _not_sent(self, error: OSError, fds: Sequence[int]) -> NoReturn:
        """Ends the conversation, unless the packet could be sent again."""
        if fds and error.errno == errno.ETOOMANYREFS:
            raise error  # nothing was sent: too many descriptors of this user are in flight
        # A lost message would be waited for, so the reader must notice, also when the system ran out of
        # resources.
        self.shut_down()
        raise ChannelClosedError(str(error)) from None

    def _flush(self) -> None:
        """Sends the backlog; blocks as long as that takes."""
        while True:
            if self._waiting and self.backlog_bytes <= ROOM // 2:
                self._call_waiting()
            with self.lock:
                if not self._backlog:
                    self.flushing = False
                    return
                parts, fds, cost = self._backlog.popleft()
                self.backlog_bytes -= cost
                self._moved_ns = monotonic_ns()
                if self.backlog_bytes <= ROOM // 2:
                    self._room.notify_all()
            try:
                self._send_patiently(parts, fds)
            except (OSError, ValueError):
                self.shut_down()
                with self.lock:
                    self._drop_backlog()
            finally:
                _close(fds)

    def _send_patiently(self, parts: Sequence[Buffer], fds: Sequence[int]) -> None:
        """Sends a message; waits until there is room.

        Raises:
            OSError: It can't be sent.
            ValueError: The socket is closed.
        """
        while True:
            try:
                self._sock.sendmsg(parts, _rights(fds) if fds else [], _SEND)
                return
            except BlockingIOError:  # the caller may have made it non-blocking
                poll = select.poll()
                poll.register(self._sock, select.POLLOUT)
                poll.poll()

    def _call_waiting(self) -> None:
        """Calls what waits for room; without the lock, as it may send on other channels."""
        with self.lock:
            waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()

    def _drop_backlog(self) -> None:
        """Drops what waits to be sent; the caller has the lock, and has closed the channel or does so."""
        while self._backlog:
            _close(self._backlog.popleft()[1])
        self.backlog_bytes = 0
        self._room.notify_all()


def _rights(fds: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _read_outline(packet: memoryview, fds: list[int]) -> memoryview:
    """Reads the message from the first descriptor and closes it; returns the outline if memory is short."""
    message = Message(packet)
    size = message.block_size
    if not fds:
        raise WireError("a message in a file has come without the file")
    file = fds.pop(0)
    try:
        most = most_bytes(message.kind)
        if size > most:
            raise WireError(f"a message {message.kind.name} has {size} bytes, and may have {most}")
        found = os.fstat(file)
        if not 0 < size <= found.st_size:
            raise WireError("a message in a file is not as long as it should be")
        if found.st_blocks * _STAT_BLOCK < size:  # holes cost the sender nothing, and this process memory
            raise WireError("a message in a file has holes")
        content = bytearray()
        while len(content) < size:
            part = os.pread(file, min(_STEP, size - len(content)), len(content))
            if not part:
                raise WireError("a message in a file ends too early")
            content += part  # in steps: the memory of the whole would be cleared while the GIL is held
        return memoryview(content)
    except MemoryError:
        return packet
    except OSError as error:
        raise WireError(f"a message in a file can't be read: {error}") from None
    finally:
        os.close(file)


def _cost(parts: Sequence[Buffer], fds: Sequence[int]) -> int:
    """Memory of a queued message, files included."""
    files = sum(os.fstat(fd).st_blocks for fd in fds)
    return sum(map(len, parts)) + files * _STAT_BLOCK + _WAITING_COSTS


def _duplicates(fds: Sequence[int]) -> list[int]:
    """Duplicates all descriptors or none."""
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError:
        _close(copies)
        raise
    return copies


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
