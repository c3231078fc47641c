"""Calls that models make to other models (BLS), from request to responses.

A call goes through the model's scheduler like a client's request. Its waiter polls for two conditions that
end the wait: all requests of the caller were abandoned, or the call is deadlocked.

**Inline execution.** A thread that waits for a short batch of an idle instance claims that batch and runs it,
so a chain of small models needs no thread switches. Exceptions:

- a coroutine never claims, as it would block its loop;
- a model whose batches are not known to be short, or that needs its own thread, a decoupled model and an
  ensemble run on their own threads;
- a claim covers one batch; other threads are woken for the rest. Claims held for an ensemble are released
  before the call, which may depend on them;
- nothing runs inline once torch is imported: its modes and streams are per thread. The called model sees none
  of the caller's context variables.
"""

from __future__ import annotations

import logging
import queue
import sys
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Protocol

from conch.backends.python.api.pb_errors import CallsEndedError, TritonError, as_triton_error
from conch.backends.python.api.pb_response import InferenceResponse
from conch.backends.python.api.pb_tensor import Tensor
from conch.backends.python.api.pb_trace import INHERITED, InferenceTrace
from conch.backends.python.api.pb_types import (
    TRITONSERVER_MEMORY_GPU,
    PreferredMemory,
)
from conch.backends.python.calls.call_context import CallContext
from conch.backends.python.calls.deadlock_detection import DEADLOCK, is_deadlocked
from conch.core.bls import Wait as WaitedFor
from conch.core.clock import monotonic_ns
from conch.core.cold_models import ColdModelError
from conch.core.ensembles.ensemble_claim import EnsembleClaim
from conch.core.errors import ConchError, InternalError, NotFoundError, without_details
from conch.core.request import InferenceRequest as CoreRequest
from conch.core.request import InferenceResponse as CoreResponse
from conch.core.request import Responder
from conch.core.servable import InlineClaim, Servable
from conch.ipc.loop import yield_loop

log = logging.getLogger(__name__)

FIRST_POLL_S = 0.02
"""First polling interval, in seconds; doubles up to `MAX_POLL_S`."""

MAX_POLL_S = 0.25
"""Longest polling interval, in seconds."""

CONFIRM_S = 0.005
"""Polling interval, in seconds, after a look that found a cycle."""

GRACE_NS = 2_000_000_000
"""Time for which a model may start calls after all of its requests were abandoned, in nanoseconds.

It lets a model that has noticed clean up, and ends one that has not.
"""

BlsAnswer = tuple[InferenceResponse | None, bool]
"""A response, None for a final flag without one; and True if it is the last."""


Wait = Callable[[Callable[[], bool], float], object]
"""Waits until a condition holds, at most for some seconds."""

ReportWait = Callable[[CoreRequest, Sequence[CoreRequest], Callable[[], bool]], bool]
"""Reports that a thread waits for a call; see `conch.workers.host.server_client.ServerClient.waits`."""


def refusal(model_name: str, message: str) -> str:
    """Error text of a call that could not be submitted."""
    return f"Model {model_name} - Error when running inference: {message}"


def not_ready(model_name: str, error: ConchError) -> ConchError:
    """The error of a call whose model was not found, with the class of the lookup's error."""
    if "' is not found" in error.message:  # no version of it either
        return type(error)(f"Request for unknown model: '{model_name}' is not found")
    return type(error)(f"Failed for execute the inference request. Model '{model_name}' is not ready.")


class BlsRequest(Protocol):
    """A request that a model makes of another model: `pb_request.InferenceRequest`."""

    _trace: InferenceTrace

    def preferred_memory(self) -> PreferredMemory:
        """The memory to prefer for the response's tensors."""

    def _to_core(self, responder: Responder, created_ns: int) -> CoreRequest: ...


