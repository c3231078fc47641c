"""Requests that models make of other models, from the request to its answers.

A call goes to the scheduler of its model like any client's request. Whoever waits for it looks up from time
to time: the waiting ends when nobody waits for the caller itself any more, and when it would last for ever.

**Leading.** A thread that waits for a short batch of an idle instance runs that batch itself, so that a
chain of small models has no hop from thread to thread. It does not where it would hold up others, or be
noticed by the model:

- coroutines never lead: their loop must go on;
- models whose batches are not known to be short are left to their own threads, and so are those that only a
  thread of their own may run, decoupled ones and ensembles;
- it leads one batch and no more, and has others woken for what is left: nobody looks after a thread that
  leads in the middle of an execution. What it has promised to lead later, for an ensemble, is handed over
  before, as the call may need it;
- nobody leads where torch is loaded: its modes and streams belong to a thread, and the caller's are not the
  other model's. Of context variables the model that is called sees none of the caller's.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Protocol

from conch.backends.python.api.pb_errors import CallsEndedError, TritonError, as_triton_error
from conch.backends.python.api.pb_response import InferenceResponse
from conch.backends.python.api.pb_tensor import Tensor
from conch.backends.python.api.pb_types import (
    TRITONSERVER_MEMORY_GPU,
    PreferredMemory,
)
from conch.backends.python.calls.call_context import CallContext
from conch.backends.python.calls.deadlock_detection import DEADLOCK, is_deadlocked
from conch.core.bls import Wait as WaitedFor
from conch.core.clock import monotonic_ns
from conch.core.ensembles.ensemble_claim import EnsembleClaim
from conch.core.errors import ConchError, InternalError, NotFoundError, as_conch_error
from conch.core.request import InferenceRequest as CoreRequest
from conch.core.request import InferenceResponse as CoreResponse
from conch.core.request import Responder
from conch.core.servable import InlineClaim, Servable

FIRST_LOOK_S = 0.02
"""How long one waits before looking up for the first time; then twice as long each time."""

LONGEST_LOOK_S = 0.25
"""How long one waits at most before looking up again."""

CONFIRM_S = 0.005
"""How long one waits between two looks that find the call waiting for ever."""

GRACE_NS = 2_000_000_000
"""How long a model may go on calling others when nobody waits for its answer any more.

That is for models that have noticed and tidy up; one that has not must not go on for ever.
"""

Answer = tuple[InferenceResponse | None, bool]
"""An answer, or None for a final flag with nothing to say; and whether it is the last."""


Wait = Callable[[Callable[[], bool], float], object]
"""Waits until something has come, but no longer than so many seconds."""

Tell = Callable[[CoreRequest, Sequence[CoreRequest], Callable[[], bool]], bool]
"""Tells that a thread waits for a call; see `conch.workers.host.calls.WorkerCalls.waits`."""


def refusal(model_name: str, message: str) -> str:
    """The text of the error of a call that was not even queued."""
    return f"Model {model_name} - Error when running inference: {message}"


def not_ready(model_name: str, error: ConchError) -> ConchError:
    """The error of a call whose model could not be found, of the kind that the search for it ended with."""
    return type(error)(f"Failed for execute the inference request. Model '{model_name}' is not ready.")


class BlsRequest(Protocol):
    """A request that a model makes of another model: `pb_request.InferenceRequest`."""

    def preferred_memory(self) -> PreferredMemory:
        """Where the response's tensors should be."""

    def _to_core(self, responder: Responder, created_ns: int) -> CoreRequest: ...


