"""Delivers responses of models in workers that respond by themselves: in order, with flow control.

Delivery may block until a slow client has caught up. Responses of decoupled models are therefore delivered by
threads that block for one request only, and the worker gets credit for what was delivered.

Owns: queued responses, delivery threads (`conch-NAME-deliver`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from conch.core.errors import ConchError, as_conch_error
from conch.core.execution.shaping import Shaper
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.sequence.implicit_state import SequenceStates
from conch.core.spec import ModelSpec
from conch.workers.protocol.response_credit import CREDIT_AT

log = logging.getLogger(__name__)

_IDLE_S = 2.0
"""Idle time after which a thread ends."""


class ResponseDispatcher:
    """Runs work that may block: one thread more than are blocked."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._todo: deque[Callable[[], None]] = deque()
        self._idle = 0
        self._closed = False
        self._warned = False

    def run(self, work: Callable[[], None]) -> bool:
        """Runs `work` on a thread; False if none can be started, then the caller runs it."""
        with self._changed:
            self._todo.append(work)
            if self._idle >= len(self._todo):
                self._changed.notify()
                return True
        try:
            threading.Thread(target=self._run, name=f"conch-{self._name}-deliver", daemon=True).start()
        except RuntimeError as error:  # there are too many
            if not self._warned:
                self._warned = True
                log.warning("a thread to hand over responses of '%s': %s", self._name, error)
            with self._changed:
                try:
                    self._todo.remove(work)
                except ValueError:
                    return True  # another thread has taken it
            return False
        return True

    def close(self) -> None:
        """Ends idle threads; queued work is still done."""
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
            except Exception:  # the top of a thread that serves all requests
                log.exception("something could not be handed over")


class ResponseDelivery:
    """Shapes responses that did not come with their batch, and passes them to their requests."""

    def __init__(self, spec: ModelSpec) -> None:
        self._name = spec.name
        self._decoupled = spec.decoupled
        self._shaper = Shaper(spec)
        sequence = spec.sequence
        self._states = SequenceStates(spec) if sequence is not None and sequence.states else None

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Delivers a response; never raises."""
        try:
            if response is not None and response.error is None:
                self._shape(request, response)
            if not self._decoupled and response is not None and response.error is not None:
                request.failed = True
            request.respond(response, final)
        except Exception:  # a front end's responder: the thread serves other requests too
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
    """Observes the end of open requests."""

    def ended(self, entry: OpenRequest) -> None:
        """The worker has sent the last response."""

    def lost(self, entry: OpenRequest, error: ConchError) -> ConchError:
        """The worker is lost; returns the error of the request."""


class ResponseQueue:
    """Delivers responses in order, on one thread at a time.

    Requests of a sequence share a queue: responses never overtake those of the request before.
    """

    __slots__ = ("__weakref__", "_active", "_items", "_lock", "_response_dispatcher")

    def __init__(self, response_dispatcher: ResponseDispatcher) -> None:
        self._response_dispatcher = response_dispatcher
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
        if not self._response_dispatcher.run(self._drain):
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
    """A request in a worker whose last response has not arrived.

    Attributes:
        since_ns: When its batch was sent, once the batch is done.
        watched: Its observer, or None.
    """

    __slots__ = (
        "_credit",
        "_delivery",
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
        delivery: ResponseDelivery,
        queue: ResponseQueue | None,
        credit: Callable[[int, int], None],
    ) -> None:
        self.request = request
        self.number = number
        self.since_ns = 0
        self.watched: Watch | None = None
        self._delivery = delivery
        self._queue = queue
        self._credit = credit
        self._units = 0

    def deliver(self, response: InferenceResponse | None, final: bool, units: int) -> None:
        """Delivers a response behind earlier ones; does not block unless no thread can be started."""
        if self._queue is None:
            self._delivery(self.request, response, final)
        else:
            self._queue.put(partial(self._deliver_now, response, final, units))

    @property
    def waiting(self) -> int:
        """Queued responses of all requests that share the queue."""
        return 0 if self._queue is None else len(self._queue)

    def fail(self, error: ConchError) -> None:
        """Ends the request with an error, behind earlier responses."""
        self.deliver(InferenceResponse([], error), True, 0)

    def _deliver_now(self, response: InferenceResponse | None, final: bool, units: int) -> None:
        self._delivery(self.request, response, final)
        self._units += units
        if self._units >= CREDIT_AT and not final:
            self._credit(self.number, self._units)
            self._units = 0


class OpenRequests:
    """Makes the `OpenRequest`s of one worker. `credit` grants response units to a request."""

    def __init__(
        self, spec: ModelSpec, dispatcher: ResponseDispatcher, credit: Callable[[int, int], None]
    ) -> None:
        self._spec = spec
        self._dispatcher = dispatcher
        self._credit = credit
        self._delivery = ResponseDelivery(spec)
        self._lock = threading.Lock()
        # By sequence; a queue lives while its sequence has open requests or queued responses.
        self._sequence_queues: WeakValueDictionary[int | str, ResponseQueue] = WeakValueDictionary()

    def make(self, request: InferenceRequest, number: int) -> OpenRequest:
        """Makes one, with a queue that is shared within a sequence; none if delivery can't block."""
        queue: ResponseQueue | None = None
        if self._spec.decoupled:
            queue = ResponseQueue(self._dispatcher)
            if self._spec.sequence is not None:
                with self._lock:
                    queue = self._sequence_queues.setdefault(request.correlation_id, queue)
        return OpenRequest(request, number, self._delivery, queue, self._credit)
