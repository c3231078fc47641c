"""Shared memory for large tensors: blocks that one side makes and the other maps.

A block is a memfd, sealed so that neither side can shrink the other's mapping. Its descriptor is sent once;
later messages have its number. Its maker lends it with a message, and the receiver returns it after the last
view is released. Sizes are powers of two, so that few blocks serve all messages.

    =====  ===========================================  ===================================
    state  event                                        next state
    =====  ===========================================  ===================================
    none   `take` finds no idle block of the size       lent, with a descriptor to be sent
    idle   `take`                                       lent
    lent   last hold is given back                      idle
    lent   `unmapped`: the receiver can't map it        freed, DROP for the receiver
    idle   idle for `IDLE_NS`, or over the caps         freed, DROP for the receiver
    =====  ===========================================  ===================================

A side may *pass on* a block that a third process has lent it: it sends the descriptor once, in a message of
its own, names the block in those that lend it, and keeps its own view until the receiver has returned it. The
receiver can only read it, and gets a DROP once its maker has freed it.

Guarantee: a block of which either side has a view is not idle, so `take` does not return it.
Threads and locks: both classes are usable from any thread; finalizers of arrays only append to a queue.
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
from functools import partial

import numpy as np

from conch.core.clock import Clock, monotonic_ns
from conch.core.tensor import Array, Tensor
from conch.ipc.channel import RETURNED, WireError

LEAST_BYTES = 64 * 1024
MOST_IDLE_BYTES = 256 * 1024 * 1024
MOST_IDLE = 16
"""Idle blocks kept: each takes a descriptor on both sides."""

MOST_LENT = 64
"""With more blocks lent, tensors travel in files that the receiver reads and closes at once.

This bounds the receiver's descriptors, however many requests wait for slow clients.
"""

MOST_MAPPED = 2 * (MOST_LENT + MOST_IDLE)
"""Mapped blocks of the peer: more than the limits above allow it."""

IDLE_NS = 30_000_000_000
"""Longer idle blocks are freed."""

MOST_PASSED_ON = 128
"""Blocks of third processes that a receiver has: each takes one of its descriptors."""

MANY = 16
MANY_BYTES = 32 * 1024 * 1024
"""From so many released blocks or bytes on, they are returned in a message of their own."""

_SMALL_BYTES = 8 << 20
_STAT_BLOCK = 512

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NEEDED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class MappedBlock:
    """A block of the other side.

    Attributes:
        fd: A descriptor to pass it on with; -1 if none is kept.
    """

    __slots__ = ("__weakref__", "fd", "memory")

    def __init__(self, memory: Array, fd: int) -> None:
        self.memory = memory
        self.fd = fd

    def __del__(self) -> None:
        # Tensors that are passed on refer to it, so the number is never another file's.
        if self.fd >= 0:
            os.close(self.fd)


class PassedBlock:
    """A block of a third process, as one receiver has it.

    Attributes:
        reference: The block.
        sent: True if the receiver has its descriptor.
        holds: Messages that lend it.
        tensors: Their tensors, while there are any: so the block is not returned to its maker.
    """

    __slots__ = ("holds", "number", "reference", "sent", "tensors")

    def __init__(self, number: int, reference: weakref.ref[MappedBlock]) -> None:
        self.number = number
        self.reference = reference
        self.sent = False
        self.holds = 0
        self.tensors: list[Tensor] = []

    def end_hold(self) -> None:
        """Ends a hold.

        Raises:
            WireError: There is none.
        """
        if not self.holds:
            raise WireError(f"block {self.number} is given back, but is not lent")
        self.holds -= 1
        if not self.holds:
            self.tensors = []


class Block:
    """A block of this side.

    Attributes:
        fd: Its descriptor until the peer has it; then -1.
        holds: Messages that lend it, and views of tensors that came back in it.
        idle_since: Monotonic time at which it was returned.
        owner: Owner of the tensors; an idle block is only used again for the same one.
    """

    __slots__ = ("fd", "holds", "idle_since", "memory", "number", "owner", "size")

    def __init__(self, number: int, size: int, owner: object = None) -> None:
        self.number = number
        self.size = size
        self.owner = owner
        self.fd = os.memfd_create("conch-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.memory: Array = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        except BaseException:  # raised again
            os.close(self.fd)
            raise
        self.holds = 0
        self.idle_since = 0

    def sent(self) -> None:
        """Closes the descriptor, which the peer has or will not get."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def block_size(nbytes: int) -> int:
    """The size of a block for `nbytes`."""
    return max(LEAST_BYTES, 1 << (nbytes - 1).bit_length())


