"""Delivers responses of models in workers that respond by themselves, with flow control.

Responses are delivered on the I/O loop, in the order in which the worker has sent them. Responders return at
once and take all there is; what bounds a decoupled model is its credit. Of each request it may send a window
of response units, see `response_credit`. Units come back once the client has caught up:

    ============================  ==========================================================================
    event                         credit
    ============================  ==========================================================================
    `CREDIT_AT` units delivered   granted at once if the client keeps up, else when its `Reader` says so
    the client has left           granted, so that the model reaches its next response and is cancelled there
    the last response             none
    ============================  ==========================================================================

So the server holds of a request what its reader allows, and one window.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from conch.core.errors import ConchError, as_conch_error
from conch.core.execution.shaping import Shaper
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.sequence.implicit_state import SequenceStates
from conch.core.spec import ModelSpec
from conch.ipc.response_credit import CREDIT_AT

log = logging.getLogger(__name__)

Grant = Callable[[Sequence[tuple[int, int]]], None]
"""Grants response units to requests by number."""


def states_of(spec: ModelSpec) -> SequenceStates | None:
    """The states of a model version; None without any."""
    return SequenceStates(spec) if spec.sequence is not None and spec.sequence.states else None


class ResponseDelivery:
    """Shapes responses that did not come with their batch, and passes them to their requests."""

    def __init__(self, spec: ModelSpec) -> None:
        self._name = spec.name
        self._decoupled = spec.decoupled
        self._shaper = Shaper(spec)
        self._states = states_of(spec)

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Delivers a response; never raises."""
        try:
            if response is not None and response.error is None:
                self._shape(request, response)
            if not self._decoupled and response is not None and response.error is not None:
                request.failed = True
            request.respond(response, final)
        except Exception:  # a front end's responder: the thread serves other requests too
            log.exception("a response of model '%s' could not be delivered", self._name)

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


class OpenRequest:
    """A request in a worker whose last response has not arrived.

    Args:
        grant: Grants units to requests by number; None if the model is not decoupled.

    Attributes:
        since_ns: Monotonic time at which its batch was sent; set once the batch is done.
        watched: Its observer, or None.
    """

    __slots__ = ("_delivery", "_grant", "_units", "number", "request", "since_ns", "watched")

    def __init__(
        self, request: InferenceRequest, number: int, delivery: ResponseDelivery, grant: Grant | None
    ) -> None:
        self.request = request
        self.number = number
        self.since_ns = 0
        self.watched: Watch | None = None
        self._delivery = delivery
        self._grant = grant
        self._units = 0

    def deliver(self, response: InferenceResponse | None, final: bool, units: int) -> int:
        """Delivers a response.

        Returns:
            Units for the caller to grant now; those of a client that is behind are granted once it has
            caught up.
        """
        request = self.request
        self._delivery(request, response, final)
        self._units += units
        if self._units < CREDIT_AT or final or self._grant is None:
            return 0
        granted, self._units = self._units, 0
        if request.backpressure:
            request.when_writable(partial(self._grant, [(self.number, granted)]))
            return 0
        return granted

    def fail(self, error: ConchError) -> None:
        """Ends the request with an error."""
        self._delivery(self.request, InferenceResponse([], error), True)


class OpenRequests:
    """Makes the `OpenRequest`s of one worker. `grant` grants response units to requests."""

    def __init__(self, spec: ModelSpec, grant: Grant) -> None:
        self._grant = grant if spec.decoupled else None
        self._delivery = ResponseDelivery(spec)

    def make(self, request: InferenceRequest, number: int) -> OpenRequest:
        """Makes one."""
        return OpenRequest(request, number, self._delivery, self._grant)
