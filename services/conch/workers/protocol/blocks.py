"""Memory for large tensors: blocks that one side makes and the other maps.

A block is a memfd, sealed so that it keeps its size: neither side can shrink the other's mapping.
It travels once; later messages name its number. Its maker lends it with a message and has it back when the
receiver has no view of it any more. Sizes are powers of two, so that the same few blocks are used again and
again, and what is idle beyond a cap, or for a while, is dropped on both sides.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from conch.core.clock import Clock, monotonic_ns
from conch.core.tensor import Array
from conch.workers.protocol.wire import RETURNED, WireError

LEAST_BYTES = 64 * 1024
MOST_IDLE_BYTES = 256 * 1024 * 1024
MOST_IDLE = 16
"""How many blocks may be idle: each takes a descriptor on both sides."""

MOST_LENT = 64
"""While so many blocks are lent, tensors travel in files that the receiver reads and closes at once.

So one side takes no more descriptors of the other one, however many requests wait for slow clients.
"""

MOST_MAPPED = 2 * (MOST_LENT + MOST_IDLE)
"""How many blocks of the other side's are mapped: more than one that keeps to the limits above has."""

IDLE_NS = 30_000_000_000
"""How long a block may be idle."""

MANY = 16
MANY_BYTES = 32 * 1024 * 1024
"""When released blocks are given back although there is no message that they could travel with."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NEEDED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Block:
    """A block of this side's, while it is lent to the other.

    Attributes:
        number: Its number.
        size: Its size.
        memory: All of its bytes.
        fd: Its descriptor, for as long as the other side has not got it; -1 then.
        holds: How often it is lent: by messages, and by views of this side's of what came back in it.
        idle_since: When it was given back.
    """

    __slots__ = ("fd", "holds", "idle_since", "memory", "number", "size")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.fd = os.memfd_create("conch-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.memory: Array = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        except BaseException:
            os.close(self.fd)
            raise
        self.holds = 0
        self.idle_since = 0

    def sent(self) -> None:
        """Says that the other side has its descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def block_size(nbytes: int) -> int:
    """The size of a block for so many bytes."""
    return max(LEAST_BYTES, 1 << (nbytes - 1).bit_length())


