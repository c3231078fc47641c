"""Walks the graph of steps breadth first, from the source's kind. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from conch_tools.optimize.model_kinds import Kind
from conch_tools.optimize.step_table import Step


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step, and the chain of steps that made what it converts; an empty one is the source."""

    step: Step
    before: tuple[str, ...] = ()

    @property
    def chain(self) -> tuple[str, ...]:
        """The names of all steps."""
        return (*self.before, self.step.name)


class StepPlan:
    """Gives one step after another, and follows the first result of each kind that is good.

    Args:
        steps: The table.
        kinds: All kinds by name.
        source: The kind of the source.
        targets: Targets of kinds that are wanted; empty for all. Steps on the way to these run too.
    """

    def __init__(
        self, steps: Sequence[Step], kinds: Mapping[str, Kind], source: str, targets: Collection[str] = ()
    ) -> None:
        wanted = {name for name, kind in kinds.items() if not targets or kind.target in targets}
        useful = set(wanted)
        while more := {
            kind for step in steps if step.result in useful for kind in step.sources if kind not in useful
        }:
            useful |= more
        # What keeps the source as it is leads nowhere.
        self._steps = [
            step for step in steps if step.result in (wanted if step.result in step.sources else useful)
        ]
        self._followed = {source}
        self._waiting: deque[PlannedStep] = deque()
        self._follow(source, ())

    def next_step(self) -> PlannedStep | None:
        """The next step; None at the end."""
        return self._waiting.popleft() if self._waiting else None

    def passed(self, planned: PlannedStep) -> None:
        """Plans the steps that convert the result of a step."""
        kind = planned.step.result
        if kind not in self._followed:
            self._followed.add(kind)
            self._follow(kind, planned.chain)

    def _follow(self, kind: str, chain: tuple[str, ...]) -> None:
        for step in self._steps:
            if kind in step.sources and not (chain and step.first):
                self._waiting.append(PlannedStep(step, chain))
