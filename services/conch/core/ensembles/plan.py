"""Plan of the tensors of an ensemble: computed at load, and once for each set of requested outputs.

Each response of a decoupled step continues separately, so tensors live in *scopes*: scope 0 is the request's,
and every decoupled step opens one for its outputs. The inputs of a step, and the outputs of the ensemble, are
all of one scope (Triton refuses anything else at load). So it is always clear which tensors belong together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from conch.core.errors import InvalidArgumentError
from conch.core.recognition import Table

_MOST_SELECTIONS = 256


@dataclass(frozen=True, slots=True, eq=False)
class ModelStep:
    """One model of an ensemble.

    Attributes:
        number: Its index in the config.
        model_name: The model's name.
        version: Its version as clients write it; empty for the newest that is ready.
        inputs: Inputs of the model, each with its tensor of the ensemble.
        outputs: Outputs of the model, each with its tensor of the ensemble.
        decoupled: True if the model is decoupled.
    """

    number: int
    model_name: str
    version: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    decoupled: bool


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The steps and tensors needed for a set of outputs.

    Attributes:
        outputs: The outputs, in the order of the response.
        consumers: Steps that use a tensor, by tensor; each step once.
        uses: Number of uses of each needed tensor, by steps and by the client.
        awaited: Number of tensors that a step waits for, by its number.
        wanted: Needed outputs of a step, each with its tensor, by step number.
    """

    outputs: tuple[str, ...]
    consumers: Mapping[str, tuple[ModelStep, ...]]
    uses: Mapping[str, int]
    awaited: Mapping[int, int]
    wanted: Mapping[int, tuple[tuple[str, str], ...]]


class EnsemblePlan:
    """The steps of an ensemble and the tensors between them.

    Args:
        name: Name of the ensemble.
        inputs: Names of its inputs.
        outputs: Names of its outputs.
        steps: Its steps, numbered in their order; every tensor is an input or comes out of one step.
        max_inflight: Limit of responses in flight of a decoupled step, of all requests; 0 for none.

    Attributes:
        decoupled: True if the ensemble is decoupled.

    Raises:
        InvalidArgumentError: A step mixes tensors of different scopes; the text is Triton's.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        steps: Sequence[ModelStep],
        max_inflight: int = 0,
    ) -> None:
        self.name = name
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.max_inflight = max_inflight
        self.steps = tuple(steps)
        self._maker = {tensor: step for step in self.steps for _, tensor in step.outputs}
        self.decoupled = any(step.decoupled for step in self.steps)
        self._check_scopes()
        self._selections: Table[tuple[str, ...] | None, Selection] = Table(_MOST_SELECTIONS)

    def maker(self, tensor: str) -> tuple[ModelStep, str] | None:
        """The step and output that make a tensor; None for an input of the ensemble."""
        step = self._maker.get(tensor)
        if step is None:
            return None
        return step, next(output for output, made in step.outputs if made == tensor)

    def select(self, requested: tuple[str, ...] | None) -> Selection:
        """The selection for the requested outputs; None for all."""
        selection = self._selections.get(requested)
        if selection is None:
            names = self.outputs if requested is None else tuple(dict.fromkeys(requested))
            selection = self._selections.keep(requested, self._select(names))
        return selection

    def _select(self, outputs: tuple[str, ...]) -> Selection:
        needed = {*outputs}
        steps: set[ModelStep] = set()
        unseen = list(outputs)
        while unseen:
            step = self._maker.get(unseen.pop())
            if step is None or step in steps:
                continue
            steps.add(step)
            inputs = {tensor for _, tensor in step.inputs}
            unseen += inputs - needed
            needed |= inputs
        consumers: dict[str, tuple[ModelStep, ...]] = {}
        for step in self.steps:
            if step in steps:
                for tensor in dict.fromkeys(tensor for _, tensor in step.inputs):
                    consumers[tensor] = (*consumers.get(tensor, ()), step)
        return Selection(
            outputs=outputs,
            consumers=consumers,
            uses={name: len(consumers.get(name, ())) + (name in outputs) for name in needed},
            awaited={step.number: len({tensor for _, tensor in step.inputs}) for step in steps},
            wanted={step.number: tuple(pair for pair in step.outputs if pair[1] in needed) for step in steps},
        )

    def _check_scopes(self) -> None:
        scopes: dict[str, int] = dict.fromkeys(self.inputs, 0)
        for step in in_order(self.steps, self.inputs):
            scope = self._common((scopes[tensor] for _, tensor in step.inputs), self._named_after(step))
            scopes |= dict.fromkeys(
                (tensor for _, tensor in step.outputs), step.number + 1 if step.decoupled else scope
            )
        self._common((scopes[tensor] for tensor in self.outputs), self.name)

    def _common(self, scopes: Iterable[int], model: str) -> int:
        found = set(scopes)
        if len(found) > 1:
            raise InvalidArgumentError(
                f"in ensemble {self.name}, step of model '{model}' receives inputs originated from "
                f"different decoupled models"
            )
        return found.pop() if found else 0

    def _named_after(self, step: ModelStep) -> str:
        """The model by which Triton names a step: the first that describes the step's output."""
        tensor = next((tensor for _, tensor in step.outputs), "")
        if tensor in (*self.inputs, *self.outputs):
            return self.name
        described = (
            each.model_name
            for each in self.steps
            if any(name == tensor for _, name in (*each.inputs, *each.outputs))
        )
        return next(described, step.model_name)


def in_order(steps: Iterable[ModelStep], inputs: Iterable[str]) -> list[ModelStep]:
    """Sorts steps after those that make their inputs, without steps that lack an input for ever."""
    known = {*inputs}
    ordered: list[ModelStep] = []
    waiting = list(steps)
    while True:
        ready = [step for step in waiting if known.issuperset(tensor for _, tensor in step.inputs)]
        if not ready:
            return ordered
        ordered += ready
        known.update(tensor for step in ready for _, tensor in step.outputs)
        waiting = [step for step in waiting if step not in ready]
