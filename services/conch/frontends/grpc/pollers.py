"""The threads that poll for events, and when one of them runs a batch itself.

One thread polls at a time: two that run Python at once would hand the interpreter's lock back and forth at
every call into gRPC, which costs more than the calls. The polling thread first takes in everything that has
arrived and then leads: it runs batches of the models that have got requests. It does so only while another
thread waits for its turn to poll:

- A model whose batches are short is led while nobody polls, for at most `_BUDGET_NS` at a time. If a batch
  takes longer than expected, `tick` gives the turn to the waiting thread.
- For another model the thread first gives its turn away, then leads, then waits.
- A thread that takes long over a single event loses its turn in the same way, and leads nothing after it.
- Where no thread waits, and for all but one of several slow models, the models' own threads run the batches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any

from conch.core.clock import Clock
from conch.core.servable import InlineClaim

log = logging.getLogger(__name__)

_BUDGET_NS = 1_000_000
_LONGEST_PAUSE_NS = 5_000_000


class _Pause:
    """The time in which the thread that has the turn leads instead of polling.

    Attributes:
        since_ns: When it began.
        left: What has been promised and not been led to the end.
        turn_lost: Whether another thread has been given the turn.
    """

    __slots__ = ("left", "since_ns", "turn_lost")

    def __init__(self, since_ns: int, left: list[InlineClaim]) -> None:
        self.since_ns = since_ns
        self.left = left
        self.turn_lost = False


class Pollers:
    """The polling threads of one completion queue.

    Args:
        poll: Waits for an event, until a time in seconds since the epoch (0 for not at all), or for ever.
        is_timeout: Whether an event without a tag says that none came in time; the only other one
            without a tag says that the queue has been shut down.
        count: How many threads there are.
        clock: Monotonic time in nanoseconds.

    Attributes:
        threads: The threads.
    """

    def __init__(
        self,
        poll: Callable[[float | None], Any],
        is_timeout: Callable[[Any], bool],
        count: int,
        clock: Clock,
    ) -> None:
        self._next_event = poll
        self._is_timeout = is_timeout
        self._clock = clock
        self._turn = threading.Lock()  # held by the thread that polls, or that leads while nobody does
        self._role = threading.Lock()  # guards the two below
        self._waiting = 0
        self._pause: _Pause | None = None
        self._owner: int | None = None  # the thread that polls
        self._claims: list[InlineClaim] = []
        # The event that the thread with the turn handles. Either that thread or `tick` takes it out again,
        # and the other one finds it gone. Each thread has a list of its own: it never takes out another's.
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
        """Waits for the threads to end, which they do when the queue has been shut down.

        Args:
            timeout_s: How long to wait; a thread that leads ends no sooner than its batch.

        Returns:
            Whether all of them have ended.
        """
        end = time.monotonic() + timeout_s
        for thread in self.threads:
            thread.join(max(end - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self.threads)

    def queue_inline(self, model: InlineClaim) -> None:
        """Has the polling thread, which is the caller, lead a model once it has taken in all events."""
        self._claims.append(model)
        if self._owner != get_ident():  # it has lost its turn, and the next one may be asleep already
            try:
                self._claims.remove(model)
            except ValueError:
                return  # the next one has seen it
            model.release()

    def tick(self) -> None:
        """Has another thread poll if a batch or an event takes long; to be called often.

        What the batch holds up is handed over, also to other instances of the same model.
        """
        self._take_over()
        with self._role:
            pause = self._pause
            if pause is None or self._clock() - pause.since_ns < _LONGEST_PAUSE_NS:
                return
            self._pause = None
            pause.turn_lost = True
            left, pause.left = pause.left, []
            self._turn.release()
        for model in left:
            model.release()

    def _take_over(self) -> None:
        """Gives the turn to a waiting thread if an event has been handled since the last tick."""
        handled = self._handled
        try:
            event = handled[0]
            if event is not self._seen or not self._waiting:
                self._seen = event
                return
            handled.pop()  # an event that came meanwhile is as good
        except IndexError:
            self._seen = None
            return
        self._seen = self._owner = None
        self._turn.release()

    def _run(self) -> None:
        poll = self._next_event
        handled: list[Any] = []
        self._take_turn(handled)
        while True:
            event = poll(0 if self._claims else None)
            tag = event.tag
            if tag is not None:
                handled.append(event)
                try:
                    tag(event)
                except Exception:
                    log.exception("a gRPC event was not handled")
                del event, tag  # a call is not to live until the next event
                try:
                    handled.pop()
                except IndexError:  # it took long
                    self._take_turn(handled)
            elif self._is_timeout(event):
                self._run_claims(handled)
            else:
                break
        self._run_claims(handled)
        for model in self._claims:
            model.release()
        self._turn.release()  # the next thread finds the queue shut down as well

    def _take_turn(self, handled: list[Any]) -> None:
        with self._role:
            self._waiting += 1
        self._turn.acquire()
        with self._role:
            self._waiting -= 1
        self._owner = get_ident()
        self._handled = handled

    def _run_claims(self, handled: list[Any]) -> None:
        """Runs models with new requests inline, or leaves them to their threads; the caller polls."""
        claims: list[InlineClaim] = []
        while self._claims:
            try:
                claims.append(self._claims.pop(0))
            except IndexError:
                break  # the thread that promised it has handed it over
        if not self._waiting:
            for model in claims:
                model.release()
            return
        fast = [model for model in claims if model.fast]
        slow = [model for model in claims if not model.fast]
        for model in slow[1:]:
            model.release()  # before anything that takes time
        if fast and not self._run_while_unpolled(fast, slow[:1]):
            self._take_turn(handled)
        elif slow:
            self._turn.release()
            self._run_inline(slow[0], None)
            self._take_turn(handled)

    def _run_while_unpolled(self, models: list[InlineClaim], others: list[InlineClaim]) -> bool:
        """Leads models while nobody polls.

        Args:
            models: What to lead, at least one.
            others: What the caller will lead after that; handed over if the turn is lost.

        Returns:
            Whether the caller still has the turn.
        """
        pause = _Pause(self._clock(), [*models, *others])
        with self._role:
            self._pause = pause
        for model in models:
            more = self._run_inline(model, _BUDGET_NS)
            with self._role:
                lost = pause.turn_lost
                if not lost:
                    pause.left.remove(model)
                    if more:
                        self._claims.append(model)
            if lost:
                if more:
                    model.release()
                return False
        with self._role:
            if pause.turn_lost:
                return False
            self._pause = None
        return True

    def _run_inline(self, model: InlineClaim, budget_ns: int | None) -> bool:
        try:
            return model.run_inline(budget_ns)
        except Exception:
            log.exception("a model could not be led")
        try:
            model.release()  # what was begun to be received here is received elsewhere
        except Exception:
            log.exception("a model could not be handed over")
        return False
