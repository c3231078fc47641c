"""A SOCK_SEQPACKET socket with descriptors between server and worker: one reader, many senders.

Owns: the socket, the backlog. Threads and locks: a lock for senders; `conch-worker-flush` sends the backlog.
Used by: message_stream, on both sides.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence

from conch.core.clock import monotonic_ns
from conch.core.errors import InternalError
from conch.core.tensor import Buffer
from conch.workers.protocol import wire
from conch.workers.protocol.wire import WireError

BUFFER_BYTES = wire.MOST_PACKET + 4096
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
_SEND_BUFFER = 4 * wire.MOST_PACKET
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
        close_reason: Why this side gave the other one up; empty otherwise.
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
        self._lock = threading.RLock()
        self.close_reason = ""
        self.fds_lost = False
        self._backlog: deque[tuple[Sequence[Buffer], list[int], int]] = deque()
        self.backlog_bytes = 0
        self.waiting_senders = 0
        self._moved_ns = 0  # when the backlog began or last shrank
        self._room = threading.Condition(self._lock)
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
        if size > wire.MOST_PACKET:
            self._send_in_file(parts, fds, size)
            return
        flags = _SEND if self._patient else _TRY_TO_SEND
        with self._lock:
            if not self._backlog and not self.flushing:
                try:
                    self._sendmsg(parts, fds, flags)
                    return
                except BlockingIOError:
                    pass
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
        except RuntimeError as error:  # too many threads
            with self._lock:
                self.flushing = False
                self._drop_backlog()
            self.shut_down()
            raise ChannelClosedError(str(error)) from None

    def try_send(self, parts: Sequence[Buffer]) -> bool:
        """Sends a small message if that is possible at once; never blocks, not even on the lock.

        Safe everywhere, also when the garbage collector runs within `send`.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._backlog or self.flushing or self._closed:
                return False
            self._sock.sendmsg(parts, [], _TRY_TO_SEND)
            return True
        except OSError:
            return False
        finally:
            self._lock.release()

    def wait_for_room(self) -> None:
        """Blocks while the backlog is long and the peer reads; returns at once if the peer hangs."""
        if self.backlog_bytes <= ROOM:
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
            if packet[2] & wire.OUTLINE if size > 2 else False:
                if not fds and self.fds_lost:
                    return packet, fds
                return _read_outline(packet, fds), fds
            return packet, fds
        except BaseException:
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
        self._lock = threading.RLock()  # a thread that the fork lacks may hold the old one
        self._room = threading.Condition(self._lock)
        self._sock.close()

    def close(self) -> None:
        """Closes the socket; no thread may be receiving."""
        self.shut_down()
        with self._lock:
            self._drop_backlog()
            self._sock.close()

    def _send_in_file(self, parts: Sequence[Buffer], fds: Sequence[int], size: int) -> None:
        most = wire.most_bytes(wire.kind_of(parts[0]))
        if size > most:
            raise InternalError(f"a message of {size} bytes is too large: {most} is the most")
        file = os.memfd_create("conch-message", os.MFD_CLOEXEC)
        try:
            with os.fdopen(file, "wb", closefd=False) as target:
                for part in parts:
                    target.write(part)
            self.send([wire.outline(parts[0], size)], [file, *fds])
        finally:
            os.close(file)

    def _is_reading(self) -> bool:
        """True if the peer has read part of the backlog lately."""
        return monotonic_ns() - self._moved_ns < READ_TIMEOUT_S * 1e9

    def _sendmsg(self, parts: Sequence[Buffer], fds: Sequence[int], flags: int) -> None:
        try:
            if fds:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                self._sock.sendmsg(parts, [rights], flags)
            else:
                self._sock.sendmsg(parts, [], flags)
        except BlockingIOError:
            raise
        except OSError as error:
            if fds and error.errno == errno.ETOOMANYREFS:
                raise  # nothing was sent: too many descriptors of this user are in flight
            # A lost message would be waited for, so the reader must notice, also when the system ran out of
            # resources.
            self.shut_down()
            raise ChannelClosedError(str(error)) from None

    def _flush(self) -> None:
        """Sends the backlog; blocks as long as that takes."""
        while True:
            with self._lock:
                if not self._backlog:
                    self.flushing = False
                    return
                parts, fds, cost = self._backlog.popleft()
                self.backlog_bytes -= cost
                self._moved_ns = monotonic_ns()
                if self.backlog_bytes <= ROOM // 2:
                    self._room.notify_all()
            try:
                self._sendmsg(parts, fds, _SEND)
            except (ChannelClosedError, OSError):
                self.shut_down()
                with self._lock:
                    self._drop_backlog()
            finally:
                _close(fds)

    def _drop_backlog(self) -> None:
        while self._backlog:
            _close(self._backlog.popleft()[1])
        self.backlog_bytes = 0
        self._room.notify_all()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _read_outline(packet: memoryview, fds: list[int]) -> memoryview:
    """Reads the message from the first descriptor and closes it; returns the outline if memory is short."""
    message = wire.decode(packet)
    size = message.block_size
    if not fds:
        raise WireError("a message in a file has come without the file")
    file = fds.pop(0)
    try:
        most = wire.most_bytes(message.kind)
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
    except BaseException:
        _close(copies)
        raise
    return copies


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
