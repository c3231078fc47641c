"""Searches a space of variants by successive halving and local moves; without a clock or a server of its own.

Phase 1 spends 40 % of the budget on short windows of random variants, phase 2 measures the best fifth of them
at full length, phase 3 measures neighbours of the best and repeats whatever becomes the best. A window of a
quarter of the length has twice the noise and still ranks well.

What is asked depends on the seed and the scores told so far, nothing else: a search continues when they are
told again, in their order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

Variant = tuple[Any, ...]
"""A value for each field, in the space's order."""

SHORT = 0.25
"""Length of a short window, by that of a full one."""

_FIRST_PHASE = 0.4
_KEPT = 0.2
_REPEATS = 3
_STARTS = 3
_DRAWN = 4
"""Variants drawn for each that is measured, as several may have the same effect."""


@dataclass(frozen=True, slots=True)
class Told:
    """A reported score.

    Attributes:
        window: 1 for a full window, `SHORT` for a short one.
        score: Higher is better; negative for a variant that cannot be measured.
    """

    variant: Variant
    window: float
    score: float


class Searcher:
    """Ask for a variant and a window, measure it, tell its score; until `ask` returns None."""

    def __init__(
        self,
        space: Mapping[str, Sequence[Any]],
        today: Variant,
        budget: float,
        seed: int = 0,
        effective: Callable[[Variant], Variant] = lambda variant: variant,
    ) -> None:
        """Makes a search.

        Args:
            space: Values by field, in order: a step goes to the next one.
            today: The variant that is measured first.
            budget: Number of full windows.
            seed: Seed of all random choices.
            effective: Gives the variant that stands for all those with the same effect; only it is asked for.

        Raises:
            ValueError: Today's variant is not in the space, or the budget is below one window.
        """
        self._values = tuple(tuple(values) for values in space.values())
        if len(today) != len(self._values) or any(
            value not in values for value, values in zip(today, self._values, strict=False)
        ):
            raise ValueError("today's variant is not in the space")
        if budget < 1:
            raise ValueError("the budget is below one full window")
        self._effective = effective
        self._today = today
        self._budget = budget
        self._seed = seed
        self._told: list[Told] = []
        self._short = self._choose_short()

    @property
    def told(self) -> Sequence[Told]:
        """Everything told, in order: the search's whole state."""
        return tuple(self._told)

    @property
    def spent(self) -> float:
        """Load so far, in full windows."""
        return sum(one.window for one in self._told)

    def ask(self) -> tuple[Variant, float] | None:
        """Next variant to measure, and its window; None when the budget is spent or all were tried."""
        tried = {one.variant for one in self._told}
        for variant in self._short:
            if variant not in tried:
                return (variant, SHORT)
        if self.spent + 1 > self._budget:
            return None
        full = self._full_scores()
        failed = {one.variant for one in self._told if one.score < 0}
        for variant in self._finalists():
            if variant not in full and variant not in failed:
                return (variant, 1.0)
        ranked = self.ranking()
        if not ranked:
            return None
        if len(full[ranked[0]]) < _REPEATS:
            return (ranked[0], 1.0)
        draw = random.Random(f"{self._seed}:{len(self._told)}")
        for start in ranked[:_STARTS]:
            left = [each for each in self._neighbours(start) if each not in full and each not in failed]
            if left:
                return (draw.choice(left), 1.0)
        return None

    def tell(self, variant: Variant, window: float, score: float) -> None:
        """Takes the score of what was asked for."""
        self._told.append(Told(variant, window, score))

    def ranking(self) -> list[Variant]:
        """Variants measured at full length that could be, the best mean score first."""
        means = {variant: fmean(scores) for variant, scores in self._full_scores().items()}
        return sorted((each for each in means if means[each] >= 0), key=lambda each: -means[each])

    def _choose_short(self) -> list[Variant]:
        size = 1
        for values in self._values:
            size *= len(values)
        count = max(1, min(size, int(_FIRST_PHASE * self._budget / SHORT)))
        draw = random.Random(self._seed)
        # In a dict, for its order.
        chosen = {self._today: None}
        for place in draw.sample(range(size), min(size, _DRAWN * count + 1)):
            if len(chosen) < count:
                chosen.setdefault(self._effective(self._variant(place)))
        return list(chosen)

    def _variant(self, place: int) -> Variant:
        found = []
        for values in self._values:
            place, index = divmod(place, len(values))
            found.append(values[index])
        return tuple(found)

    def _finalists(self) -> list[Variant]:
        short = [one for one in self._told if one.window == SHORT and one.score >= 0]
        kept = max(1, round(_KEPT * len(self._short)))
        best = [one.variant for one in sorted(short, key=lambda one: -one.score)[:kept]]
        return list(dict.fromkeys([self._today, *best]))

    def _full_scores(self) -> dict[Variant, list[float]]:
        found: dict[Variant, list[float]] = {}
        for one in self._told:
            if one.window == 1:
                found.setdefault(one.variant, []).append(one.score)
        return found

    def _neighbours(self, variant: Variant) -> Iterator[Variant]:
        for field, values in enumerate(self._values):
            index = values.index(variant[field])
            for step in (index - 1, index + 1):
                if 0 <= step < len(values):
                    yield self._effective((*variant[:field], values[step], *variant[field + 1 :]))