class Pool:
    """The blocks of this side; keeps at most `most_idle` bytes of idle ones."""

    def __init__(self, clock: Clock = monotonic_ns, most_idle: int = MOST_IDLE_BYTES) -> None:
        self._clock = clock
        self._most_idle = most_idle
        self._lock = threading.RLock()  # as the channel's
        self._blocks: dict[int, Block] = {}
        self._passed: dict[int, PassedBlock] = {}
        self._passed_of: dict[int, PassedBlock] = {}  # by the identity of their blocks
        self._idle: dict[tuple[int, object], list[Block]] = {}
        self._idle_bytes = 0
        self._idle_count = 0
        self._next = 1
        self.dropped: list[int] = []
        self._views = _ReleaseQueue()
        self._returned = self._views.released

    @property
    def lent(self) -> int:
        """The number of lent blocks of its own."""
        with self._lock:
            return len(self._blocks) - self._idle_count

    @property
    def all_lent(self) -> bool:
        """True if `MOST_LENT` blocks are lent, so that no further one should be."""
        return self.lent >= MOST_LENT

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self._blocks)

    def take_block(self, nbytes: int, owner: object = None) -> Block:
        """Takes a block for `nbytes`, with one hold.

        Args:
            nbytes: Size of the tensors.
            owner: A block is only used again for the same one.

        Raises:
            OSError: Memory or descriptors are exhausted.
        """
        self._settle()
        size = block_size(nbytes)
        with self._lock:
            idle = self._idle.get((size, owner))
            if idle:
                block = idle.pop()
                if not idle:  # clients may make up any number of owners
                    del self._idle[size, owner]
                self._idle_bytes -= size
                self._idle_count -= 1
            else:
                number = self._number()
                block = self._blocks[number] = Block(number, size, owner)
            block.holds = 1
            return block

    def _number(self) -> int:
        number = self._next
        self._next = number % (RETURNED - 1) + 1
        return number

    def lend_foreign_block(self, block: MappedBlock, kept: list[Tensor]) -> PassedBlock | None:
        """Lends a third process's block, which has the tensors `kept` of a message; None with too many."""
        with self._lock:
            passed = self._passed_of.get(id(block))
            if passed is None:
                if len(self._passed) >= MOST_PASSED_ON:
                    return None
                number = self._number()
                passed = PassedBlock(number, weakref.ref(block, partial(self._freed, id(block))))
                self._passed[number] = self._passed_of[id(block)] = passed
            passed.holds += 1
            passed.tensors += kept
            return passed

    def _freed(self, key: int, reference: weakref.ref[MappedBlock]) -> None:
        """Forgets a block after its garbage collection; within any code, so without the lock."""
        passed = self._passed_of.pop(key, None)
        if passed is not None:
            self._passed.pop(passed.number, None)
            if passed.sent:
                self.dropped.append(passed.number)

    def return_block(self, number: int) -> None:
        """Ends one hold on a block.

        Raises:
            WireError: It is not lent.
        """
        with self._lock:
            passed = self._passed.get(number)
            if passed is None:
                self._return_block(number)
            else:
                passed.end_hold()

    def unmapped(self, number: int) -> None:
        """Takes back a block that the peer can't map, and frees it.

        Raises:
            WireError: It is not lent.
        """
        with self._lock:
            passed = self._passed.get(number)
            if passed is not None:
                passed.sent = False
                passed.end_hold()
                return
            block = self._blocks.get(number)
            self._return_block(number)
            if block is None or block.holds:
                return
            idle = self._idle.get((block.size, block.owner), [])
            if block in idle:  # else it is freed already
                idle.remove(block)
                self._idle_bytes -= block.size
                self._drop(block)

    def take_back(self, passed: PassedBlock) -> None:
        """Takes back a block that was passed on and not sent."""
        with self._lock:
            if self._passed.get(passed.number) is passed:  # else the pool was closed meanwhile
                passed.end_hold()

    def discard_block(self, block: Block) -> None:
        """Takes back a block that was taken and not sent."""
        with self._lock:
            if self._blocks.get(block.number) is block:
                self._return_block(block.number)
            else:  # the pool was closed meanwhile
                block.sent()

    def view(self, number: int) -> Array:
        """A read-only array of a lent block, which stays lent while views of the array exist.

        Raises:
            WireError: It is not lent.
        """
        with self._lock:
            block = self._blocks.get(number)
            if block is None or not block.holds:
                raise WireError(f"block {number} is not lent")
            block.holds += 1
            # numpy sets a view's base to the last array in the chain. The base of `root` is no array, so all
            # views refer to `root` itself.
            root: Array = np.frombuffer(block.memory.data.toreadonly(), np.uint8)
        self._views.add(root, number)
        return root

    def take_dropped(self) -> list[int]:
        """Numbers of blocks freed since the last call, for the peer."""
        if not self.dropped:
            return []
        with self._lock:
            dropped, self.dropped = self.dropped, []
        return dropped

    def put_back_dropped(self, dropped: list[int]) -> None:
        """Takes back numbers that could not be sent."""
        with self._lock:
            self.dropped += dropped

    def tidy(self) -> None:
        """Takes back released blocks, and frees those that have been idle for long."""
        self._settle()
        with self._lock:
            self._trim(self._clock())

    def close(self) -> None:
        """Drops all blocks; memory is freed with its last view."""
        with self._lock:
            for block in self._blocks.values():
                block.sent()
            self._blocks.clear()
            self._passed.clear()
            self._passed_of.clear()
            self._idle.clear()
            self._idle_bytes = self._idle_count = 0

    def _settle(self) -> None:
        """Takes back blocks whose last view on this side is released."""
        while self._returned:
            try:
                number = self._returned.popleft()
            except IndexError:
                return  # taken by another thread
            with self._lock:
                if number in self._blocks:
                    self._return_block(number)

    def _return_block(self, number: int) -> None:
        block = self._blocks.get(number)
        if block is None or not block.holds:
            raise WireError(f"block {number} is given back, but is not lent")
        block.holds -= 1
        if block.holds:
            return
        block.idle_since = self._clock()
        self._idle.setdefault((block.size, block.owner), []).append(block)
        self._idle_bytes += block.size
        self._idle_count += 1
        self._trim(block.idle_since)

    def _trim(self, now: int) -> None:
        for key, idle in list(self._idle.items()):
            # The front is the oldest: `take` pops from the back.
            while idle and (
                now - idle[0].idle_since > IDLE_NS
                or self._idle_bytes > self._most_idle
                or self._idle_count > MOST_IDLE
            ):
                block = idle.pop(0)
                self._idle_bytes -= block.size
                self._drop(block)
            if not idle:
                del self._idle[key]

    def _drop(self, block: Block) -> None:
        block.sent()
        self._idle_count -= 1
        del self._blocks[block.number]
        self.dropped.append(block.number)


