"""Sends the responses of a model in the order in which its requests were queued.

A request gets a place in a line when it is queued, and its place takes what is said to it in the stead of its
responder. The place at the head passes everything on at once; the others keep it until those before them are
done, whatever they are done with: a response, an error, an expiry or a cancellation. One thread at a time
passes things on, without holding a lock, so a responder may do anything, also answer other requests.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from conch.core.request import InferenceRequest, InferenceResponse, Responder
from conch.core.spec import ModelSpec

log = logging.getLogger(__name__)

Submit = Callable[[InferenceRequest, int], None]
_Said = tuple[InferenceRequest, InferenceResponse | None, bool]


def keeps_order(spec: ModelSpec) -> bool:
    """Whether a model's config asks for responses in the order of the requests."""
    return (spec.batching is not None and spec.batching.preserve_ordering) or (
        spec.sequence is not None and spec.sequence.preserve_ordering
    )


class ResponseOrder:
    """The line of one model version."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: deque[_Place] = deque()
        self._passing = False

    def around(self, submit: Submit) -> Submit:
        """A scheduler's `submit` that gives each request it queues a place.

        Args:
            submit: What queues a request; calls follow one another, so places are in the queue's order.
        """

        def submit_in_order(request: InferenceRequest, now_ns: int) -> None:
            submit(request, now_ns)  # first: what it refuses gets no place
            self._enter(request)

        return submit_in_order

    def _enter(self, request: InferenceRequest) -> None:
        def place_for(responder: Responder) -> Responder:
            place = _Place(self, responder)
            with self._lock:
                self._places.append(place)
            return place

        request.intercept(place_for, waits=True)

    def _say(self, place: _Place, said: _Said) -> None:
        with self._lock:
            place.kept.append(said)
            if self._passing or not self._places or self._places[0] is not place:
                return  # whoever passes things on comes to it, or will once it is at the head
            self._passing = True
        while ready := self._ready():
            for responder, request, response, final in ready:
                try:
                    responder(request, response, final)
                except Exception:  # must not keep those behind from their answers
                    log.exception("a response of model '%s' could not be passed on", request.model_name)

    def _ready(self) -> list[tuple[Responder, InferenceRequest, InferenceResponse | None, bool]]:
        """Takes out what may be said now; nothing if that is all, and then another thread may pass on."""
        ready = []
        places = self._places
        with self._lock:
            while places:
                place = places[0]
                kept = place.kept
                if not kept:
                    break
                done = False
                for request, response, final in kept:
                    ready.append((place.responder, request, response, final))
                    if final:
                        done = True
                        break  # what another thread said after that is too late
                kept.clear()  # or the request would keep its response for as long as it lives
                if done:
                    places.popleft()
            self._passing = bool(ready)
        return ready


class _Place:
    """One request's place: a responder that keeps what it is given until it is its turn."""

    __slots__ = ("_order", "kept", "responder")

    def __init__(self, order: ResponseOrder, responder: Responder) -> None:
        self._order = order
        self.responder = responder
        self.kept: list[_Said] = []

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        self._order._say(self, (request, response, final))
