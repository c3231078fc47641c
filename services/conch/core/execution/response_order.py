"""Sends the responses of a model in the order in which its requests were queued.

A queued request gets a place in a line, which replaces its responder. The place at the head forwards
responses at once. The others keep theirs until those before them are complete: with a response, an error, an
expiry or a cancellation.

Guarantees: one thread at a time forwards, without the lock, so a responder may complete other requests:

    1. Thread A adds a response to the head, sets `_forwarding` under the lock and forwards without it.
    2. Thread B adds a response to a place. It sees `_forwarding` and leaves the response there.
    3. A takes what is ready, again under the lock, and finds B's. It clears `_forwarding` with nothing ready.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

from conch.core.request import InferenceRequest, InferenceResponse, Responder
from conch.core.responder_layers import ResponderLayer
from conch.core.spec import ModelSpec

log = logging.getLogger(__name__)

_Response = tuple[InferenceRequest, InferenceResponse | None, bool]


def keeps_order(spec: ModelSpec) -> bool:
    """True if a model's config sets `preserve_ordering`."""
    return (spec.batching is not None and spec.batching.preserve_ordering) or (
        spec.sequence is not None and spec.sequence.preserve_ordering
    )


class ResponseOrder:
    """The line of one model version."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: deque[_Place] = deque()
        self._forwarding = False

    def enter(self, request: InferenceRequest) -> None:
        """Gives a request that was queued a place; calls are serialised, in the order of the queue."""

        def place_for(responder: Responder) -> Responder:
            place = _Place(self, responder)
            with self._lock:
                self._places.append(place)
            return place

        request.wrap_responder(place_for, ResponderLayer.ORDER)

    def _add(self, place: _Place, kept: _Response) -> None:
        with self._lock:
            place.responses.append(kept)
            if self._forwarding or not self._places or self._places[0] is not place:
                return  # forwarded by the forwarding thread, or once the place is at the head
            self._forwarding = True
        while ready := self._ready():
            for responder, request, response, final in ready:
                try:
                    responder(request, response, final)
                except Exception:  # boundary: responders; the requests behind get their responses
                    log.exception("a response of model '%s' could not be passed on", request.model_name)

    def _ready(self) -> list[tuple[Responder, InferenceRequest, InferenceResponse | None, bool]]:
        """Takes out what may be forwarded; if nothing, another thread may forward from now on."""
        ready = []
        places = self._places
        with self._lock:
            while places:
                place = places[0]
                kept = place.responses
                if not kept:
                    break
                done = False
                for request, response, final in kept:
                    ready.append((place.responder, request, response, final))
                    if final:
                        done = True
                        break  # later responses of other threads are dropped
                kept.clear()  # or the request would keep its response alive
                if done:
                    places.popleft()
            self._forwarding = bool(ready)
        return ready


class _Place:
    """One request's place: a responder that keeps responses until it is at the head."""

    __slots__ = ("_order", "responder", "responses")

    def __init__(self, order: ResponseOrder, responder: Responder) -> None:
        self._order = order
        self.responder = responder
        self.responses: list[_Response] = []

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        self._order._add(self, (request, response, final))
