"""A socket of packets and descriptors between the server and a worker: one reader, many senders."""

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
"""How large a buffer for `Channel.receive` has to be."""

MOST_WAITING = 256 * 1024 * 1024
"""While more bytes than this wait for a side that reads nothing for `PATIENCE_S`, it is given up."""

ROOM = 16 * 1024 * 1024
"""While more than this waits, those who can wait had better do so; see `Channel.wait_for_room`."""

PATIENCE_S = 20.0
"""How long a side may read nothing before it counts as one that does not read."""

_LOOK_S = 0.25
_MOST_FDS = 4
_STAT_BLOCK = 512
_WAITING_COSTS = 512  # what each message that waits takes besides its bytes
_MOST_OUTLINE = 2**31 - 1
_SEND_BUFFER = 4 * wire.MOST_PACKET
_ANCILLARY = socket.CMSG_SPACE(4 * _MOST_FDS)

# As plain numbers: putting flags together costs more than many a call that takes them.
_RECEIVE = int(socket.MSG_CMSG_CLOEXEC)
_TRY_TO_RECEIVE = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_SEND = int(socket.MSG_NOSIGNAL)
_TRY_TO_SEND = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_TRUNCATED = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_CUT = int(socket.MSG_TRUNC)


class ChannelClosedError(Exception):
    """Nobody is there any more on the other side."""


