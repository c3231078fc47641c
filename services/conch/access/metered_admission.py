"""`MeteredAdmission`: admission that counts the inference requests of each principal in flight.

A request enters its principal's limit when it is admitted and leaves with its final response, so that a
client which disconnects holds its place until its request has ended. Steps of ensembles and calls of models
have no caller, and are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from conch.access.access_guard import Access, AccessGuard
from conch.access.principals import Grant
from conch.access.request_limits import Limiter
from conch.core.admission import Admission, Fit, HeldBytes, WaitObserver
from conch.core.errors import ConchError
from conch.core.registry import Registry
from conch.core.request import InferenceRequest, InferenceResponse, Responder
from conch.core.request_log import Caller, RequestLog
from conch.core.responder_layers import ResponderLayer
from conch.core.servable import InlineClaim, Servable
from conch.core.server_stage import ServerStages


class MeteredAdmission(Admission):
    """The way in for one kind of caller, with limits; see `Admission` for the other arguments.

    Args:
        access: The access policy.
    """

    def __init__(
        self,
        access: Access,
        registry: Registry,
        protocol: str,
        stages: ServerStages,
        request_log: RequestLog | None,
        bind: Callable[[InferenceRequest], None] | None = None,
        held: HeldBytes | None = None,
    ) -> None:
        super().__init__(registry, protocol, stages, request_log, bind, held)
        self._guard = AccessGuard(access, protocol)

    def admit(
        self,
        request: InferenceRequest,
        may_claim: bool = False,
        model: Servable | None = None,
        caller: Caller | None = None,
        bytes_in: int = 0,
        *,
        parent: InferenceRequest | None = None,
        single: str | None = None,
        fit: Fit | None = None,
        observer: WaitObserver | None = None,
    ) -> InlineClaim | None:
        """Admits a request; see `Admission.admit`.

        Raises:
            ResourceExhaustedError: The principal has too many requests in flight.
        """
        admit = partial(
            super().admit,
            request,
            may_claim,
            model,
            caller,
            bytes_in,
            parent=parent,
            single=single,
            fit=fit,
            observer=observer,
        )
        grant = None if caller is None else caller.access
        if caller is None or not isinstance(grant, Grant):
            return admit()
        place = _Place(self._guard.enter(caller, grant, "infer", request.model_name))
        request.wrap_responder(place.wrap, ResponderLayer.LIMIT)
        try:
            claim = admit()
        except BaseException:  # raised again
            place.leave()
            raise
        if grant.unsized:
            grant.principal.limiter.charge(bytes_in)
        return claim

    def refuse(
        self,
        request: InferenceRequest | None,
        error: Exception,
        caller: Caller | None,
        bytes_in: int,
        received_ns: int,
    ) -> ConchError:
        """As the base class; charges the bytes that were read of a request of unknown size too."""
        grant = None if caller is None else caller.access
        if isinstance(grant, Grant) and grant.unsized:
            grant.principal.limiter.charge(bytes_in)
        return super().refuse(request, error, caller, bytes_in, received_ns)


class _Place:
    """A request's place in its principal's limit; leaves with the final response."""

    __slots__ = ("_limiter", "_responder")

    _responder: Responder

    def __init__(self, limiter: Limiter) -> None:
        self._limiter: Limiter | None = limiter

    def wrap(self, responder: Responder) -> Responder:
        self._responder = responder
        return self

    def leave(self) -> None:
        """Leaves once."""
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter.leave()

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Passes a response on, see `Responder`."""
        try:
            self._responder(request, response, final)
        finally:
            if final:
                self.leave()
