"""Admission: the only way in for requests, from any front end to the scheduler of a model version.

gRPC, HTTP, the Python API, ensemble steps and BLS calls each hold an `Admission`. `admit` runs these steps:

1. Count its bytes, or refuse it if the server holds too many. Bind its shared-memory regions. Refuse it if
   the server refuses new ones and it continues no open sequence.
2. Resolve the model version, unless the caller has done so (see below); the caller fits the request to it.
3. Wrap the responder, innermost first: shared-memory regions, request log, single response.
4. Submit. The version validates and queues the request, or raises `ClosedError` if it was replaced since it
   was resolved. Its successor is published before it closes, so the request is resolved and submitted again.
5. Cancel, if the client left before the version knew the request.
6. On an error, end the count and the log line; the error is raised to the caller, whose `refuse` releases
   the regions.

A request whose model is not in memory waits here, between its steps 1 and 2, or in 4 if the model has been
evicted since. `admit` returns then, and the responder gets a later error too. `cancel` ends the wait.

What a caller may call before `admit`:

    ==============  ======================================  ================================================
    method          callers                                 reason
    ==============  ======================================  ================================================
    `check_open`    gRPC's unary calls, HTTP, the console   a front end that has closed refuses requests of
                                                            open sequences, too
    `resolve_name`  HTTP's infer route, before the body     an unknown model is refused without reading it
    `loaded`        HTTP's other routes                     the model's description says how to read the body
    `resolve`       the Python API, models                  the model's description says how to read the
                                                            request; includes step 1
    `resolve_step`  ensembles                               a model that is being unloaded still serves the
                                                            steps of ensembles that run
    ==============  ======================================  ================================================

Threads and locks: any thread. Admission has no lock; each `SingleResponse` has one. What has waited is
submitted by the thread that has loaded the model.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from functools import partial
from typing import Final, NamedTuple, Protocol

from conch.core.cold_models import ColdModelError, ColdWait, when_loaded
from conch.core.compiled import mypyc_attr
from conch.core.errors import (
    CancelledError,
    ConchError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedError,
    as_conch_error,
    without_traceback,
)
from conch.core.registry import Entry, Registry
from conch.core.request import InferenceRequest, InferenceResponse, Responder
from conch.core.request_log import Caller, RequestLog
from conch.core.responder_layers import ResponderLayer
from conch.core.servable import ClosedError, InlineClaim, Servable
from conch.core.server_stage import ServerStages, Stage
from conch.core.spec import ModelSpec

log = logging.getLogger(__name__)

MOST_DEPTH = 100
"""Most requests around a request: more than models need, few enough to be harmless."""

COUNTED_BYTES: Final = 4096
"""Requests with fewer bytes do not count in `HeldBytes`: each costs more than its bytes."""
_RETRY_MS = 1000
_TOO_MUCH = (
    "the server holds as many bytes of received messages as it may: {} (--grpc-max-received-bytes); "
    "repeat the call later"
)


Fit = Callable[[InferenceRequest, ModelSpec], None]
"""Completes a request by the description of its version; raises ConchError if it does not fit."""


class HeldBytes:
    """Bytes of requests that the server holds, from their first byte until their answer; of all ports.

    What would pass the bound is refused, unless nothing else is held: a single request of any size passes.

    Threads and locks: any thread; one lock.

    Attributes:
        most: The bound.
        total: The bytes.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self._lock = threading.Lock()

    def add(self, change: int) -> None:
        """Changes the total, also beyond the bound."""
        with self._lock:
            self.total += change

    def take(self, size: int, own: int = 0) -> None:
        """Adds bytes, of a request that has `own` already.

        Raises:
            ResourceExhaustedError: There are too many, and some are others'.
        """
        with self._lock:
            total = self.total
            if total > own and total + size > self.most:
                raise self.refusal()
            self.total = total + size

    def refusal(self) -> ResourceExhaustedError:
        """The error of a request that is refused."""
        error = ResourceExhaustedError(_TOO_MUCH.format(self.most))
        error.retry_after_ms = _RETRY_MS
        return error


