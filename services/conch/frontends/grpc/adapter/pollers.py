"""The polling threads, and when one of them runs a batch inline.

One thread polls at a time, with the poll lock: two threads in Python would pass the GIL back and forth at
every call into gRPC. The poller first handles all pending events, then runs batches of models with new
requests (inline execution), but only while another thread waits for the poll lock.

    =====================================  ==========================================================
    model, or event                        the poller
    =====================================  ==========================================================
    fast model (short batches)             keeps the lock, runs the model for at most `_BUDGET_NS`
    first slow model                       releases the lock, runs the model, waits for the lock
    further slow models; no thread waits    releases the claim: the model's own threads run the batch
    batch longer than `_MAX_PAUSE_NS`      loses the lock to a waiting thread by `tick`
    event over two ticks                   loses the lock likewise, and runs no claim after it
    =====================================  ==========================================================

Guarantees: a claim is run or released exactly once; while a thread waits, long work does not stop polling.
Assumptions: the thread that handles an event queues its claims; `tick` is called often, by one thread. Race
of an event's end and `tick`: 1. the poller handles the event E, which is in its `handled` list; 2. `tick`
sees E a second time; 3. both pop the list; 4. the one that finds it empty has lost: the poller waits for the
lock anew, or `tick` leaves.
"""

from __future__ import annotations

import logging
import threading
import time
from threading import get_ident
from typing import Any, Protocol

from conch.core.clock import Clock
from conch.core.servable import InlineClaim

log = logging.getLogger(__name__)

_BUDGET_NS = 1_000_000
_MAX_PAUSE_NS = 5_000_000


class _Pause:
    """The time in which the poller runs models inline while no thread polls.

    Attributes:
        since_ns: Its start.
        left: Claims that have not been run to the end.
        lock_lost: True once another thread has the poll lock.
    """

    __slots__ = ("left", "lock_lost", "since_ns")

    def __init__(self, since_ns: int, left: list[InlineClaim]) -> None:
        self.since_ns = since_ns
        self.left = left
        self.lock_lost = False


class EventQueue(Protocol):
    """A completion queue; events without a tag tell of a timeout or of its shutdown."""

    def poll(self, deadline: float | None) -> Any:
        """Waits for an event until a time in seconds since the epoch; 0 for no wait, None for no limit."""


