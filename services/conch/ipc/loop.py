"""One epoll loop on one thread: sockets of clients and of workers, timers, and inline execution.

Theory of operation. One thread at a time has the loop, its *owner*; sockets are read and written, timers run
and connections change on the owner only, so their state needs no lock. The owner runs rounds:

    1. wait for events; not at all if claims, work or sinks are left
    2. handle the events, one `on_ready` each; then the timers that are due
    3. run what `call_soon` has queued
    4. run the claims that handlers have queued (inline execution, see `conch.core.servable.InlineClaim`)
    5. run what `call_soon` has queued meanwhile, such as the answers of these models
    6. flush each sink that something was written to: the answers of a round leave together

Only claims may take long. While one runs, no other state of the loop is touched: a model that answers queues
its answer with `call_soon`. So a second thread, the *standby*, can take the loop over:

    ======================================  =================================================================
    claim                                   the owner
    ======================================  =================================================================
    fast model (short batches)              runs it; begins no batch once `_BUDGET_NS` are over
    slow model; no thread stands by         releases the claim: the model's own threads run the batch
    claims that take longer than            loses the loop to the standby, which releases what is left, also
    `_MOST_PAUSE_NS`; a claim that waits    other instances of the same model
    ======================================  =================================================================

    ========  =======================  ==================================  =================================
    thread    a round has claims       the claims take too long            the late claim is done
    ========  =======================  ==================================  =================================
    owner     makes a `_Turn`          late: touches nothing of the loop   stands by
    standby   ticks                    owner: goes on at step 5            (owner)
    ========  =======================  ==================================  =================================

The standby starts with the first claim. It ticks only while claims run, and sleeps after `_QUIET_TICKS` ticks
without any: an idle process is not woken.

Race of a turn's end and the standby, both under `_lock`: the owner ends the turn, if it is not lost; the
standby loses it, if it is the current one. The first one wins. A claim that runs meanwhile may be released
once more, which does no harm.

Race of a claim that the late thread queues: 1. the late thread finds itself the owner; 2. the standby takes
over; 3. the late thread appends the claim and looks again. Either it finds that it is late, and takes the
claim back to release it, or the new owner became so after the append, and looks at the claims before it
sleeps. Of two that take a claim out of the list, one gets it.

Race of `call_soon` and sleep: the owner sets `_asleep` before its last look at the queue, and a producer
appends before it looks at `_asleep`. Either the owner finds the work, or the producer wakes the owner.

Race of a closed descriptor whose number is used anew: an event that the kernel has reported for the old one
must not reach the new source. `unregister` notes the number in `_gone`, and events for it are dropped until
the next wait; level-triggered ones are reported again.

Guarantees: a claim is run or released; a stop releases what is left exactly once, runs the work that was
queued before it, and flushes. Handlers that raise are logged. Assumes: handlers, timers, work and sinks
return at once; descriptors are unregistered before they are closed.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from select import EPOLLET, EPOLLIN
from threading import get_ident
from typing import Protocol

from conch.core.clock import Clock, monotonic_ns
from conch.core.compiled import mypyc_attr
from conch.core.servable import InlineClaim
from conch.core.thread_state import LoopThread

log = logging.getLogger(__name__)

_BUDGET_NS = 1_000_000
_MOST_PAUSE_NS = 5_000_000
_TICK_S = 0.005
_QUIET_TICKS = 20
_MOST_EVENTS = 256
_LONGEST_WAIT_S = 3600.0
_FEW_CANCELLED = 64

Work = Callable[[], object]


class Ready(Protocol):
    """A source of events."""

    def on_ready(self, events: int) -> None:
        """Handles events such as `select.EPOLLIN`, on the loop's thread; returns at once."""


class Sink(Protocol):
    """Collects what is written in a round."""

    def flush(self) -> None:
        """Sends it, on the loop's thread; returns at once."""


class Poll(Protocol):
    """Methods of `select.epoll` that the loop calls."""

    def register(self, fd: int, eventmask: int) -> None:
        """Adds a descriptor."""

    def modify(self, fd: int, eventmask: int) -> None:
        """Changes the events of a descriptor."""

    def unregister(self, fd: int) -> None:
        """Removes a descriptor."""

    def poll(self, timeout: float, maxevents: int) -> list[tuple[int, int]]:
        """Waits for events; -1 waits without a limit."""

    def close(self) -> None:
        """Frees it."""


class Timer:
    """Scheduled work; on the loop's thread only."""

    __slots__ = ("_timers", "_work")

    def __init__(self, timers: _Timers, work: Work) -> None:
        self._timers = timers
        self._work: Work | None = work

    def cancel(self) -> None:
        """Drops the work unless it has started."""
        if self._work is not None:
            self._work = None
            self._timers.cancelled_one()

    def take(self) -> Work | None:
        """The work, to be run now; None if it was cancelled."""
        work, self._work = self._work, None
        return work