class Channel:
    """One end of a pair of connected sockets.

    Args:
        sock: A socket of type SOCK_SEQPACKET; the channel closes it.
        patient: Whether a sender waits while the other side does not read. If not, what can't be sent at
            once is kept and sent by a thread of its own, in the order in which it came.

    Attributes:
        why: Why this side has ended the conversation, where the other one gave it a reason to; else empty.
        fds_lost: Whether a message has come whose descriptors this process had no room for.
    """

    def __init__(self, sock: socket.socket, patient: bool = True) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._sock = sock
        self._patient = patient
        # A thread may send while it sends: the garbage collector, or a signal, may run what logs.
        self._lock = threading.RLock()
        self.why = ""
        self.fds_lost = False
        self._backlog: deque[tuple[list[Buffer], list[int], int]] = deque()
        self._waiting = 0  # bytes that the backlog takes
        self._moved_ns = 0  # when it began, or when something was last taken out of it
        self._room = threading.Condition(self._lock)
        self._flushing = False
        self._closed = False

    def send(self, parts: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        """Sends a message of one or more parts, with descriptors, which the caller keeps.

        Raises:
            ChannelClosedError: Nobody will receive it, perhaps because too much waits for that already.
            InternalError: It has more than 2 GB, without the tensors in its block.
            OSError: There is no memory for it, or no descriptor.
        """
        size = sum(map(len, parts))
        if size <= wire.MOST_PACKET:
            self._send(list(parts), fds)
            return
        if size > _MOST_OUTLINE:
            raise InternalError(f"a message of {size} bytes is too large: {_MOST_OUTLINE} is the most")
        file = os.memfd_create("conch-message", os.MFD_CLOEXEC)
        try:
            with os.fdopen(file, "wb", closefd=False) as target:
                for part in parts:
                    target.write(part)
            self._send([wire.outline(parts[0], size)], [file, *fds])
        finally:
            os.close(file)

    def try_send(self, parts: Sequence[Buffer]) -> bool:
        """Sends a small message if that is possible at once; never waits, not even for another sender.

        May be called from anywhere, also by the garbage collector in the middle of `send`.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._backlog or self._flushing or self._closed:
                return False
            self._sock.sendmsg(parts, [], _TRY_TO_SEND)
            return True
        except OSError:
            return False
        finally:
            self._lock.release()

    def wait_for_room(self) -> None:
        """Waits while much waits for the other side, which reads; for who sends any number of messages.

        One that does not read is not waited for: whoever waits must not hang with it.
        """
        if self._waiting <= ROOM:
            return
        with self._room:
            while self._waiting > ROOM // 2 and not self._closed and self._reads():
                self._room.wait(_LOOK_S)

    def receive(self, buffer: bytearray, wait: bool = True) -> tuple[memoryview, list[int]]:
        """Waits for a message; only one thread may do so at a time.

        Args:
            buffer: Room for `BUFFER_BYTES`; the message is in it, unless it did not fit into a packet.
            wait: Whether to wait if there is none.

        Returns:
            The message, and the descriptors that came with it, which are the caller's to close. Of a message
            whose file can't be read that is the outline: see `Message.outline`.

        Raises:
            BlockingIOError: There is none, and it is not to be waited for.
            ChannelClosedError: There will be no more.
            WireError: What came can't be a message.
        """
        how = _RECEIVE if wait else _TRY_TO_RECEIVE
        try:
            try:
                size, ancillary, flags, _ = self._sock.recvmsg_into([buffer], _ANCILLARY, how)
            except ConnectionResetError:
                # The other side has gone without reading everything. What it had sent is still there.
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
        """Waits until there is something to receive, or the end; returns whether there is."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(timeout_s * 1000))
        except (OSError, ValueError):
            return True  # it is closed, as receiving will tell

    def shut(self) -> None:
        """Ends the conversation: whoever sends or receives on either side is told at once."""
        self._closed = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was first

    def forked(self) -> None:
        """Says that this process is a fork: the socket stays its parent's, and ends here."""
        self._closed = True
        self._lock = threading.RLock()  # a thread that is not here may have had it
        self._room = threading.Condition(self._lock)
        self._sock.close()

    def close(self) -> None:
        """Closes the socket; nobody may receive any more."""
        self.shut()
        with self._lock:
            self._drop_backlog()
            self._sock.close()

    def _send(self, parts: list[Buffer], fds: Sequence[int]) -> None:
        flags = _SEND if self._patient else _TRY_TO_SEND
        with self._lock:
            if not self._backlog and not self._flushing:
                try:
                    self._put(parts, fds, flags)
                    return
                except BlockingIOError:
                    pass
            if self._closed:
                raise ChannelClosedError("this side has ended the conversation")
            if self._waiting > MOST_WAITING and not self._reads():
                self.why = (
                    f"it has read nothing for {PATIENCE_S:g} s, while more than {MOST_WAITING >> 20} MiB "
                    f"waited for it; its model may hold the interpreter's lock"
                )
                self._drop_backlog()
                self.shut()
                raise ChannelClosedError(self.why)
            cost = _cost(parts, fds)
            self._backlog.append((parts, _duplicates(fds), cost))
            self._waiting += cost
            if self._flushing:
                return
            self._flushing = True
            self._moved_ns = monotonic_ns()
        try:
            threading.Thread(target=self._flush, name="conch-worker-flush", daemon=True).start()
        except RuntimeError as error:  # there are too many
            with self._lock:
                self._flushing = False
                self._drop_backlog()
            self.shut()
            raise ChannelClosedError(str(error)) from None

    def _reads(self) -> bool:
        """Whether the other side, for which something waits, has read something lately."""
        return monotonic_ns() - self._moved_ns < PATIENCE_S * 1e9

    def _put(self, parts: list[Buffer], fds: Sequence[int], flags: int) -> None:
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
                raise  # nothing has been sent: too many descriptors of this user are on their way
            # Also where the system has run out of something: what was lost would be waited for, so whoever
            # reads is to notice.
            self.shut()
            raise ChannelClosedError(str(error)) from None

    def _flush(self) -> None:
        """Sends the backlog, waiting as long as that takes."""
        while True:
            with self._lock:
                if not self._backlog:
                    self._flushing = False
                    return
                parts, fds, cost = self._backlog.popleft()
                self._waiting -= cost
                self._moved_ns = monotonic_ns()
                if self._waiting <= ROOM // 2:
                    self._room.notify_all()
            try:
                self._put(parts, fds, _SEND)
            except (ChannelClosedError, OSError):
                self.shut()
                with self._lock:
                    self._drop_backlog()
            finally:
                _close(fds)

    def _drop_backlog(self) -> None:
        while self._backlog:
            _close(self._backlog.popleft()[1])
        self._waiting = 0
        self._room.notify_all()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _read_outline(packet: memoryview, fds: list[int]) -> memoryview:
    """The message in the first of the descriptors, which is closed; the outline without memory for it."""
    size = wire.decode(packet).block_size
    if not fds:
        raise WireError("a message in a file has come without the file")
    file = fds.pop(0)
    try:
        if not 0 < size <= _MOST_OUTLINE or os.fstat(file).st_size < size:
            raise WireError("a message in a file is not as long as it should be")
        content = bytearray(size)
        view, done = memoryview(content), 0
        while done < size:
            count = os.preadv(file, [view[done:]], done)
            if not count:
                raise WireError("a message in a file ends too early")
            done += count
        return view
    except MemoryError:
        return packet
    except OSError as error:
        raise WireError(f"a message in a file can't be read: {error}") from None
    finally:
        os.close(file)


def _cost(parts: list[Buffer], fds: Sequence[int]) -> int:
    """The memory that a message takes while it waits, with that of its files."""
    files = sum(os.fstat(fd).st_blocks for fd in fds)
    return sum(map(len, parts)) + files * _STAT_BLOCK + _WAITING_COSTS


def _duplicates(fds: Sequence[int]) -> list[int]:
    """Descriptors of the same files; all of them or none."""
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