class Pool:
    """The blocks that this side has made; usable from any thread.

    Args:
        clock: Monotonic time in nanoseconds.
        most_idle: Bytes of idle blocks that are kept.
    """

    def __init__(self, clock: Clock = monotonic_ns, most_idle: int = MOST_IDLE_BYTES) -> None:
        self._clock = clock
        self._most_idle = most_idle
        self._lock = threading.RLock()  # as the channel's
        self._blocks: dict[int, Block] = {}
        self._idle: dict[int, list[Block]] = {}
        self._idle_bytes = 0
        self._idle_count = 0
        self._next = 1
        self._dropped: list[int] = []
        self._watch = _Watch()
        self._returned = self._watch.gone

    @property
    def lent(self) -> int:
        """How many blocks are lent."""
        with self._lock:
            return len(self._blocks) - self._idle_count

    @property
    def crowded(self) -> bool:
        """Whether so many blocks are lent that no further one should be."""
        return self.lent >= MOST_LENT

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    def take(self, nbytes: int) -> Block:
        """A block for so many bytes, held once.

        Raises:
            OSError: There is no memory for one, or no descriptor.
        """
        self._settle()
        size = block_size(nbytes)
        with self._lock:
            idle = self._idle.get(size)
            if idle:
                block = idle.pop()
                self._idle_bytes -= size
                self._idle_count -= 1
            else:
                number = self._next
                self._next = number % (RETURNED - 1) + 1
                block = self._blocks[number] = Block(number, size)
            block.holds = 1
            return block

    def give_back(self, number: int) -> None:
        """Ends one hold on a block.

        Raises:
            WireError: It is not lent.
        """
        with self._lock:
            self._give_back(number)

    def unmapped(self, number: int) -> None:
        """Takes back a block that the other side can't map: it is not used again.

        Raises:
            WireError: It is not lent.
        """
        with self._lock:
            block = self._blocks.get(number)
            self._give_back(number)
            if block is None or block.holds:
                return
            idle = self._idle[block.size]
            if block in idle:  # else it has been dropped already
                idle.remove(block)
                self._idle_bytes -= block.size
                self._drop(block)

    def discard(self, block: Block) -> None:
        """Takes a block back that was taken and has not been sent."""
        with self._lock:
            if self._blocks.get(block.number) is block:
                self._give_back(block.number)
            else:  # this has been closed meanwhile
                block.sent()

    def view(self, number: int) -> Array:
        """All of a lent block, which stays lent for as long as there is a view of this.

        Raises:
            WireError: It is not lent.
        """
        with self._lock:
            block = self._blocks.get(number)
            if block is None or not block.holds:
                raise WireError(f"block {number} is not lent")
            block.holds += 1
            # The array that is watched must be one that others refer to and can't see through: numpy gives
            # views the array as their base whose own base is not an array.
            root: Array = np.frombuffer(block.memory.data.toreadonly(), np.uint8)
        self._watch.add(root, number)
        return root

    def take_dropped(self) -> list[int]:
        """Numbers of blocks that are gone since this was last asked, for the other side."""
        if not self._dropped:
            return []
        with self._lock:
            dropped, self._dropped = self._dropped, []
        return dropped

    def put_back_dropped(self, dropped: list[int]) -> None:
        """Says that the other side could not be told of these."""
        with self._lock:
            self._dropped += dropped

    def tidy(self) -> None:
        """Drops what has been idle for long, also when nothing else happens."""
        self._settle()
        with self._lock:
            self._trim(self._clock())

    def close(self) -> None:
        """Forgets all blocks; their memory goes with the last view of it."""
        with self._lock:
            for block in self._blocks.values():
                block.sent()
            self._blocks.clear()
            self._idle.clear()
            self._idle_bytes = self._idle_count = 0

    def _settle(self) -> None:
        """Takes back what views of this side have let go of."""
        while self._returned:
            try:
                number = self._returned.popleft()
            except IndexError:
                return  # another thread was faster
            with self._lock:
                if number in self._blocks:
                    self._give_back(number)

    def _give_back(self, number: int) -> None:
        block = self._blocks.get(number)
        if block is None or not block.holds:
            raise WireError(f"block {number} is given back, but is not lent")
        block.holds -= 1
        if block.holds:
            return
        block.idle_since = self._clock()
        self._idle.setdefault(block.size, []).append(block)
        self._idle_bytes += block.size
        self._idle_count += 1
        self._trim(block.idle_since)

    def _trim(self, now: int) -> None:
        for size, idle in self._idle.items():
            # The front has been idle for longest, as the last one given back is the first one taken.
            while idle and (
                now - idle[0].idle_since > IDLE_NS
                or self._idle_bytes > self._most_idle
                or self._idle_count > MOST_IDLE
            ):
                self._idle_bytes -= size
                self._drop(idle.pop(0))

    def _drop(self, block: Block) -> None:
        block.sent()
        self._idle_count -= 1
        del self._blocks[block.number]
        self._dropped.append(block.number)