class Hold:
    """Bytes of a request before it is admitted, until `release`; of one thread at a time."""

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self.size = 0

    def grow(self, size: int) -> None:
        """Adds bytes, which count as others'. Raises ResourceExhaustedError: there are too many."""
        self._held.take(size)
        self.size += size

    def receive(self, size: int) -> None:
        """Adds bytes that have come. Raises ResourceExhaustedError: there are too many."""
        self._held.take(size, self.size)
        self.size += size

    def release(self) -> None:
        """Ends it; a second call has no effect."""
        size, self.size = self.size, 0
        self._held.add(-size)


class WaitObserver(Protocol):
    """A front end that keeps its requests in order, one of which waits for its model.

    A request can wait again before its wait ends, and a wait can end before it is noted. The request has been
    submitted or answered when as many waits have ended as began.
    """

    def wait_began(self) -> None:
        """Notes a wait; the first one before `Admission.admit` returns, on its thread."""

    def wait_ended(self) -> None:
        """Notes the end of a wait; on any thread."""


@mypyc_attr(native_class=False)
class ExitingError(UnavailableError):
    """A front end that stops refuses the request; HTTP closes the connection with the answer."""


class _Waiting(NamedTuple):
    """The wait of a request for its model, with arguments of `Admission.admit`."""

    wait: ColdWait
    caller: Caller | None
    bytes_in: int
    observer: WaitObserver | None

    def ended(self) -> None:
        """Tells the observer."""
        if self.observer is not None:
            self.observer.wait_ended()