class Mappings:
    """The peer's blocks that are mapped here.

    The receiving thread alone calls `add`, `lend` and `drop`.

    Args:
        writable: True if this side may write to them, as a worker may; the server checks what workers send.
        on_many: Called when much is to be returned, possibly from a finalizer; must not block.
        keeps_descriptors: True if blocks may be passed on.
    """

    def __init__(self, writable: bool, on_many: Callable[[], None], keeps_descriptors: bool = False) -> None:
        self._writable = writable
        self._keeps_descriptors = keeps_descriptors
        self._protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._maps: dict[int, MappedBlock] = {}
        self._passed: dict[int, Array] = {}
        self._views = _ReleaseQueue(self._on_released)
        self.released = self._views.released
        self._on_many = on_many

    @property
    def count(self) -> int:
        """The number of mapped blocks."""
        return len(self._maps)

    @property
    def passed(self) -> int:
        """The number of mapped blocks of third processes."""
        return len(self._passed)

    def map_block(self, number: int, size: int, fd: int) -> None:
        """Maps a block; the caller closes the descriptor.

        Raises:
            WireError: The descriptor is no sealed block of this size.
            OSError: This process can't map it now.
        """
        if number in self._maps or not 0 < number < RETURNED:
            raise WireError(f"block {number} is there already, or can't be")
        found = _check_file(number, fd)
        if size <= 0 or found.st_size != size:
            raise WireError(f"block {number} does not have {size} bytes")
        # A worker fills more than half of a block before it sends it. Holes cost it nothing, but are
        # memory of the process that reads them first.
        if not self._writable and found.st_blocks * _STAT_BLOCK < size // 2 > _SMALL_BYTES:
            raise WireError(f"block {number} of {size} bytes has holes")
        if len(self._maps) >= MOST_MAPPED:
            raise OSError(errno.EMFILE, f"{MOST_MAPPED} blocks are mapped already")
        memory = _map(number, fd, size, self._protection)
        self._maps[number] = MappedBlock(memory, os.dup(fd) if self._keeps_descriptors else -1)

    def add_passed(self, number: int, fd: int) -> None:
        """Maps a block of a third process; the caller closes the descriptor.

        Raises:
            WireError: The descriptor is no sealed block.
            OSError: This process can't map it now.
        """
        size = _check_file(number, fd).st_size
        self._passed[number] = _map(number, fd, size, mmap.PROT_READ)

    def lend_passed(self, number: int) -> Array | None:
        """As `lend`, for a block of a third process; None if it is not mapped here."""
        memory = self._passed.get(number)
        if memory is None:
            return None
        root: Array = np.frombuffer(memory.data, np.uint8)
        self._views.add(root, number, named=False)
        return root

    def lend(self, number: int) -> Array:
        """An array of a block, for one message; the release of its last view returns the block.

        Raises:
            WireError: There is no such block.
        """
        block = self._maps.get(number)
        if block is None:
            raise WireError(f"there is no block {number}")
        root: Array = np.frombuffer(block.memory.data, np.uint8)
        self._views.add(root, number)
        return root

    def block(self, number: int) -> MappedBlock | None:
        """A block; None if it is not mapped."""
        return self._maps.get(number)

    def find(self, array: Array) -> tuple[int, int] | None:
        """Number of the lent block in which an array lies, and the offset there; None for other arrays.

        Also for those in a block of a third process.
        """
        base: object = array
        while base is not None:
            if isinstance(base, memoryview):
                base = base.obj
            if not isinstance(base, np.ndarray):
                return None  # the owner of its memory is unknown
            number = self._views.numbers.get(id(base))
            if number is not None:
                offset = _address(array) - _address(base)
                return (number, offset) if 0 <= offset <= base.nbytes - array.nbytes else None
            base = base.base
        return None

    def drop(self, number: int) -> None:
        """Drops a block that the peer has freed."""
        self._maps.pop(number, None)
        self._passed.pop(number, None)

    def take_released(self, most: int) -> list[int]:
        """Takes at most `most` numbers of blocks to be returned now."""
        self._views.nbytes = 0
        released: list[int] = []
        while self.released and len(released) < most:
            try:
                released.append(self.released.popleft())
            except IndexError:
                break  # taken by another thread
        return released

    def queue_release(self, number: int, at_once: bool) -> None:
        """Queues a number to be returned: a tensor on a GPU, or a block that can't be mapped."""
        self.released.append(number)
        if at_once:
            self._on_many()
        else:
            self._on_released()

    def _on_released(self) -> None:
        if len(self.released) >= MANY or self._views.nbytes >= MANY_BYTES:
            self._on_many()

    def put_back(self, released: list[int]) -> None:
        """Takes back numbers that could not be sent."""
        self.released.extend(released)

    def close(self) -> None:
        """Drops all blocks; memory is freed with its last view. Nothing is returned any more."""
        self._maps.clear()
        self._passed.clear()
        self._views.close()
        self._on_many = _return_none