class BlsCall:
    """One request to another model; subclasses deliver its responses.

    Attributes:
        caller: The calling instance.
        core: The core's request.
        parents: The requests that the caller executes; None if unknown.
        since_ns: Creation time.
    """

    __slots__ = ("__weakref__", "_decoupled", "_ends_ns", "_gpu", "_trace", "caller", "core",
                 "parents", "since_ns")  # fmt: skip

    def __init__(self, caller: CallContext, request: BlsRequest, decoupled: bool) -> None:
        self.caller = caller
        self._decoupled = decoupled
        self._gpu = request.preferred_memory().preferred_memory_type() == TRITONSERVER_MEMORY_GPU
        self._trace = request._trace
        self.parents = caller.parent_requests()
        self.since_ns = now = monotonic_ns()
        self._ends_ns = (
            self.caller.abandoned_since(self.parents, now) + GRACE_NS if self._abandoned(now) else 0
        )
        self.core = core = request._to_core(self._respond, now)
        core.deadline_ns = self._deadline()

    def _deadline(self) -> int | None:
        """The latest deadline of the caller's pending requests; None if one has no deadline."""
        deadlines = [0]
        if self._ends_ns:
            return self._ends_ns
        for parent in self.parents or ():
            if not parent.filler:
                if parent.deadline_ns is None or parent.completed:
                    return None
                deadlines.append(parent.deadline_ns)
        return max(deadlines) or None

    def start(self, may_claim: bool) -> InlineClaim | None:
        """Submits the call; errors of the submission become its response.

        Returns:
            A claim on a batch that the caller has to run or release, only if it may claim.

        Raises:
            CallsEndedError: The caller's requests were abandoned some time ago.
            TritonModelException: The caller cannot call the server.
        """
        server = self.caller.server
        self.check_abandoned()
        if not self.caller.add_open_call(self):
            return None
        ensemble_claim = EnsembleClaim.current()
        if ensemble_claim is not None:
            ensemble_claim.release()
        core = self.core
        name = core.model_name
        core.context = parent = self._logged_parent()
        try:
            model = self._find(name)
            if model.spec.decoupled and not self._decoupled:
                raise InternalError(
                    f"Model {name} is using the decoupled. The current BLS request call doesn't support "
                    f"models using the decoupled transaction policy. Please use 'decoupled=True' argument to "
                    f"the 'exec' or 'async_exec' calls for decoupled models.'"
                )
            return server.submit(core, may_claim, model, parent=parent)
        except ColdModelError as cold:
            self._start_later(cold)
            return None
        except Exception as error:  # boundary: called models; the model that calls gets the error
            if not isinstance(error, ConchError):
                log.exception("a call of model '%s' could not be made", name)
            self._refuse(error)
            return None

    def _refuse(self, error: Exception) -> None:
        """Ends the call: it can't be submitted."""
        shown = as_triton_error(without_details(error, "the request could not be handled"))
        self.end(TritonError(refusal(self.core.model_name, shown.message()), shown.code()))

    def _start_later(self, cold: ColdModelError) -> None:
        """Submits the call again once its model is in memory."""

        def then(error: ConchError | None) -> None:
            if error is None:
                self.start(False)
            else:
                self._refuse(error)

        try:
            cold.wait(then, 0, self.core.deadline_ns, self.core.priority).start()
        except ConchError as error:
            self._refuse(error)

    def _logged_parent(self) -> CoreRequest | None:
        """The request whose log line and trace the call belongs to; with several, the model names it."""
        if self._trace is not INHERITED:
            return self._trace._core
        return self.parents[0] if self.parents and len(self.parents) == 1 else None

    def _find(self, name: str) -> Servable:
        """Finds the model in the caller's namespace, then globally."""
        error: ConchError | None = None
        if not self.core.model_version.startswith("-"):
            for known_as in self.caller.names(name):
                self.core.model_name = known_as
                try:
                    return self.caller.server.find(self.core)
                except ColdModelError:
                    raise
                except ConchError as not_found:
                    error = not_found
        raise not_ready(name, error or NotFoundError("")) from None

    def cancel(self) -> None:
        """Cancels the request."""
        self.caller.server.cancel(self.core)

    def abandon(self) -> None:
        """Cancels the call and ends its wait at once; see `call_context.OpenCall`."""
        name = self.caller.name
        self.end(TritonError(f"model instance '{name}' has been unloaded", TritonError.CANCELLED))
        self.caller.cancel(self.core)

    def _respond(self, request: CoreRequest, response: CoreResponse | None, final: bool) -> None:
        """Responder of the request.

        Copies tensors: the model, or the cache, reuses their memory after this returns.
        """
        answer: InferenceResponse | None = None
        if response is not None:
            if response.error is not None:
                answer = InferenceResponse(error=as_triton_error(response.error))
            else:
                tensors = [Tensor._from_response(tensor, self._gpu) for tensor in response.outputs]
                parameters = response.parameters
                answer = InferenceResponse(tensors, None, dict(parameters) if parameters else None)
        if final:
            self.caller.remove_open_call(self)
        self.receive((answer, final))

    def end(self, error: TritonError) -> None:
        """Completes the call with an error."""
        self.caller.remove_open_call(self)
        self.receive((InferenceResponse(error=error), True))

    def receive(self, answer: BlsAnswer) -> None:
        """Receives a response, from any thread; may be called again after the last one."""
        raise NotImplementedError

    def check_abandoned(self) -> None:
        """Checks whether the caller was abandoned; called periodically while the call is awaited.

        Raises:
            CallsEndedError: It was; the call has been cancelled.
            TritonModelException: This process is a fork of the caller's.
        """
        self.caller.check_process()
        now = monotonic_ns()
        if not (now >= self._ends_ns and self._abandoned(now)):
            return
        self.caller.remove_open_call(self)
        self.cancel()
        raise CallsEndedError(
            f"model instance '{self.caller.name}' waits for model '{self.core.model_name}', and no client "
            f"waits for its own answer any more"
        )

    def _abandoned(self, now_ns: int) -> bool:
        """True if all requests of the caller are known to be abandoned."""
        for parent in self.parents or ():
            if not parent.filler and (parent.completed or not parent.is_abandoned(now_ns)):
                return False
        return bool(self.parents)