class Mappings:
    """The other side's blocks, as far as this side has mapped them.

    The receiving thread calls `lend` and `drop`; the rest may be used from any thread.

    Args:
        writable: Whether this side may write to them.
        on_many: Called when much is to be given back, possibly by the garbage collector in the middle of
            anything; must not wait.
    """

    def __init__(self, writable: bool, on_many: Callable[[], None]) -> None:
        self._protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._maps: dict[int, Array] = {}
        self._watch = _Watch()
        self._watch.then = self._on_released
        self._released = self._watch.gone
        self._on_many = on_many

    @property
    def count(self) -> int:
        """How many blocks are mapped."""
        return len(self._maps)

    def add(self, number: int, size: int, fd: int) -> None:
        """Maps a block; the descriptor stays the caller's.

        Raises:
            WireError: It is no block, or not sealed.
            OSError: This process can't map it now.
        """
        if number in self._maps or not 0 < number < RETURNED:
            raise WireError(f"block {number} is there already, or can't be")
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if seals & _NEEDED != _NEEDED:
                raise WireError(f"block {number} is not sealed")
            if size <= 0 or os.fstat(fd).st_size != size:
                raise WireError(f"block {number} does not have {size} bytes")
        except (OSError, OverflowError) as error:
            raise WireError(f"block {number} can't be mapped: {error}") from None
        if len(self._maps) >= MOST_MAPPED:
            raise OSError(errno.EMFILE, f"{MOST_MAPPED} blocks are mapped already")
        try:
            mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, self._protection)
        except (ValueError, OverflowError) as error:
            raise WireError(f"block {number} can't be mapped: {error}") from None
        self._maps[number] = np.frombuffer(mapping, np.uint8)

    def lend(self, number: int) -> Array:
        """All of a block, for one message: it is given back when there is no view of this any more.

        Raises:
            WireError: There is no such block.
        """
        memory = self._maps.get(number)
        if memory is None:
            raise WireError(f"there is no block {number}")
        root: Array = np.frombuffer(memory.data, np.uint8)
        self._watch.add(root, number)
        return root

    def find(self, array: Array) -> tuple[int, int] | None:
        """The block that has been lent and that an array is a view of, and where in it that begins."""
        base: object = array
        while base is not None:
            if isinstance(base, memoryview):
                base = base.obj
            if not isinstance(base, np.ndarray):
                return None  # whose memory an array of that has is not known
            number = self._watch.numbers.get(id(base))
            if number is not None:
                offset = _address(array) - _address(base)
                return (number, offset) if 0 <= offset <= base.nbytes - array.nbytes else None
            base = base.base
        return None

    def drop(self, number: int) -> None:
        """Forgets a block."""
        self._maps.pop(number, None)

    @property
    def waiting(self) -> int:
        """How many blocks are to be given back."""
        return len(self._released)

    def take_released(self, most: int) -> list[int]:
        """Blocks to give back to the other side now."""
        self._watch.nbytes = 0
        released: list[int] = []
        while self._released and len(released) < most:
            try:
                released.append(self._released.popleft())
            except IndexError:
                break  # another thread was faster
        return released

    def owe(self, number: int, at_once: bool) -> None:
        """Has something given back that is no block of these: soon, or now if that is possible."""
        self._released.append(number)
        if at_once:
            self._on_many()
        else:
            self._on_released()

    def _on_released(self) -> None:
        if len(self._released) >= MANY or self._watch.nbytes >= MANY_BYTES:
            self._on_many()

    def put_back(self, released: list[int]) -> None:
        """Says that these could not be given back now."""
        self._released.extend(released)

    def close(self) -> None:
        """Forgets all blocks; their memory goes with the last view of it."""
        self._maps.clear()


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class _Watch:
    """Has a block's number put into a queue when an array goes; does little else, as that may be anywhere.

    Attributes:
        gone: The numbers.
        numbers: Those of arrays that are there, by the identity of the array.
        nbytes: About how many bytes they are together, set to 0 when the queue is emptied.
        then: Called after that; must not wait for anything.
    """

    # weakref.finalize would do, but costs ten times as much and runs at exit too.
    def __init__(self) -> None:
        self.gone: deque[int] = deque()
        self.nbytes = 0
        self.then: Callable[[], None] | None = None
        self.numbers: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Array]] = {}

    def add(self, root: Array, number: int) -> None:
        key, references, nbytes = id(root), self._references, root.nbytes
        numbers = self.numbers

        def on_gone(reference: weakref.ref[Array]) -> None:
            references.pop(key, None)
            numbers.pop(key, None)
            self.gone.append(number)
            self.nbytes += nbytes
            if self.then is not None:
                self.then()

        references[key] = weakref.ref(root, on_gone)
        numbers[key] = number