def _return_none() -> None:
    """The `on_many` after the end."""


def _check_file(number: int, fd: int) -> os.stat_result:
    """Checks that a block's file can't shrink; returns its facts."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if seals & _NEEDED != _NEEDED:
            raise WireError(f"block {number} is not sealed")
        return os.fstat(fd)
    except OSError as error:
        raise WireError(f"block {number} can't be mapped: {error}") from None


def _map(number: int, fd: int, size: int, protection: int) -> Array:
    try:
        memory: Array = np.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED, protection), np.uint8)
    except (ValueError, OverflowError) as error:
        raise WireError(f"block {number} can't be mapped: {error}") from None
    return memory


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class _ReleaseQueue:
    """Queues a block's number when its array is collected, which may happen inside any code.

    Attributes:
        released: Numbers of collected arrays.
        numbers: Numbers of living arrays that are named by them, by identity.
        nbytes: About the bytes of `released`; set to 0 when the queue is emptied.
    """

    # `weakref.finalize` costs ten times as much, and also runs at exit.
    def __init__(self, on_release: Callable[[], None] | None = None) -> None:
        self.released: deque[int] = deque()
        self.nbytes = 0
        self._on_release = on_release  # called after each; must not block
        self.numbers: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Array]] = {}

    def add(self, root: Array, number: int, named: bool = True) -> None:
        key, references, nbytes = id(root), self._references, root.nbytes
        numbers = self.numbers

        def on_collected(reference: weakref.ref[Array]) -> None:
            references.pop(key, None)
            numbers.pop(key, None)
            self.released.append(number)
            self.nbytes += nbytes
            if self._on_release is not None:
                self._on_release()

        references[key] = weakref.ref(root, on_collected)
        if named:
            numbers[key] = number

    def close(self) -> None:
        self._on_release = None