class Call:
    """One request to another model; subclasses say what becomes of its answers.

    Args:
        caller: Who calls.
        request: The request.
        decoupled: Whether it may have any number of responses.

    Attributes:
        caller: Who calls.
        core: The request as the core has it.
        parents: The requests for which it is made; None where that is not known.
        since_ns: When it was made.
    """

    __slots__ = ("__weakref__", "_decoupled", "_ends_ns", "_gpu", "caller", "core", "parents", "since_ns")

    def __init__(self, caller: CallContext, request: BlsRequest, decoupled: bool) -> None:
        self.caller = caller
        self._decoupled = decoupled
        self._gpu = request.preferred_memory().preferred_memory_type() == TRITONSERVER_MEMORY_GPU
        self.parents = caller.callers()
        self.since_ns = now = monotonic_ns()
        self._ends_ns = self.caller.noticed(self.parents, now) + GRACE_NS if self._unwanted(now) else 0
        self.core = core = request._to_core(self._respond, now)
        core.deadline_ns = self._deadline()

    def _deadline(self) -> int | None:
        """When nobody waits for the caller any more: when the last of its requests has to be answered."""
        deadlines = [0]
        if self._ends_ns:
            return self._ends_ns
        for parent in self.parents or ():
            if not parent.filler:
                if parent.deadline_ns is None or parent.completed:
                    return None
                deadlines.append(parent.deadline_ns)
        return max(deadlines) or None

    def begin(self, may_claim: bool) -> InlineClaim | None:
        """Submits it; what is wrong with it becomes its answer.

        Returns:
            What the caller has to lead or hand over soon, only if it may lead.

        Raises:
            CallsEndedError: Nobody has waited for the caller for some time.
            TritonModelException: The caller can't call the server.
        """
        server = self.caller.server
        self.look()
        if not self.caller.opened(self):
            return None
        lead = EnsembleClaim.current()
        if lead is not None:
            lead.release()
        core = self.core
        name = core.model_name
        try:
            model = self._find(name)
            if model.spec.decoupled and not self._decoupled:
                raise InternalError(
                    f"Model {name} is using the decoupled. The current BLS request call doesn't support "
                    f"models using the decoupled transaction policy. Please use 'decoupled=True' argument to "
                    f"the 'exec' or 'async_exec' calls for decoupled models.'"
                )
            # With several parents, no log line is the one that the call belongs to.
            parent = self.parents[0] if self.parents and len(self.parents) == 1 else None
            return server.submit(core, may_claim, model, parent=parent)
        except Exception as error:
            shown = as_triton_error(as_conch_error(error))
            self.end(TritonError(refusal(name, shown.message()), shown.code()))
            return None

    def _find(self, name: str) -> Servable:
        """The model for it, in the caller's namespace or any other."""
        error: ConchError | None = None
        if not self.core.model_version.startswith("-"):
            for known_as in self.caller.names(name):
                self.core.model_name = known_as
                try:
                    return self.caller.server.find(self.core)
                except ConchError as not_found:
                    error = not_found
        raise not_ready(name, error or NotFoundError("")) from None

    def cancel(self) -> None:
        """Says that nobody waits for it any more."""
        self.caller.server.cancel(self.core)

    def abandon(self) -> None:
        """Cancels it, and ends the waiting for it at once; see `caller.OpenCall`."""
        name = self.caller.name
        self.end(TritonError(f"model instance '{name}' has been unloaded", TritonError.CANCELLED))
        self.caller.cancel(self.core)

    def _respond(self, request: CoreRequest, response: CoreResponse | None, final: bool) -> None:
        """Takes an answer; the responder of the request.

        The tensors are copied here: the model, or the cache, has their memory again when this returns.
        """
        answer: InferenceResponse | None = None
        if response is not None:
            if response.error is not None:
                answer = InferenceResponse(error=as_triton_error(response.error))
            else:
                tensors = [Tensor._answered(tensor, self._gpu) for tensor in response.outputs]
                parameters = response.parameters
                answer = InferenceResponse(tensors, None, dict(parameters) if parameters else None)
        if final:
            self.caller.ended(self)
        self.take((answer, final))

    def end(self, error: TritonError) -> None:
        """Answers it with an error of our own, finally."""
        self.caller.ended(self)
        self.take((InferenceResponse(error=error), True))

    def take(self, answer: Answer) -> None:
        """Takes an answer; called from any thread, and possibly again after the last one."""
        raise NotImplementedError

    def look(self) -> None:
        """To be called now and then while somebody waits for it.

        Raises:
            CallsEndedError: Nobody waits for the caller any more; the call has been cancelled.
            TritonModelException: This process is a fork of the caller's.
        """
        self.caller.check_process()
        now = monotonic_ns()
        if not (now >= self._ends_ns and self._unwanted(now)):
            return
        self.caller.ended(self)
        self.cancel()
        raise CallsEndedError(
            f"model instance '{self.caller.name}' waits for model '{self.core.model_name}', and nobody waits "
            f"for its own answer any more"
        )

    def _unwanted(self, now_ns: int) -> bool:
        """Whether nobody waits for the caller any more, as far as is known."""
        for parent in self.parents or ():
            if not parent.filler and (parent.completed or not parent.is_abandoned(now_ns)):
                return False
        return bool(self.parents)


