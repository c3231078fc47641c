"""One request of an ensemble: submits its steps to their models, and passes their responses to its flow.

Responses come on any thread, possibly before the call that submits a step has returned. Events reach the flow
under a lock; the runs and answers that follow go to an outbox, which one thread at a time empties without the
lock:

    1. Thread A handles an event, sets `_emptying` and submits a step.
    2. Within that call, or on thread B, the step's response comes. It extends the outbox, sees `_emptying`
       and returns.
    3. A takes the next item from the outbox. With none left it clears `_emptying`, under the lock.

Guarantees: no lock is held in a model or a responder, and immediate responses do not grow the stack.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from conch.core.admission import Admission
from conch.core.clock import Clock
from conch.core.cold_models import ColdModelError
from conch.core.ensembles.ensemble_claim import EnsembleClaim
from conch.core.ensembles.fitting import Fitting
from conch.core.ensembles.flow import Correlation, EnsembleAnswer, Flow, FlowError, Run
from conch.core.ensembles.plan import EnsemblePlan
from conch.core.ensembles.step_places import Places
from conch.core.errors import (
    ERRORS_BY_CODE,
    CancelledError,
    ConchError,
    DeadlineExceededError,
    without_details,
    without_traceback,
)
from conch.core.model_statistics import ModelStatistics
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.servable import InlineClaim

log = logging.getLogger(__name__)


class Owner(Protocol):
    """The ensemble of an execution."""

    admission: Admission
    clock: Clock
    plan: EnsemblePlan
    fitting: Fitting
    places: Places
    statistics: ModelStatistics

    def answer(self, request: InferenceRequest, answer: EnsembleAnswer) -> None:
        """Sends an answer of a request."""

    def ended(self, execution: EnsembleExecution) -> None:
        """Removes an execution that is complete and has no running step."""


class EnsembleExecution:
    """A request in an ensemble."""

    def __init__(self, owner: Owner, request: InferenceRequest) -> None:
        self.request = request
        self._owner = owner
        self._flow = Flow(
            owner.plan,
            request.requested,
            Correlation(request.correlation_id, request.sequence_start, request.sequence_end),
            owner.places,
            self,
        )
        self._lock = threading.Lock()  # guards all below, and the flow
        self._children: dict[InferenceRequest, Run] = {}
        self._outbox: deque[Run | EnsembleAnswer] = deque()
        self._emptying = False
        self._cancels = False
        self._ended = False

    def start(self, may_claim: bool) -> InlineClaim | None:
        """Submits the first steps; returns a claim that the caller runs or releases, only if it may."""
        return self._handle(lambda flow: flow.start(self.request.inputs), may_claim)

    def cancel(self) -> None:
        """Cancels the request, unless it is complete, and its running steps."""
        self.fail(CancelledError(""))

    def fail(self, error: ConchError) -> bool:
        """Fails the request and cancels its running steps; False if it is complete."""
        children: list[InferenceRequest] = []
        first = False

        def handle(flow: Flow) -> None:
            nonlocal first
            if not flow.over:
                first = self._cancels = True
                children.extend(self._children)
                flow.fail(error)

        self._handle(handle)
        for child in children:
            self._owner.admission.cancel(child)
        return first

    def open_next(self, step: int) -> None:
        """Opens a response that waited for a place; see `Waiter`."""
        self._handle(lambda flow: flow.open_next(step))

    def _on_response(self, child: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Handles a step's response; the responder of the steps' requests."""
        with self._lock:
            run = self._children.pop(child, None) if final else self._children.get(child)
        if run is None:
            return  # the last response of another thread was first
        if response is not None and response.error is not None:
            self._step_failed(run, response.error, final)
            return
        outputs = None if response is None else response.outputs
        parameters = None if response is None else response.parameters
        self._handle(lambda flow: flow.respond(run, outputs, parameters, final))

    def _step_failed(self, run: Run, error: ConchError, ended: bool) -> None:
        shown = self._of_step(error)
        children: list[InferenceRequest] = []

        def handle(flow: Flow) -> None:
            if ended:
                flow.drop(run)
            # Other requests of a sequence may wait in the same queues, and would be cancelled too.
            if not flow.over and not self.request.correlation_id:
                self._cancels = True
                children.extend(self._children)
            flow.fail(shown)

        self._handle(handle)
        for child in children:
            self._owner.admission.cancel(child)

    def _client_error(self, error: Exception) -> ConchError:
        if not isinstance(error, ConchError):
            log.error("a step of ensemble '%s' could not be run", self.request.model_name, exc_info=error)
        sentence = f"{self.request.log_prefix}the request could not be handled"
        return without_traceback(without_details(error, sentence))

    def _of_step(self, error: ConchError) -> ConchError:
        """Converts a step's error to the client's."""
        if isinstance(error, DeadlineExceededError):
            return error  # the text of the client's own error, which this may overtake
        prefix = f"in ensemble '{self._owner.plan.name}', "
        if isinstance(error, FlowError):
            prefix += self.request.log_prefix
        shown = ERRORS_BY_CODE[error.code](prefix + error.message)
        shown.retry_after_ms = error.retry_after_ms
        return shown

    def _handle(self, event: Callable[[Flow], None], may_claim: bool = False) -> InlineClaim | None:
        """Passes an event to the flow, and empties the outbox unless another thread does."""
        with self._lock:
            event(self._flow)
            runs, answers = self._flow.take()
            self._outbox.extend(answers)
            self._outbox.extend(runs)
            empties, self._emptying = not self._emptying, True
        claim = self._empty_outbox(may_claim) if empties else None
        self._owner.places.wake()
        return claim

    def _empty_outbox(self, may_claim: bool) -> InlineClaim | None:
        """Sends the answers and submits the steps in the outbox."""
        claim: InlineClaim | None = None
        while True:
            with self._lock:
                if not self._outbox:
                    self._emptying = False
                    # Later events find the flow over and do nothing.
                    ended = self._flow.drained and not self._ended
                    self._ended |= ended
                    break
                item = self._outbox.popleft()
                if type(item) is Run and self._flow.over:
                    self._flow.drop(item)
                    continue
            if type(item) is EnsembleAnswer:
                if isinstance(item.error, FlowError):
                    item.error = self._of_step(item.error)
                self._owner.answer(self.request, item)
            elif type(item) is Run:
                model = self._submit(item, may_claim and claim is None)
                claim = claim or model
        if ended:
            self._owner.ended(self)
        return None if claim is None else EnsembleClaim(claim, self._owner.clock)

    def _wait(self, run: Run, cold: ColdModelError) -> None:
        """Submits a step again once its model is in memory."""

        def then(error: ConchError | None) -> None:
            if error is not None:
                self._step_failed(run, self._client_error(error), True)
                return
            with self._lock:
                self._outbox.append(run)
                if self._emptying:
                    return
                self._emptying = True
            self._empty_outbox(False)

        try:
            cold.wait(then, 0, self.request.deadline_ns, self.request.priority).start()
        except ConchError as error:
            self._step_failed(run, self._client_error(error), True)

    def _submit(self, run: Run, may_claim: bool) -> InlineClaim | None:
        """Submits a step to its model; returns the caller's claim, if any."""
        owner = self._owner
        try:
            child, model = owner.fitting(self.request, run, self._on_response, owner.clock())
        except ColdModelError as cold:
            self._wait(run, cold)
            return None
        except Exception as error:  # boundary: tensors of models, which may not fit their shapes
            self._step_failed(run, self._client_error(error), True)
            return None
        with self._lock:
            self._children[child] = run
        running = EnsembleClaim.current()
        try:
            claim = owner.admission.admit(child, may_claim or running is not None, model, parent=self.request)
        except Exception as error:  # boundary: the step's model
            with self._lock:
                self._children.pop(child, None)
            self._step_failed(run, self._client_error(error), True)
            return None
        if self._cancels:
            owner.admission.cancel(child)  # the others were cancelled before the model had this one
        if claim is not None and running is not None:
            running.add(claim)
            return None
        return claim