@mypyc_attr(allow_interpreted_subclasses=True)
class Admission:
    """The way in for one kind of caller.

    Args:
        registry: The models.
        protocol: Name of the caller in the request log.
        stages: The server's stage; None for callers inside the server, which are never refused.
        request_log: Logs and traces requests; None for callers inside the server, which log through `parent`.
        bind: Binds the regions that a request names, and forgets their names; None for callers without any.
        held: Counts the bytes of requests until they are answered; None for callers inside the server.

    Attributes:
        held: See above; of callers inside the server, a count without a bound.
        closed: True after `close`.
        refused: Number of requests that came after `close`.
    """

    def __init__(
        self,
        registry: Registry,
        protocol: str = "",
        stages: ServerStages | None = None,
        request_log: RequestLog | None = None,
        bind: Callable[[InferenceRequest], None] | None = None,
        held: HeldBytes | None = None,
    ) -> None:
        self.held = held or HeldBytes(sys.maxsize)
        self._bind = bind or _no_regions
        self._registry = registry
        self._protocol = protocol
        self._stages = stages or ServerStages()
        self._log = request_log
        self._waits: dict[InferenceRequest, _Waiting] = {}
        self.closed = False
        self.refused = 0

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
        """Admits a request; its responder gets every outcome except the errors raised here.

        Args:
            request: The request.
            may_claim: True if the caller can run batches soon.
            model: The version, if the caller has resolved it.
            caller: The call that it came with, for the log.
            bytes_in: Size of the request, for the log; counts in `held` unless the request has another count.
            parent: The request for which an ensemble or a model makes this one.
            single: If given, exactly one response is let through; this is the text of the error otherwise.
            fit: Called with the version's description before the request is checked.
            observer: Told if the request waits for its model.

        Returns:
            The claim that the caller runs or releases soon, only if `may_claim`; else None.

        Raises:
            ConchError: The request is refused, has no model, or does not fit it.
        """
        try:
            if request.held is None and (size := request.held_bytes or bytes_in) >= COUNTED_BYTES:
                request.held_bytes = size
                self.held.take(size)
                request.held = self.held
            if request.named_regions is not None:
                self._bind(request)
            if self._stages.refusing:
                self._check_continues(request)
            if model is None:
                model = self._resolve(request)
            if fit is not None:
                fit(request, model.spec)
            if request.region_bindings is not None:
                request.region_bindings.attach(request)
            if self._log is not None and self._log.on:
                self._log.begin(request, model, self._protocol, caller, bytes_in)
            if parent is not None:
                self._nest(request, parent, model)
            if single is not None and model.spec.decoupled:
                self._expect_single(request, single)
            try:
                claim = model.submit(request, may_claim)
            except ClosedError:
                return self._submit_to_successor(request, model, may_claim, caller, bytes_in, observer)
            if request.cancelled:
                self.cancel(request)
            return claim
        except ColdModelError as cold:
            again = partial(
                Admission.admit,
                self,
                request,
                caller=caller,
                bytes_in=bytes_in,
                parent=parent,
                single=single,
                fit=fit,
                observer=observer,
            )
            self._wait(cold, request, caller, bytes_in, observer, again)
            return None
        except Exception as error:  # boundary: models and caches of add-ons; raised again
            self._end_failed(request, error)
            raise

    def _submit_to_successor(
        self,
        request: InferenceRequest,
        closed: Servable,
        may_claim: bool,
        caller: Caller | None,
        bytes_in: int,
        observer: WaitObserver | None,
    ) -> InlineClaim | None:
        """Submits a request to the version that has replaced a closed one; see `admit`."""
        while True:
            try:
                model = self._successor(request, closed)
            except ColdModelError as cold:
                again = partial(self._submit_to_successor, request, closed, False, caller, bytes_in, observer)
                self._wait(cold, request, caller, bytes_in, observer, again)
                return None
            try:
                claim = model.submit(request, may_claim)
                break
            except ClosedError:
                closed = model
        if request.cancelled:
            self.cancel(request)
        return claim

    def _wait(
        self,
        cold: ColdModelError,
        request: InferenceRequest,
        caller: Caller | None,
        bytes_in: int,
        observer: WaitObserver | None,
        again: Callable[[], object],
    ) -> None:
        """Submits a request again once its model is in memory.

        Raises:
            ConchError: It can't wait.
        """

        def then(error: ConchError | None) -> None:
            waits = self._waits.pop(request, None)
            if waits is None:
                return  # cancelled
            try:
                if error is not None:
                    raise error
                again()
            except Exception as refused:  # boundary: models and caches of add-ons
                self._fail(request, refused, waits)
            else:
                waits.ended()

        payer = None if caller is None else caller.access
        wait = cold.wait(then, bytes_in, request.deadline_ns, request.priority, payer)
        # First: `then` may run before `start` returns.
        self._waits[request] = _Waiting(wait, caller, bytes_in, observer)
        try:
            wait.start()
        except ConchError:
            if self._waits.pop(request, None) is not None:  # else it was cancelled meanwhile, and answered
                raise
        if observer is not None:
            observer.wait_began()
        if request.cancelled:
            self.cancel(request)

    def _fail(self, request: InferenceRequest, error: Exception, waits: _Waiting) -> None:
        """Answers a request that has waited with an error."""
        shown = Admission.refuse(self, request, error, waits.caller, waits.bytes_in, request.received_ns)
        request.fail(without_traceback(shown))
        waits.ended()

    def _nest(self, request: InferenceRequest, parent: InferenceRequest, model: Servable) -> None:
        depth = getattr(parent, "depth", 0) + 1
        if depth > MOST_DEPTH:
            raise InternalError(
                f"model '{request.model_name}' is called within {MOST_DEPTH} requests: it calls itself, "
                f"directly or through other models, without end"
            )
        request.depth = depth
        if parent.watch is not None:
            parent.watch.step(request, model, self._protocol)

    def defer(self, size: int, pool: Executor, work: Callable[[], object]) -> None:
        """Decodes a request on a pool; its bytes count while it waits.

        Raises:
            ResourceExhaustedError: The server holds too many.
            RuntimeError: The pool is closed.
        """
        hold = Hold(self.held)
        hold.grow(size)

        def run() -> None:
            hold.release()
            work()

        try:
            queued = pool.submit(run)
        except RuntimeError:
            hold.release()
            raise
        queued.add_done_callback(lambda _: hold.release())  # it may be dropped

    def refuse(
        self,
        request: InferenceRequest | None,
        error: Exception,
        caller: Caller | None,
        bytes_in: int,
        received_ns: int,
    ) -> ConchError:
        """Releases and logs a request that was malformed or not admitted.

        Args:
            request: The request; None if it could not be read.
            error: The reason; logged with its traceback if it is not a `ConchError`.
            caller: The call that it came with.
            bytes_in: Size of the request.
            received_ns: Monotonic time at which the request arrived.

        Returns:
            The error for the client.
        """
        if request is not None:
            request.discard()
        if isinstance(error, ColdModelError):
            error.begin(None if caller is None else caller.access)
        if not isinstance(error, ConchError):
            what = "a request of a stream" if self._protocol == "grpc-stream" else "a request"
            log.error("%s could not be handled", what, exc_info=error)
            prefix = "" if request is None else request.log_prefix
            error = InternalError(f"{prefix}the request could not be handled")
        if self._log is not None:
            self._log.refuse(request, error, self._protocol, caller, bytes_in, received_ns)
        return error

    def cancel(self, request: InferenceRequest) -> None:
        """Cancels a request: its client no longer waits."""
        if request.model is not None:
            request.model.cancel(request)
            return
        request.cancelled = True
        waits = self._waits.pop(request, None)
        if waits is not None:
            waits.wait.cancel()
            self._fail(request, CancelledError("the client has cancelled the call"), waits)

    def close(self) -> None:
        """Makes `check_open` refuse all further requests of this front end."""
        self.closed = True

    @property
    def adds_metadata(self) -> bool:
        """True if the log may call `Caller.add_response_metadata`."""
        return self._log is not None and self._log.adds_metadata

    def check_open(self) -> None:
        """Raises ExitingError, and counts the request as refused, after `close`."""
        if self.closed:
            self.refused += 1
            raise ExitingError("Server exiting")

    def resolve(self, request: InferenceRequest) -> Servable:
        """The version for a request: the one with its live sequence, even if that is being replaced.

        Raises:
            UnavailableError: The server refuses new requests, as `admit` would.
            ConchError: There is no such model; see `Registry.resolve`.
        """
        if self._stages.refusing:
            self._check_continues(request)
        return self._resolve(request)

    def resolve_name(self, name: str, version: str) -> Servable | None:
        """The version for a name and version text; None if that depends on the request.

        So it does if only a draining version may have the request, with a route, and if the request waits for
        its model.

        Raises:
            ConchError: The start failed, or there is no such model.
        """
        try:
            return self._find(name, version)
        except ColdModelError:
            return None

    def loaded(
        self, name: str, version: str, caller: Caller | None, size: int = 0
    ) -> Future[Servable | None]:
        """As `resolve_name`, once the model is in memory.

        Args:
            name: The model.
            version: Its version, or empty.
            caller: The call; pays for a load that it begins.
            size: Bytes that it holds.

        Returns:
            The version, or a `ConchError`; a cancelled one leaves the queue.
        """
        payer = None if caller is None else caller.access
        return when_loaded(lambda: self._find(name, version), size, payer=payer)

    def _find(self, name: str, version: str) -> Servable | None:
        if self._stages.stage is Stage.FAILED:
            raise UnavailableError("Server not ready")
        try:
            return self._registry.resolve_early(name, version)
        except ConchError:
            if not self._registry.draining_of(name):
                raise
            return None

    def resolve_step(self, request: InferenceRequest) -> Servable:
        """The version for a step of an ensemble, possibly one that is being unloaded.

        Raises:
            ConchError: There is no such model.
        """
        try:
            return self._resolve(request)
        except ConchError:
            number = self._registry.version_number(request.model_name, request.model_version)
            models = self._registry.draining_of(request.model_name)
            usable = [model for model in models if number in (-1, model.spec.version)]
            # The highest version; of two with the same number, the one that drains last.
            model = max(reversed(usable), key=lambda model: model.spec.version, default=None)
            if model is None:
                raise
            return model

    def _resolve(self, request: InferenceRequest) -> Servable:
        if self._registry.draining and request.correlation_id and not request.sequence_start:
            model = self._draining(request)
            if model is not None:
                return model
        try:
            return self._registry.resolve_request(request)
        except ConchError:
            if not request.correlation_id or request.sequence_start:
                raise
            model = self._draining(request)  # it may have been unloaded since
            if model is None:
                raise
            return model

    def _successor(self, request: InferenceRequest, closed: Servable) -> Servable:
        model = self._resolve(request)
        decoupled = closed.spec.decoupled
        if model.spec.decoupled is not decoupled:
            # The caller has chosen its way to answer by the old version.
            raise UnavailableError(
                f"model '{request.model_name}' has become {'' if decoupled is False else 'not '}"
                f"decoupled while the request came in; send it again"
            ) from None
        return model

    def _draining(self, request: InferenceRequest) -> Servable | None:
        """The draining version that has the live sequence of a request."""
        models = self._registry.draining_of(request.model_name)
        if not models:
            return None
        number = self._registry.version_number(request.model_name, request.model_version)
        known = self._registry.identifiers(request.model_name)
        entry = self._registry.entries.get(known[0]) if len(known) == 1 else None
        if entry is not None and any(model.continues(request) for model in _reached(entry, number)):
            return None  # its id was used again since
        for model in reversed(models):
            if number in (-1, model.spec.version) and model.continues(request):
                return model
        return None

    def _check_continues(self, request: InferenceRequest) -> None:
        if self._stages.stage is Stage.FAILED:
            raise UnavailableError("Server not ready")
        if request.correlation_id:
            if request.sequence_start:
                raise UnavailableError(
                    "Server is stopping, scheduler for model has stopped accepting new inference requests"
                )
            try:
                if self._resolve(request).continues(request):
                    return
            except ConchError:
                pass
        raise UnavailableError("Server exiting")

    def _expect_single(self, request: InferenceRequest, refusal: str) -> None:
        def wrap(responder: Responder) -> Responder:
            return SingleResponse(responder, self.cancel, refusal)

        request.wrap_responder(wrap, ResponderLayer.SINGLE)

    def _end_failed(self, request: InferenceRequest, error: Exception) -> None:
        """Ends the count and the log line of a request that is not admitted."""
        if request.held is not None:
            request.held = None
            self.held.add(-request.held_bytes)
        watch = request.watch
        # A front end finds the text of other errors itself, see `refuse`.
        if watch is not None and (self._log is None or isinstance(error, ConchError)):
            watch.refused(request, as_conch_error(error))


