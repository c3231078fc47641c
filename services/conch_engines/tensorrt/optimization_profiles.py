"""Optimisation profiles: the shapes that an engine accepts, and the choice of the best for a batch. Pure."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conch.core.errors import InvalidArgumentError

log = logging.getLogger(__name__)

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DimsRange:
    """Range that a profile allows for the dims of an input, or for the values of a shape tensor.

    Attributes:
        least: Smallest allowed dims.
        optimum: The dims that the engine is tuned for.
        most: Largest allowed dims.
    """

    least: Dims
    optimum: Dims
    most: Dims

    def problem(self, dims: Dims, what: str = "shape of dimension") -> str:
        """Reason for which dims are not allowed, in Triton's words; empty if they are."""
        if len(dims) != len(self.most):
            return f"model expected {len(self.most)} dimensions but received {len(dims)}"
        for number, (low, high, got) in enumerate(zip(self.least, self.most, dims, strict=True)):
            if not low <= got <= high:
                return f"model expected the {what} {number} to be between {low} and {high} but received {got}"
        return ""

    def distance(self, dims: Dims) -> int:
        """Manhattan distance to the optimum."""
        return sum(abs(got - best) for got, best in zip(dims, self.optimum, strict=True))


@dataclass(frozen=True, slots=True)
class OptimizationProfile:
    """One profile of an engine.

    Attributes:
        index: Its number in the engine.
        shapes: Allowed dims by input.
        values: Allowed values by shape tensor.
    """

    index: int
    shapes: Mapping[str, DimsRange]
    values: Mapping[str, DimsRange]

    def problem(self, shapes: Mapping[str, Dims], values: Mapping[str, Dims]) -> tuple[str, str]:
        """The first input that does not fit, and why; empty if all do."""
        for name, dims in shapes.items():
            problem = self.shapes[name].problem(dims)
            if problem:
                return name, problem
        for name, given in values.items():
            if name in self.values:
                problem = self.values[name].problem(given, "value of element")
                if problem:
                    return name, problem
        return "", ""

    def distance(self, shapes: Mapping[str, Dims], values: Mapping[str, Dims]) -> int:
        """Manhattan distance of shapes and values to the optimum; for those that fit."""
        return sum(self.shapes[name].distance(dims) for name, dims in shapes.items()) + sum(
            self.values[name].distance(given) for name, given in values.items() if name in self.values
        )


def choose(
    profiles: Sequence[OptimizationProfile],
    shapes: Mapping[str, Dims],
    values: Mapping[str, Dims],
    instance: str,
) -> OptimizationProfile:
    """The profile whose optimum is nearest among those that allow a batch; the first of equally near ones."""
    fitting = [profile for profile in profiles if not profile.problem(shapes, values)[0]]
    if fitting:
        return min(fitting, key=lambda profile: profile.distance(shapes, values))
    if len(profiles) > 1:
        listed = "".join(f" {profile.index}[{profile.index}]" for profile in profiles)
        log.warning(
            "failed to find any Optimization Profile among [%s] to support the requested dimensions (or "
            "shape values), proceeding with first profile.",
            listed,
        )
    name, problem = profiles[0].problem(shapes, values)
    raise InvalidArgumentError(
        f"request specifies invalid shape for input '{name}' for {instance}. Error details: {problem}"
    )