class _Timers:
    """A heap of timers; cancelled ones are removed once they are more than half of it."""

    __slots__ = ("_cancelled", "_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Timer]] = []
        self._numbers = itertools.count()
        self._cancelled = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_ns: int, work: Work) -> Timer:
        timer = Timer(self, work)
        heapq.heappush(self._heap, (at_ns, next(self._numbers), timer))
        return timer

    def cancelled_one(self) -> None:
        self._cancelled += 1
        if self._cancelled > _FEW_CANCELLED and self._cancelled > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[2]._work is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def wait_s(self, now_ns: int) -> float:
        """Seconds until the first timer."""
        return min(max(self._heap[0][0] - now_ns, 0) / 1e9, _LONGEST_WAIT_S)

    def due(self, now_ns: int) -> list[Timer]:
        """Removes and returns the timers that are due."""
        due: list[Timer] = []
        heap = self._heap
        while heap and heap[0][0] <= now_ns:
            timer = heapq.heappop(heap)[2]
            if timer._work is None:
                self._cancelled -= 1
            else:
                due.append(timer)
        return due


class _Turn:
    """The claims of a round while they run.

    Attributes:
        since_ns: Monotonic time at which the first one began.
        claims: Those that have not begun.
        running: The one that runs, if any.
        waits: True if it is about to wait: the standby takes over at once.
        lost: True once the standby has the loop.
    """

    __slots__ = ("claims", "lost", "running", "since_ns", "waits")

    def __init__(self, since_ns: int, claims: deque[InlineClaim]) -> None:
        self.since_ns = since_ns
        self.claims = claims
        self.running: InlineClaim | None = None
        self.waits = False
        self.lost = False


_here = LoopThread()


def yield_loop() -> None:
    """Says that the calling thread is about to wait for other threads: a claim gives its loop away."""
    loop: IoLoop | None = _here.loop
    if loop is not None:
        loop.give_loop_to_standby()