def _no_regions(request: InferenceRequest) -> None:
    raise UnsupportedError(f"{request.log_prefix}requests from here have no shared-memory regions")


def _reached(entry: Entry, number: int) -> Collection[Servable]:
    """The ready versions that a request may get: with a number, or -1 for none."""
    if number < 0 and entry.route is not None:
        return entry.ready.values()
    model = entry.default if number < 0 else entry.ready.get(number)
    return () if model is None else (model,)


class SingleResponse:
    """A responder for callers that take one response, in front of a decoupled model.

    Keeps the first response until the final call. After a second response, or a final call without any,
    the caller gets the error that Triton gives for every such request, and the model is cancelled.
    """

    def __init__(
        self, responder: Responder, cancel: Callable[[InferenceRequest], None], refusal: str
    ) -> None:
        self._refusal = refusal
        self._responder = responder
        self._cancel = cancel
        self._lock = threading.Lock()
        self._latest: InferenceResponse | None = None
        self._answered = False

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Takes a response of the model, from any thread."""
        with self._lock:
            if self._answered:
                return
            kept, self._latest = self._latest, None
            failed = response is not None and response.error is not None
            surplus = kept is not None and response is not None and not failed
            if not (final or failed or surplus):
                self._latest = response
                return
            self._answered = True
        answer = response or kept
        if answer is None or surplus:
            answer = InferenceResponse([], UnsupportedError(self._refusal))
        if not final:
            self._cancel(request)
        self._responder(request, answer, True)