class WaitingCall(Call):
    """A call for whose answers a thread waits."""

    __slots__ = ("_answers", "_seen")

    def __init__(self, caller: CallContext, request: BlsRequest, decoupled: bool) -> None:
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._seen: frozenset[WaitedFor] = frozenset()
        super().__init__(caller, request, decoupled)

    def take(self, answer: Answer) -> None:
        """See `Call.take`."""
        self._answers.put(answer)

    def run(self) -> InferenceResponse:
        """Submits it, possibly runs its batch, and gives its only answer.

        Raises:
            CallsEndedError: Nobody waits for the caller any more.
            TritonModelException: The caller can't call the server.
        """
        waiting = self.caller.start_waiting(self)
        try:
            claim = self.begin(may_claim="torch" not in sys.modules)
            if claim is not None and not self._led(claim):
                claim.release()
            answer, _ = self._wait()
        finally:
            if waiting:
                self.caller.waiting = None
        return InferenceResponse() if answer is None else answer

    @staticmethod
    def _led(claim: InlineClaim) -> bool:
        """Runs a batch if that is short; whether nothing is left to do."""
        return claim.fast and not Context().run(claim.run_batch_inline)

    def next(self) -> Answer:
        """The next answer.

        Raises:
            CallsEndedError: Nobody waits for the caller any more.
            TritonModelException: This process is a fork of the caller's.
        """
        self.caller.check_process()
        waiting = self.caller.start_waiting(self)
        try:
            return self._wait()
        finally:
            if waiting:
                self.caller.waiting = None

    def next_if_there(self) -> Answer | None:
        """The next answer if it has come."""
        try:
            return self._answers.get_nowait()
        except queue.Empty:
            return None

    def _wait(self) -> Answer:
        # Where one call was in a circle the next one probably is: each takes that time until it fails, one
        # after the other, and whoever came first may wait for hundreds of them.
        caller = self.caller
        patience = CONFIRM_S if caller.in_cycle else FIRST_LOOK_S
        in_cycle = False
        while True:
            answer = self._get(patience)
            if answer is not None:
                caller.in_cycle = in_cycle
                return answer
            patience = min(2 * patience, LONGEST_LOOK_S)
            self.look()
            tell: Tell | None = getattr(caller.known_server, "waits", None)
            if tell is not None:
                # In a worker: the server sees what it waits for, and answers it if that is for ever.
                parents = self.parents if caller.waiting is self else None
                in_cycle = tell(self.core, parents or (), self._has_come)
                if in_cycle:
                    patience = CONFIRM_S
                continue
            self._seen, for_ever = is_deadlocked(self, self._seen)
            in_cycle = bool(self._seen)
            if in_cycle:
                patience = CONFIRM_S  # others wait for the same
            if for_ever:
                text = DEADLOCK.format(model=self.core.model_name)
                self.end(TritonError(text, TritonError.UNAVAILABLE))
                self.cancel()

    def _get(self, patience_s: float) -> Answer | None:
        """The next answer; None if it does not come in time."""
        wait: Wait | None = getattr(self.caller.known_server, "wait", None)
        try:
            if wait is None:
                return self._answers.get(timeout=patience_s)
            # In a worker: the thread that waits also receives, so that no other one has to wake it.
            wait(self._has_come, patience_s)
            return self._answers.get_nowait()
        except queue.Empty:
            return None

    def _has_come(self) -> bool:
        return not self._answers.empty()