class WaitingCall(BlsCall):
    """A call that a thread waits for."""

    __slots__ = ("_answers", "_seen")

    def __init__(self, caller: CallContext, request: BlsRequest, decoupled: bool) -> None:
        self._answers: queue.SimpleQueue[BlsAnswer] = queue.SimpleQueue()
        self._seen: frozenset[WaitedFor] = frozenset()
        super().__init__(caller, request, decoupled)

    def receive(self, answer: BlsAnswer) -> None:
        """See `BlsCall.receive`."""
        self._answers.put(answer)

    def run(self) -> InferenceResponse:
        """Submits the call, may run its batch inline, and returns its only response.

        Raises:
            CallsEndedError: The caller's requests were abandoned.
            TritonModelException: The caller cannot call the server.
        """
        waiting = self.caller.start_waiting(self)
        try:
            claim = self.start(may_claim="torch" not in sys.modules)
            if claim is not None and not self._run_inline(claim):
                claim.release()
            answer, _ = self._wait()
        finally:
            if waiting:
                self.caller.waiting = None
        return InferenceResponse() if answer is None else answer

    @staticmethod
    def _run_inline(claim: InlineClaim) -> bool:
        """Runs a short batch inline; True if no claim is left."""
        return claim.fast and not Context().run(claim.run_batch_inline)

    def next(self) -> BlsAnswer:
        """The next response.

        Raises:
            CallsEndedError: The caller's requests were abandoned.
            TritonModelException: This process is a fork of the caller's.
        """
        self.caller.check_process()
        waiting = self.caller.start_waiting(self)
        try:
            return self._wait()
        finally:
            if waiting:
                self.caller.waiting = None

    def next_nowait(self) -> BlsAnswer | None:
        """The next response if it has arrived."""
        try:
            return self._answers.get_nowait()
        except queue.Empty:
            return None

    def _wait(self) -> BlsAnswer:
        # After one call in a cycle the next is likely in one too. Each takes this long to fail, one after the
        # other, and the first waiter may wait for hundreds of them.
        caller = self.caller
        poll_s = CONFIRM_S if caller.in_cycle else FIRST_POLL_S
        in_cycle = False
        while True:
            answer = self._get(poll_s)
            if answer is not None:
                caller.in_cycle = in_cycle
                return answer
            poll_s = min(2 * poll_s, MAX_POLL_S)
            self.check_abandoned()
            report_wait: ReportWait | None = getattr(caller.known_server, "waits", None)
            if report_wait is not None:
                # In a worker: the server looks for deadlocks and completes the call if it is in one.
                parents = self.parents if caller.waiting is self else None
                in_cycle = report_wait(self.core, parents or (), self._has_answer)
                if in_cycle:
                    poll_s = CONFIRM_S
                continue
            self._seen, deadlocked = is_deadlocked(self, self._seen)
            in_cycle = bool(self._seen)
            if in_cycle:
                poll_s = CONFIRM_S  # others in the cycle wait too
            if deadlocked:
                text = DEADLOCK.format(model=self.core.model_name)
                self.end(TritonError(text, TritonError.UNAVAILABLE))
                self.cancel()

    def _get(self, timeout_s: float) -> BlsAnswer | None:
        """The next response; None on timeout."""
        wait: Wait | None = getattr(self.caller.known_server, "wait", None)
        try:
            if wait is None:
                if self._answers.empty():
                    yield_loop()  # a loop that runs this model may have to receive the response
                return self._answers.get(timeout=timeout_s)
            # In a worker: the waiting thread also reads the connection, which saves a thread switch.
            wait(self._has_answer, timeout_s)
            return self._answers.get_nowait()
        except queue.Empty:
            return None

    def _has_answer(self) -> bool:
        return not self._answers.empty()