class Pollers:
    """The polling threads of one completion queue.

    Args:
        events: The queue.
        timeout: The `completion_type` of events that tell of a timeout.
        count: Number of threads.
        clock: Monotonic time in nanoseconds.

    Attributes:
        poll_lock: Held by the thread that polls, or that runs models while no thread polls.
        state_lock: Guards `waiting` and `pause`.
        waiting: Number of threads that wait for the poll lock.
        pause: The current pause, if any.
    """

    def __init__(
        self,
        events: EventQueue,
        timeout: Any,
        count: int,
        clock: Clock,
    ) -> None:
        self._events = events
        self._timeout = timeout
        self._clock = clock
        self.poll_lock = threading.Lock()
        self.state_lock = threading.Lock()
        self.waiting = 0
        self.pause: _Pause | None = None
        self._owner: int | None = None  # the thread that polls
        self._claims: list[InlineClaim] = []
        # The event in hand; each thread has its own list. Either the thread or `tick` pops it, see above.
        self._handled: list[Any] = []
        self._seen: Any = None  # the event that was handled at the last tick
        self.threads = [
            threading.Thread(target=self._run, name=f"conch-grpc-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self.threads:
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Waits for the threads, which end after shutdown of the queue; returns whether all have."""
        end = time.monotonic() + timeout_s
        for thread in self.threads:
            thread.join(max(end - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self.threads)

    def queue_inline(self, model: InlineClaim) -> None:
        """Queues a model to run on the polling thread, the caller, after all pending events."""
        self._claims.append(model)
        if self._owner != get_ident():  # it lost the lock; the next poller may be blocked already
            try:
                self._claims.remove(model)
            except ValueError:
                return  # the next poller has it
            model.release()

    def tick(self) -> None:
        """Passes the poll lock to a waiting thread if a batch or an event takes long; call it often.

        Releases the remaining claims, also to other instances of the same model.
        """
        self._check_event()
        with self.state_lock:
            pause = self.pause
            if pause is None or self._clock() - pause.since_ns < _MAX_PAUSE_NS:
                return
            self.pause = None
            pause.lock_lost = True
            left, pause.left = pause.left, []
            self.poll_lock.release()
        for model in left:
            model.release()

    def _check_event(self) -> None:
        """Passes the poll lock on if one event has been handled since the last tick."""
        handled = self._handled
        try:
            event = handled[0]
            if event is not self._seen or not self.waiting:
                self._seen = event
                return
            handled.pop()  # or a newer event, which does no harm
        except IndexError:
            self._seen = None
            return
        self._seen = self._owner = None
        self.poll_lock.release()

    def _run(self) -> None:
        events, timeout = self._events, self._timeout
        handled: list[Any] = []
        self._acquire_poll_lock(handled)
        while True:
            event = events.poll(0 if self._claims else None)
            tag = event.tag
            if tag is not None:
                handled.append(event)
                try:
                    tag(event)
                except Exception:  # boundary: the thread goes on
                    log.exception("a gRPC event was not handled")
                del event, tag  # frees the call before the next event
                try:
                    handled.pop()
                except IndexError:  # `tick` has released the lock
                    self._acquire_poll_lock(handled)
            elif event.completion_type == timeout:
                self._run_claims(handled)
            else:
                break
        self._run_claims(handled)
        for model in self._claims:
            model.release()
        self.poll_lock.release()  # the next thread finds the queue shut down too

    def _acquire_poll_lock(self, handled: list[Any]) -> None:
        with self.state_lock:
            self.waiting += 1
        self.poll_lock.acquire()
        with self.state_lock:
            self.waiting -= 1
        self._owner = get_ident()
        self._handled = handled

    def _run_claims(self, handled: list[Any]) -> None:
        """Runs models with new requests inline, or leaves them to their threads; the caller polls."""
        claims: list[InlineClaim] = []
        while self._claims:
            try:
                claims.append(self._claims.pop(0))
            except IndexError:
                break  # a thread that lost the lock has released it
        if not self.waiting:
            for model in claims:
                model.release()
            return
        fast: list[InlineClaim] = []
        slow: list[InlineClaim] = []
        for model in claims:
            (fast if model.fast else slow).append(model)
        for model in slow[1:]:
            model.release()  # before any batch
        if fast and not self._run_while_unpolled(fast, slow[:1]):
            self._acquire_poll_lock(handled)
        elif slow:
            self.poll_lock.release()
            self._run_inline(slow[0], None)
            self._acquire_poll_lock(handled)

    def _run_while_unpolled(self, models: list[InlineClaim], others: list[InlineClaim]) -> bool:
        """Runs fast models while no thread polls; returns whether the caller still has the poll lock.

        `others` run after that; they are released if the lock is lost.
        """
        pause = _Pause(self._clock(), [*models, *others])
        with self.state_lock:
            self.pause = pause
        for model in models:
            more = self._run_inline(model, _BUDGET_NS)
            with self.state_lock:
                lost = pause.lock_lost
                if not lost:
                    pause.left.remove(model)
                    if more:
                        self._claims.append(model)
            if lost:
                if more:
                    model.release()
                return False
        with self.state_lock:
            if pause.lock_lost:
                return False
            self.pause = None
        return True

    def _run_inline(self, model: InlineClaim, budget_ns: int | None) -> bool:
        try:
            return model.run_inline(budget_ns)
        except Exception:  # boundary: a model
            log.exception("a batch could not be run inline")
        try:
            model.release()  # another thread completes what was started here
        except Exception:  # boundary: a model
            log.exception("a batch could not be released to another thread")
        return False
