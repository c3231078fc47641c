"""The flow of one request through an ensemble: a pure state machine without threads, clocks or locks.

Steps' responses go in; steps to run and answers for the client come out::

    start(inputs) ──> runs ──> respond(run, outputs, parameters, final) ──> runs, answers ──> ... drained

Tensors live in iterations: one for the request, and one for each response of a decoupled step.

    =====================================================  ===========================================
    event in an iteration                                  effect
    =====================================================  ===========================================
    a tensor is settled: its value, or absent if the       steps that waited only for it run, without
    client left it out or the model did not make it        absent inputs
    all outputs are settled                                an answer
    nothing runs in it or in iterations below it           it ends
    the request's iteration ends                           the flow is over
    =====================================================  ===========================================

Guarantees: a step runs once in each iteration of its scope; after the last answer, no step is run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from conch.core.ensembles.plan import EnsemblePlan, ModelStep, Selection
from conch.core.ensembles.step_places import Places, Waiter
from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.request import Parameter
from conch.core.tensor import Tensor


class Correlation(NamedTuple):
    """A sequence id with its start and end flags."""

    sequence_id: int | str = 0
    start: bool = False
    end: bool = False

    @classmethod
    def after(cls, base: Correlation, parameters: Mapping[str, Parameter] | None) -> Correlation:
        """Applies the parameters of a response.

        Raises:
            FlowError: One of them has the wrong type; the text is Triton's.
        """
        if not parameters:
            return base
        sequence_id = parameters.get("sequence_id", base.sequence_id)
        if isinstance(sequence_id, bool) or not isinstance(sequence_id, int | str):
            raise _wrong_type("sequence_id", "TRITONSERVER_PARAMETER_INT or TRITONSERVER_PARAMETER_STRING")
        start = parameters.get("sequence_start", base.start)
        end = parameters.get("sequence_end", base.end)
        for key, value in (("sequence_start", start), ("sequence_end", end)):
            if not isinstance(value, bool):
                raise _wrong_type(key, "TRITONSERVER_PARAMETER_BOOL")
        if isinstance(sequence_id, int):
            sequence_id %= 2**64  # the protocol carries an unsigned number in a signed field
        return cls(sequence_id, bool(start), bool(end))


class FlowError(InvalidArgumentError):
    """The responses of steps do not fit the ensemble."""


def _wrong_type(key: str, expected: str) -> FlowError:
    return FlowError(f"expected parameter '{key}' to be {expected}")


def _deadlock() -> FlowError:
    return FlowError(
        "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"
    )


class Run:
    """A step with all its inputs settled.

    Attributes:
        step: The step.
        inputs: Its inputs by the model's names, without absent ones.
        wanted: The needed outputs of the model, each with its tensor's name.
        correlation: Its sequence.
    """

    __slots__ = ("_iteration", "correlation", "inputs", "step", "wanted")

    def __init__(
        self,
        step: ModelStep,
        inputs: dict[str, Tensor],
        wanted: tuple[tuple[str, str], ...],
        correlation: Correlation,
        iteration: _Iteration,
    ) -> None:
        self.step = step
        self.inputs = inputs
        self.wanted = wanted
        self.correlation = correlation
        self._iteration = iteration


class EnsembleAnswer:
    """A response for the client.

    Attributes:
        outputs: The ensemble's outputs by name, without absent ones; None for a final flag alone.
        correlation: Their sequence.
        error: The error; there are no outputs then.
        final: True if it is the last answer.
    """

    __slots__ = ("correlation", "error", "final", "outputs")

    def __init__(
        self,
        outputs: dict[str, Tensor] | None,
        correlation: Correlation,
        error: ConchError | None = None,
        final: bool = False,
    ) -> None:
        self.outputs = outputs
        self.correlation = correlation
        self.error = error
        self.final = final


class _Iteration:
    """Tensors that belong together, and the work that is in flight with them.

    Attributes:
        maker: Number of the decoupled step that made it; -1 for the request's.
        above: The iteration in which that step ran.
        tensors: Tensors, None for absent ones, with their sequences, until their last use.
        uses: Remaining uses of each tensor.
        awaited: Missing tensors of steps that have some, by step number.
        unset: Number of outputs not settled.
        busy: Number of runs, iterations below, and responses waiting to open one.
    """

    __slots__ = ("above", "awaited", "busy", "maker", "tensors", "unset", "uses")

    def __init__(self, maker: int, above: _Iteration | None, unset: int) -> None:
        self.maker = maker
        self.above = above
        self.tensors: dict[str, tuple[Tensor | None, Correlation]] = {}
        self.uses: dict[str, int] = {}
        self.awaited: dict[int, int] = {}
        self.unset = unset
        self.busy = 1  # until its first tensors are settled


class _Waiting(NamedTuple):
    """A response of a decoupled step that waits until fewer are in flight."""

    run: Run
    outputs: dict[str, Tensor]
    correlation: Correlation


class Flow:
    """The state of one request.

    Args:
        plan: The ensemble.
        requested: Names of the outputs that the client wants; None for all.
        correlation: The request's sequence.
        places: Places of the responses of decoupled steps, shared by the ensemble's requests.
        waiter: The request in these.

    Attributes:
        over: True if the last answer is made; runs may still be in flight.
    """

    def __init__(
        self,
        plan: EnsemblePlan,
        requested: tuple[str, ...] | None,
        correlation: Correlation,
        places: Places,
        waiter: Waiter,
    ) -> None:
        self._plan = plan
        self._places = places
        self._waiter = waiter
        self._selection: Selection = plan.select(requested)
        self._correlation = correlation
        self._top = _Iteration(-1, None, len(self._selection.outputs))
        self._running: set[Run] = set()
        self._inflight: Counter[int] = Counter()
        self._waiting: dict[int, deque[_Waiting]] = {}
        self._ready: list[int] = []  # steps that have got a place for a waiting response
        self._runs: list[Run] = []
        self._answers: list[EnsembleAnswer] = []
        self.over = False

    @property
    def drained(self) -> bool:
        """True if the last answer is made and no run is in flight."""
        return self.over and not self._running

    @property
    def running(self) -> list[Run]:
        """Runs in flight."""
        return list(self._running)

    @property
    def in_flight(self) -> Mapping[int, int]:
        """Responses in flight of each decoupled step, by its number."""
        return self._inflight

    @property
    def held_count(self) -> int:
        """Number of the request's own tensors, and of responses that wait, which are held."""
        return len(self._top.tensors) + sum(map(len, self._waiting.values()))

    def take(self) -> tuple[list[Run], list[EnsembleAnswer]]:
        """Takes the steps to run and the answers to send since the last call."""
        taken = self._runs, self._answers
        self._runs, self._answers = [], []
        return taken

    def start(self, inputs: Mapping[str, Tensor]) -> None:
        """Starts with the inputs of the request."""
        for name in self._plan.inputs:
            self._settle(self._top, name, inputs.get(name), self._correlation)
        self._end_work_in(self._top)
        self._conclude()

    def respond(
        self,
        run: Run,
        outputs: Sequence[Tensor] | None,
        parameters: Mapping[str, Parameter] | None,
        final: bool,
    ) -> None:
        """Handles a response of a step.

        Args:
            run: The run of the step.
            outputs: Its outputs by the model's names; None for a final flag alone.
            parameters: The response's parameters.
            final: True if it is the run's last response.
        """
        if final:
            self._running.discard(run)
        if self.over:
            return
        if outputs is not None:
            try:
                correlation = Correlation.after(run.correlation, parameters)
            except FlowError as error:
                self.fail(error)
                return
            made = {tensor.name: tensor for tensor in outputs}
            if run.step.decoupled:
                self._take_answer(_Waiting(run, made, correlation))
            else:
                self._settle_all(run, run._iteration, made, correlation)
        if final:
            self._end_work_in(run._iteration)
        self._conclude()

    def drop(self, run: Run) -> None:
        """Drops a run that was taken but not submitted."""
        self._running.discard(run)

    def fail(self, error: ConchError) -> None:
        """Answers with an error unless the flow is over; no further step runs."""
        if self.over:
            return
        self._answers.append(EnsembleAnswer(None, self._correlation, error, True))
        self._end()

    def open_next(self, step: int) -> None:
        """Opens a waiting response of a step, which has got a place."""
        if self.over:
            self._places.free(step, self._waiter)
            return
        self._ready.append(step)
        self._conclude()

    def _take_answer(self, answer: _Waiting) -> None:
        """Opens an iteration for a response of a decoupled step, at once or when there is a place."""
        step = answer.run.step.number
        answer.run._iteration.busy += 1
        # In order: another may wait whose place is on its way.
        self._waiting.setdefault(step, deque()).append(answer)
        if self._places.take(step, self._waiter):
            self._open(self._waiting[step].popleft())

    def _open(self, answer: _Waiting) -> None:
        run = answer.run
        step = run.step.number
        self._inflight[step] += 1
        iteration = _Iteration(step, run._iteration, len(self._selection.outputs))
        self._settle_all(run, iteration, answer.outputs, answer.correlation)
        self._end_work_in(iteration)

    def _settle_all(
        self, run: Run, iteration: _Iteration, made: dict[str, Tensor], correlation: Correlation
    ) -> None:
        for output, name in run.wanted:
            self._settle(iteration, name, made.get(output), correlation)

    def _settle(
        self, iteration: _Iteration, name: str, tensor: Tensor | None, correlation: Correlation
    ) -> None:
        """Settles a tensor, and runs the steps that waited only for it."""
        selection = self._selection
        uses = selection.uses.get(name)
        if not uses:
            return
        iteration.tensors[name] = tensor, correlation
        iteration.uses[name] = uses
        consumers = selection.consumers.get(name, ())
        for step in consumers:
            awaited = iteration.awaited.get(step.number, selection.awaited[step.number]) - 1
            iteration.awaited[step.number] = awaited
            if not awaited:
                self._run(iteration, step)
        if uses > len(consumers):
            iteration.unset -= 1
            if not iteration.unset:
                self._answer(iteration)

    def _run(self, iteration: _Iteration, step: ModelStep) -> None:
        inputs: dict[str, Tensor] = {}
        correlation = self._correlation
        for name, source in step.inputs:
            tensor, own = iteration.tensors[source]
            if tensor is not None:
                inputs[name] = tensor
            if own != self._correlation:
                correlation = own
        for source in {source for _, source in step.inputs}:
            self._use(iteration, source)
        run = Run(step, inputs, self._selection.wanted[step.number], correlation, iteration)
        iteration.busy += 1
        self._running.add(run)
        self._runs.append(run)

    def _answer(self, iteration: _Iteration) -> None:
        outputs: dict[str, Tensor] = {}
        correlation = self._correlation
        for name in self._selection.outputs:
            tensor, own = iteration.tensors[name]
            if tensor is not None:
                outputs[name] = tensor
            if own != self._correlation:
                correlation = own
            self._use(iteration, name)
        self._answers.append(EnsembleAnswer(outputs, correlation))

    @staticmethod
    def _use(iteration: _Iteration, name: str) -> None:
        """Counts a use of a tensor, and drops it after the last one."""
        iteration.uses[name] -= 1
        if not iteration.uses[name]:
            del iteration.tensors[name], iteration.uses[name]

    def _end_work_in(self, iteration: _Iteration) -> None:
        """Ends some work in an iteration; ends the iteration, and those above, if it was the last."""
        current: _Iteration | None = iteration
        while current is not None:
            current.busy -= 1
            if current.busy:
                return
            if current.maker >= 0:
                self._inflight[current.maker] -= 1
                if self._places.free(current.maker, self._waiter):
                    self._ready.append(current.maker)
            current = current.above

    def _conclude(self) -> None:
        """Opens waiting responses, and makes the last answer if no work is left."""
        while self._ready:  # an iteration may end at once, and make room for another
            self._open(self._waiting[self._ready.pop(0)].popleft())
        if not self._plan.decoupled:
            if self._answers:
                self._answers[-1].final = True
                self._end()
            elif not self._top.busy:
                self.fail(_deadlock())
        elif not self._top.busy:
            if self._answers:
                self._answers[-1].final = True
            else:
                self._answers.append(EnsembleAnswer(None, self._correlation, None, True))
            self._end()

    def _end(self) -> None:
        self.over = True
        self._places.leave(self._waiter)
        for step in [*self._inflight.elements(), *self._ready]:
            self._places.free(step, self._waiter)
        self._inflight.clear()
        self._waiting.clear()
        # Runs in flight keep their iterations, whose tensors have no more use.
        self._top.tensors.clear()
        for run in self._running:
            iteration: _Iteration | None = run._iteration
            while iteration is not None:
                iteration.tensors.clear()
                iteration = iteration.above
