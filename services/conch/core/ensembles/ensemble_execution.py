"""One request of an ensemble: gives its steps to their models, and what they answer to its flow.

Models answer from any thread, possibly while the call that submits to them has not returned. So the flow is
told under a lock, and what it wants done goes to an outbox that one thread at a time empties without the
lock: no lock is held in another model or in a responder, and a model that answers at once adds to the outbox
of the thread that submitted to it, rather than to its stack.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from conch.core.admission import Admission
from conch.core.clock import Clock
from conch.core.ensembles.ensemble_claim import EnsembleClaim
from conch.core.ensembles.fitting import Fitting
from conch.core.ensembles.flow import Answer, Correlation, Flow, FlowError, Run
from conch.core.ensembles.plan import Plan
from conch.core.errors import (
    ERRORS_BY_CODE,
    CancelledError,
    ConchError,
    DeadlineExceededError,
    as_conch_error,
    without_traceback,
)
from conch.core.model_statistics import ModelStatistics
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.servable import InlineClaim


class Owner(Protocol):
    """The ensemble that executions belong to."""

    admission: Admission
    clock: Clock
    plan: Plan
    fitting: Fitting
    statistics: ModelStatistics

    def answer(self, request: InferenceRequest, answer: Answer) -> None:
        """Answers a request."""

    def ended(self, execution: EnsembleExecution) -> None:
        """Takes notice that an execution has been answered and nothing of it runs any more."""


class EnsembleExecution:
    """A request on its way through an ensemble.

    Args:
        owner: The ensemble.
        request: The request, valid for it.
    """

    def __init__(self, owner: Owner, request: InferenceRequest) -> None:
        self.request = request
        self._owner = owner
        self._flow = Flow(
            owner.plan,
            request.requested,
            Correlation(request.correlation_id, request.sequence_start, request.sequence_end),
        )
        self._lock = threading.Lock()  # guards all below, and the flow
        self._children: dict[InferenceRequest, Run] = {}
        self._outbox: deque[Run | Answer] = deque()
        self._working = False
        self._cancels = False
        self._ended = False

    def start(self, may_claim: bool) -> InlineClaim | None:
        """Runs the first steps.

        Args:
            may_claim: Whether the caller is willing to run batches soon.

        Returns:
            What the caller has to lead or hand over soon, only if it may lead.
        """
        return self._tell(lambda flow: flow.start(self.request.inputs), may_claim)

    def cancel(self) -> None:
        """Answers that it was cancelled, unless it has been answered, and cancels what runs of it."""
        self.fail(CancelledError(""))

    def fail(self, error: ConchError) -> bool:
        """Answers with an error that is no step's, and cancels what runs; False if it has been answered."""
        children: list[InferenceRequest] = []
        first = False

        def tell(flow: Flow) -> None:
            nonlocal first
            if not flow.over:
                first = self._cancels = True
                children.extend(self._children)
                flow.fail(error)

        self._tell(tell)
        for child in children:
            self._owner.admission.cancel(child)
        return first

    def _on_response(self, child: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Takes an answer of a step; the responder of the requests that this makes."""
        with self._lock:
            run = self._children.pop(child, None) if final else self._children.get(child)
        if run is None:
            return  # a model that answers on several threads was overtaken by its own last answer
        if response is not None and response.error is not None:
            self._step_failed(run, response.error, final)
            return
        outputs = None if response is None else response.outputs
        parameters = None if response is None else response.parameters
        self._tell(lambda flow: flow.respond(run, outputs, parameters, final))

    def _step_failed(self, run: Run, error: ConchError, ended: bool) -> None:
        shown = self._of_step(error)
        children: list[InferenceRequest] = []

        def tell(flow: Flow) -> None:
            if ended:
                flow.drop(run)
            # A sequence's other requests may be waiting in the same queues, and would be cancelled too.
            if not flow.over and not self.request.correlation_id:
                self._cancels = True
                children.extend(self._children)
            flow.fail(shown)

        self._tell(tell)
        for child in children:
            self._owner.admission.cancel(child)

    def _of_step(self, error: ConchError) -> ConchError:
        """A step's error as the client gets it."""
        if isinstance(error, DeadlineExceededError):
            return error  # its text is the client's own, and may reach it first
        prefix = f"in ensemble '{self._owner.plan.name}', "
        if isinstance(error, FlowError):
            prefix += self.request.log_prefix
        shown = ERRORS_BY_CODE[error.code](prefix + error.message)
        shown.retry_after_ms = error.retry_after_ms
        return shown

    def _tell(self, event: Callable[[Flow], None], may_claim: bool = False) -> InlineClaim | None:
        """Tells the flow of an event, and does what it wants done unless another thread is at it."""
        with self._lock:
            event(self._flow)
            runs, answers = self._flow.take()
            self._outbox.extend(answers)
            self._outbox.extend(runs)
            if self._working:
                return None
            self._working = True
        return self._work(may_claim)

    def _work(self, may_claim: bool) -> InlineClaim | None:
        """Empties the outbox."""
        claim: InlineClaim | None = None
        while True:
            with self._lock:
                if not self._outbox:
                    self._working = False
                    # Whatever comes after this has nothing left to do but to find the flow over.
                    ended = self._flow.drained and not self._ended
                    self._ended |= ended
                    break
                item = self._outbox.popleft()
                if type(item) is Run and self._flow.over:
                    self._flow.drop(item)
                    continue
            if type(item) is Answer:
                if isinstance(item.error, FlowError):
                    item.error = self._of_step(item.error)
                self._owner.answer(self.request, item)
            elif type(item) is Run:
                model = self._submit(item, may_claim and claim is None)
                claim = claim or model
        if ended:
            self._owner.ended(self)
        return None if claim is None else EnsembleClaim(claim, self._owner.clock)

    def _submit(self, run: Run, may_claim: bool) -> InlineClaim | None:
        """Gives a step to its model; returns what is left for the caller to lead."""
        owner = self._owner
        try:
            child, model = owner.fitting(self.request, run, self._on_response, owner.clock())
        except Exception as error:
            self._step_failed(run, without_traceback(as_conch_error(error)), True)
            return None
        with self._lock:
            self._children[child] = run
        lead = EnsembleClaim.current()
        try:
            parent = self.request if owner.statistics.watched else None
            claim = owner.admission.admit(child, may_claim or lead is not None, model, parent=parent)
        except Exception as error:
            with self._lock:
                self._children.pop(child, None)
            self._step_failed(run, without_traceback(as_conch_error(error)), True)
            return None
        if self._cancels:
            owner.admission.cancel(child)  # the others were when the model did not have this one yet
        if claim is not None and lead is not None:
            lead.add(claim)
            return None
        return claim
