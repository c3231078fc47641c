"""The server's side of requests that a worker's model answers itself: their responses, in order, windowed.

Handing a response over may block until a slow client has caught up. So those of decoupled models are handed
over by threads that block for one request only, and the worker is told how much it may send on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from conch.core.errors import ConchError, as_conch_error
from conch.core.execution.shaping import Shaper
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.sequence.implicit_state import SequenceStates
from conch.core.spec import ModelSpec
from conch.workers.protocol.message_records import CREDIT_AT

log = logging.getLogger(__name__)

_IDLE_S = 2.0
"""How long a thread waits for more to do before it ends."""


class Hands:
    """Threads that hand things over, as many as are blocked at a time and one more.

    Args:
        name: What they are called after.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._todo: deque[Callable[[], None]] = deque()
        self._idle = 0
        self._closed = False
        self._warned = False

    def run(self, work: Callable[[], None]) -> bool:
        """Has a thread do something.

        Returns:
            Whether one does; if not, none can be started, and the caller has to see to it.
        """
        with self._changed:
            self._todo.append(work)
            if self._idle >= len(self._todo):
                self._changed.notify()
                return True
        try:
            threading.Thread(target=self._run, name=f"conch-{self._name}-hand", daemon=True).start()
        except RuntimeError as error:  # there are too many
            if not self._warned:
                self._warned = True
                log.warning("a thread to hand over responses of '%s': %s", self._name, error)
            with self._changed:
                try:
                    self._todo.remove(work)
                except ValueError:
                    return True  # another one has got to it
            return False
        return True

    def close(self) -> None:
        """Lets threads end that have nothing to do; what there is to do is done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._todo:
                    self._idle += 1
                    try:
                        if not self._closed:
                            self._changed.wait_for(lambda: self._todo or self._closed, _IDLE_S)
                    finally:
                        self._idle -= 1
                    if not self._todo:
                        return
                work = self._todo.popleft()
            try:
                work()
            except Exception:
                log.exception("something could not be handed over")


class Handing:
    """Gives responses that did not come back with their batch their shape for clients, and hands them over.

    Args:
        spec: The model version.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._name = spec.name
        self._decoupled = spec.decoupled
        self._shaper = Shaper(spec)
        sequence = spec.sequence
        self._states = SequenceStates(spec) if sequence is not None and sequence.states else None

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Hands a response over; never raises."""
        try:
            if response is not None and response.error is None:
                self._shape(request, response)
            if not self._decoupled and response is not None and response.error is not None:
                request.failed = True
            request.respond(response, final)
        except Exception:
            log.exception("a response of model '%s' could not be handed over", self._name)

    def _shape(self, request: InferenceRequest, response: InferenceResponse) -> None:
        try:
            if self._states is not None:
                self._states.collect(request, response)
            if response.error is None and (self._shaper.reshapes_outputs or request.classes is not None):
                self._shaper.shape_response(request, response)
        except Exception as error:  # outputs whose shapes do not hold what they say
            response.error = as_conch_error(error)
            response.outputs = []


class Watch(Protocol):
    """Wants to know when requests are over."""

    def ended(self, entry: OpenRequest) -> None:
        """The worker has answered one."""

    def lost(self, entry: OpenRequest, error: ConchError) -> ConchError:
        """One is lost with its worker; returns the error that it gets."""


class ResponseQueue:
    """Delivers responses in order on one thread at a time, which may block until a client has caught up.

    The requests of a sequence share a queue, so that responses of one never overtake those of the one before.

    Args:
        hands: The threads that deliver.
    """

    __slots__ = ("__weakref__", "_active", "_hands", "_items", "_lock")

    def __init__(self, hands: Hands) -> None:
        self._hands = hands
        self._lock = threading.Lock()
        self._items: deque[Callable[[], None]] = deque()
        self._active = False

    def __len__(self) -> int:
        """Returns how many deliveries wait."""
        return len(self._items)

    def put(self, deliver: Callable[[], None]) -> None:
        """Queues a delivery and returns at once; delivers itself where no thread can be started."""
        with self._lock:
            self._items.append(deliver)
            if self._active:
                return
            self._active = True
        if not self._hands.run(self._drain):
            self._drain()

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._items:
                    self._active = False
                    return
                deliver = self._items.popleft()
            deliver()
            del deliver


class OpenRequest:
    """A request that a worker has and that has not got its last response.

    Args:
        request: The request.
        number: Its number on the socket.
        handing: Hands its responses over.
        queue: Where they wait for that; None where nothing blocks.
        credit: Tells the worker how much more it may send.

    Attributes:
        since_ns: When its batch was sent, once that is done.
        watched: Told when it is over; None where nobody wants to know.
    """

    __slots__ = (
        "_credit",
        "_handing",
        "_queue",
        "_units",
        "number",
        "request",
        "since_ns",
        "watched",
    )

    def __init__(
        self,
        request: InferenceRequest,
        number: int,
        handing: Handing,
        queue: ResponseQueue | None,
        credit: Callable[[int, int], None],
    ) -> None:
        self.request = request
        self.number = number
        self.since_ns = 0
        self.watched: Watch | None = None
        self._handing = handing
        self._queue = queue
        self._credit = credit
        self._units = 0

    def hand(self, response: InferenceResponse | None, final: bool, units: int) -> None:
        """Hands a response over, after those before it; returns at once if that may block.

        Where no thread can be started it does block: late answers are better than none.
        """
        if self._queue is None:
            self._handing(self.request, response, final)
        else:
            self._queue.put(partial(self._deliver, response, final, units))

    @property
    def waiting(self) -> int:
        """How many responses wait for delivery, of all requests that share the queue."""
        return 0 if self._queue is None else len(self._queue)

    def fail(self, error: ConchError) -> None:
        """Ends the request with an error, after the responses that it has got."""
        self.hand(InferenceResponse([], error), True, 0)

    def _deliver(self, response: InferenceResponse | None, final: bool, units: int) -> None:
        self._handing(self.request, response, final)
        self._units += units
        if self._units >= CREDIT_AT and not final:
            self._credit(self.number, self._units)
            self._units = 0