@mypyc_attr(allow_interpreted_subclasses=True)
class IoLoop:
    """One epoll loop; see the module.

    Args:
        clock: Monotonic time in nanoseconds, also of timers.
        make_poll: Makes the epoll set.
        name: Name of its thread.
    """

    def __init__(
        self,
        clock: Clock = monotonic_ns,
        make_poll: Callable[[], Poll] = select.epoll,
        name: str = "conch-io",
    ) -> None:
        self._name = name
        self._clock = clock
        self._make_poll = make_poll
        self._lock = threading.Lock()  # guards start, stop, `_wake_file` and the end of a turn
        self._threads: list[threading.Thread] = []
        self._poll: Poll | None = None
        self._wake_file = -1
        self._owner: int | None = None
        self._stopping = False
        self._over = False
        self._sources: dict[int, Ready] = {}
        self._gone: set[int] = set()
        self._timers = _Timers()
        self._soon: deque[Work] = deque()
        self._claims: list[InlineClaim] = []
        self._sinks: dict[Sink, None] = {}
        self._asleep = False
        # The standby: `_turn` is what it watches, `_turns` counts rounds with claims.
        self._turn: _Turn | None = None
        self._turns = 0
        self._standing_by = False
        self._unwatched = False  # it sleeps until the next turn
        self._alarm = threading.Lock()  # locked until it is woken
        self._alarm.acquire()

    def start(self) -> None:
        """Starts the loop, unless it runs.

        Raises:
            OSError: No descriptor is free.
            RuntimeError: The loop was stopped, or there are too many threads.
        """
        with self._lock:
            if self._stopping:
                raise RuntimeError("the I/O loop was stopped")
            if self._threads:
                return
            thread = threading.Thread(target=self._run, args=(True,), name=self._name, daemon=True)
            self._poll = self._make_poll()
            try:
                self._wake_file = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                # Edge-triggered: each write is an event, so the counter need not be read.
                self._poll.register(self._wake_file, EPOLLIN | EPOLLET)
                thread.start()
            except BaseException:
                self._close()
                raise
            self._threads.append(thread)

    def stop(self, timeout_s: float) -> bool:
        """Ends the loop: claims are released, queued work is run, sinks are flushed.

        Work queued later is dropped.

        Returns:
            True if its threads have ended in time; else one still runs a model, or is the caller.
        """
        with self._lock:
            self._stopping = True
            self._write_wake()
        end = time.monotonic() + timeout_s
        # The owner may add the standby until it ends.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(end - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    # --- from any thread -----------------------------------------------------------------------------------

    @property
    def on_thread(self) -> bool:
        """True if the caller is the loop's thread."""
        return self._owner == get_ident()

    def register(self, file: int, source: Ready, events: int = EPOLLIN) -> None:
        """Passes events of a descriptor to a source; the loop has been started.

        Raises:
            OSError: The system does not allow it, or the loop has ended.
        """
        poll = self._poll
        if poll is None:
            raise OSError(errno.EBADF, "the I/O loop does not run")
        self._sources[file] = source
        try:
            poll.register(file, events)
        except BaseException as error:
            del self._sources[file]
            if isinstance(error, ValueError):
                raise OSError(errno.EBADF, "the I/O loop has just ended") from None
            raise

    def modify(self, file: int, events: int) -> None:
        """Changes the events of a descriptor; 0 for none but its end."""
        poll = self._poll
        if poll is not None and file in self._sources:
            poll.modify(file, events)

    def unregister(self, file: int) -> None:
        """Forgets a descriptor, before it is closed.

        No event reaches its source after that; on another thread, one may just be handled.
        """
        if self._sources.pop(file, None) is None:
            return
        self._gone.add(file)
        poll = self._poll
        if poll is None:
            return
        try:
            poll.unregister(file)
        except ValueError:
            pass  # the loop has just ended

    def call_soon(self, work: Work) -> None:
        """Runs work on the loop's thread, in this round or the next one."""
        self._soon.append(work)
        if self._asleep:
            with self._lock:
                if self._asleep:  # else another thread has woken it
                    self._asleep = False
                    self._write_wake()

    def queue_inline(self, claim: InlineClaim) -> None:
        """Runs a claim after the round's events; releases it on any other thread."""
        if self._owner != get_ident():
            claim.release()
            return
        claims = self._claims
        claims.append(claim)
        if self._owner != get_ident():  # lost between the two
            try:
                claims.remove(claim)
            except ValueError:
                return  # the new owner has it
            claim.release()

    # --- on the loop's thread ------------------------------------------------------------------------------

    def call_at(self, at_ns: int, work: Work) -> Timer:
        """Schedules work, in the clock's time."""
        return self._timers.add(at_ns, work)

    def flush_later(self, sink: Sink) -> None:
        """Flushes a sink once, at the end of the round."""
        self._sinks[sink] = None

    def give_loop_to_standby(self) -> None:
        """Gives the loop to the standby at once, if the caller runs a claim: see `yield_loop`."""
        turn = self._turn
        if turn is not None and self._owner == get_ident():
            turn.waits = True
            self._wake_standby()

    # --- rounds --------------------------------------------------------------------------------------------

    def _run(self, owns: bool) -> None:
        _here.loop = self
        if owns:
            self._owner = get_ident()
        while owns or self._stand_by():
            owns = False
            if self._rounds():
                self._end()
                return

    def _rounds(self) -> bool:
        """Runs rounds, beginning with step 5; True at a stop, False if the standby has taken over."""
        sources, gone, timers, soon = self._sources, self._gone, self._timers, self._soon
        while True:
            if soon:
                self._run_soon()
            if self._sinks:
                self._flush()
            if self._stopping:
                return True
            for file, events in self._wait():
                source = sources.get(file)
                if source is None or (gone and file in gone):
                    continue
                try:
                    source.on_ready(events)
                except Exception:  # boundary: the loop goes on
                    log.exception("an I/O event was not handled")
            if timers:
                for timer in timers.due(self._clock()):
                    work = timer.take()
                    if work is not None:  # else an earlier one has cancelled it
                        _guarded(work)
            if soon:
                self._run_soon()
            if self._claims and not self._run_claims():
                return False

    def _wait(self) -> list[tuple[int, int]]:
        poll, timers = self._poll, self._timers
        assert poll is not None, "it has been started"
        timeout = 0.0
        if not (self._soon or self._claims or self._sinks):
            timeout = timers.wait_s(self._clock()) if timers else -1.0
            self._asleep = True
            if self._soon or self._claims or self._stopping:
                timeout = 0.0
        if self._gone:
            self._gone.clear()
        try:
            return poll.poll(timeout, _MOST_EVENTS)
        finally:
            self._asleep = False

    def _run_soon(self) -> None:
        soon = self._soon
        for _ in range(len(soon)):  # what these queue has its turn after the next events
            work = soon.popleft()
            try:
                work()
            except Exception:  # boundary: the loop goes on
                log.exception("work on the I/O loop failed")
            del work

    def _flush(self) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks:
            _guarded(sink.flush)

    def _run_claims(self) -> bool:
        """Runs or releases the claims of the round; False if the standby has taken over."""
        queued, fast = self._take_claims(), deque[InlineClaim]()
        watched = self._has_standby()
        for claim in queued:
            if watched and claim.fast:
                fast.append(claim)
            else:
                _guarded(claim.release)  # before any batch
        if not fast:
            return True
        again: list[InlineClaim] = []
        turn = _Turn(self._clock(), fast)
        self._turns += 1
        self._turn = turn
        if self._unwatched:
            self._wake_standby()
        while fast:
            try:
                claim = fast.popleft()
            except IndexError:
                break  # the standby has them
            turn.running = claim
            if _run_inline(claim):
                again.append(claim)
        turn.running = None
        with self._lock:
            lost = turn.lost
            if not lost:
                self._turn = None
        if lost:
            for claim in again:
                _guarded(claim.release)
            return False
        self._claims += again
        return True

    def _take_claims(self) -> list[InlineClaim]:
        """Takes the claims out of the list one by one: a late thread may take one back."""
        taken: list[InlineClaim] = []
        while self._claims:
            try:
                taken.append(self._claims.pop(0))
            except IndexError:
                break
        return taken

    def _end(self) -> None:
        """Ends the loop, on its owner."""
        self._run_soon()
        self._flush()
        self._owner = None  # claims are released where they are queued from here on
        for claim in self._take_claims():
            _guarded(claim.release)
        self._soon.clear()
        with self._lock:
            self._close()
        self._over = True
        self._wake_standby()

    def _close(self) -> None:
        if self._poll is not None:
            self._poll.close()
            self._poll = None
        if self._wake_file >= 0:
            os.close(self._wake_file)
            self._wake_file = -1

    def _write_wake(self) -> None:
        if self._wake_file >= 0:
            os.eventfd_write(self._wake_file, 1)

    # --- the standby ---------------------------------------------------------------------------------------

    def _has_standby(self) -> bool:
        """True if a standby thread runs; the first call starts it."""
        if len(self._threads) == 1:
            name = f"{self._name}-standby"
            thread = threading.Thread(target=self._run, args=(False,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False  # there are too many
            self._standing_by = True
            self._threads.append(thread)
        return self._standing_by

    def _stand_by(self) -> bool:
        """Waits until the loop is this thread's; False at the end."""
        self._standing_by = True
        quiet, turns = 0, self._turns
        while not self._over:
            timeout = _TICK_S
            if quiet >= _QUIET_TICKS:
                self._unwatched = True
                if self._turn is None and self._turns == turns:  # else one has begun meanwhile
                    timeout = -1.0
            self._alarm.acquire(timeout=timeout)
            self._unwatched = False
            if self._take_over():
                return True
            quiet = quiet + 1 if self._turns == turns else 0
            turns = self._turns
        return False

    def _take_over(self) -> bool:
        """Takes the loop from an owner whose claims take too long, and releases these."""
        turn = self._turn
        if turn is None or not (turn.waits or self._clock() - turn.since_ns >= _MOST_PAUSE_NS):
            return False
        with self._lock:
            if self._turn is not turn:
                return False
            turn.lost = True
            self._turn = None
            self._standing_by = False
            self._owner = get_ident()
        if turn.running is not None:
            # Another of its instances may run what waits behind the batch.
            _guarded(turn.running.release)
        while turn.claims:
            try:
                claim = turn.claims.popleft()
            except IndexError:
                break  # the late thread has begun it
            _guarded(claim.release)
        return True

    def _wake_standby(self) -> None:
        try:
            self._alarm.release()
        except RuntimeError:
            pass  # woken already


class SharedLoop:
    """A loop that runs while it is held; `name` is that of its thread."""

    def __init__(self, name: str = "conch-io", clock: Clock = monotonic_ns) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._holders = 0
        self._loop: IoLoop | None = None

    def hold(self) -> IoLoop:
        """The loop, for the caller until the matching `release`; the first holder starts it.

        Raises:
            OSError: No descriptor is free; nothing is held.
            RuntimeError: There are too many threads; nothing is held.
        """
        with self._lock:
            if self._loop is None:
                loop = IoLoop(self._clock, name=self._name)
                loop.start()
                self._loop = loop
            self._holders += 1
            return self._loop

    def release(self) -> None:
        """Ends one `hold`; the last one stops the loop, which ends soon after."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop(0)  # the caller may be its thread


IO_LOOP = SharedLoop()
"""The loop of this process."""


def _run_inline(claim: InlineClaim) -> bool:
    try:
        return claim.run_inline(_BUDGET_NS)
    except Exception:  # boundary: a model
        log.exception("a batch could not be run inline")
    _guarded(claim.release)  # another thread completes what was started here
    return False


def _guarded(work: Work) -> None:
    try:
        work()
    except Exception:  # boundary: the loop goes on
        log.exception("work on the I/O loop failed")
