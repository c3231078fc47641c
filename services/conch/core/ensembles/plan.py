"""How tensors go through an ensemble: worked out once when it is loaded, and once for each set of outputs.

A decoupled step answers a request any number of times, and each answer goes on by itself. So tensors live in
*scopes*: scope 0 is the request's own, and every decoupled step opens one of its own for what it makes. The
inputs of a step are all of one scope, and so are the outputs of the ensemble (Triton refuses everything
else at load), so that it is always clear which tensors belong together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from conch.core.errors import InvalidArgumentError

_MOST_SELECTIONS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One model of an ensemble.

    Attributes:
        number: Its place in the config.
        model_name: The model's name.
        version: Its version as clients write it; empty for the newest that is ready.
        inputs: Inputs of the model, each with the tensor of the ensemble that it gets.
        outputs: Outputs of the model, each with the tensor of the ensemble that it becomes.
        decoupled: Whether the model may answer any number of times.
    """

    number: int
    model_name: str
    version: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    decoupled: bool


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """What is needed for the outputs that a request asks for.

    Attributes:
        outputs: The outputs, in the order in which they are answered.
        consumers: Steps that get a tensor, by tensor; a step that gets it twice is named once.
        uses: How often a tensor is handed on: to steps, and to the client. Others are not needed.
        awaited: Number of tensors that a step waits for, by its number.
        wanted: Outputs of a step that are needed, each with its tensor, by the step's number.
    """

    outputs: tuple[str, ...]
    consumers: Mapping[str, tuple[Step, ...]]
    uses: Mapping[str, int]
    awaited: Mapping[int, int]
    wanted: Mapping[int, tuple[tuple[str, str], ...]]


class Plan:
    """The steps of an ensemble and the tensors between them.

    Args:
        name: Name of the ensemble.
        inputs: Names of its inputs.
        outputs: Names of its outputs.
        steps: Its steps, numbered in their order; every tensor is an input or comes out of one step.
        max_inflight: Most answers of a decoupled step that are under way at a time; 0 for any number.

    Attributes:
        name: Name of the ensemble.
        inputs: Names of its inputs.
        outputs: Names of its outputs.
        steps: Its steps, in the config's order.
        max_inflight: Most answers of a decoupled step that are under way at a time; 0 for any number.
        decoupled: Whether it may answer any number of times.

    Raises:
        InvalidArgumentError: Tensors of different scopes come together; the text is Triton's.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        steps: Sequence[Step],
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
        self._selections: dict[tuple[str, ...] | None, Selection] = {}

    def maker(self, tensor: str) -> tuple[Step, str] | None:
        """The step that makes a tensor, and its output that it is; None for an input of the ensemble."""
        step = self._maker.get(tensor)
        if step is None:
            return None
        return step, next(output for output, made in step.outputs if made == tensor)

    def select(self, requested: tuple[str, ...] | None) -> Selection:
        """What is needed for the outputs that a request asks for; None for all of them."""
        selection = self._selections.get(requested)
        if selection is None:
            if len(self._selections) >= _MOST_SELECTIONS:
                self._selections.clear()  # clients choose the order of names freely
            selection = self._selections[requested] = self._select(
                self.outputs if requested is None else tuple(dict.fromkeys(requested))
            )
        return selection

    def _select(self, outputs: tuple[str, ...]) -> Selection:
        needed = {*outputs}
        steps: set[Step] = set()
        unseen = list(outputs)
        while unseen:
            step = self._maker.get(unseen.pop())
            if step is None or step in steps:
                continue
            steps.add(step)
            inputs = {tensor for _, tensor in step.inputs}
            unseen += inputs - needed
            needed |= inputs
        consumers: dict[str, tuple[Step, ...]] = {}
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
            scope = self._common(scopes[tensor] for _, tensor in step.inputs)
            scopes |= dict.fromkeys(
                (tensor for _, tensor in step.outputs), step.number + 1 if step.decoupled else scope
            )
        self._common(scopes[tensor] for tensor in self.outputs)

    def _common(self, scopes: Iterable[int]) -> int:
        found = set(scopes)
        if len(found) > 1:
            raise InvalidArgumentError(
                f"in ensemble {self.name}, step of model '{self.name}' receives inputs originated from "
                f"different decoupled models"
            )
        return found.pop() if found else 0


def in_order(steps: Iterable[Step], inputs: Iterable[str]) -> list[Step]:
    """Steps in an order in which each comes after those that make its inputs.

    Those that never get all their inputs are left out.
    """
    known = {*inputs}
    ordered: list[Step] = []
    waiting = list(steps)
    while True:
        ready = [step for step in waiting if known.issuperset(tensor for _, tensor in step.inputs)]
        if not ready:
            return ordered
        ordered += ready
        known.update(tensor for step in ready for _, tensor in step.outputs)
        waiting = [step for step in waiting if step not in ready]
