"""Duties of a thread that runs an ensemble's first step inline to the later steps: nothing is forgotten."""

from __future__ import annotations

import pytest
from tests.support.clocks import Clock

from conch.core.ensembles.ensemble_claim import EnsembleClaim


class Promised:
    """A claimed model, to be run inline or released, that notes which came first."""

    def __init__(self, clock: Clock, takes_ns: int = 0, follows: Promised | None = None) -> None:
        self.fast = True
        self.seen_to: list[str] = []
        self._clock = clock
        self._takes_ns = takes_ns
        self._follows = follows

    def run_inline(self, budget_ns: int | None = None) -> bool:
        self.seen_to.append("led")
        self._clock.now += self._takes_ns
        lead = EnsembleClaim.current()
        if self._follows is not None and lead is not None:
            lead.add(self._follows)
        return budget_ns is not None and self._takes_ns >= budget_ns

    def run_batch_inline(self) -> bool:
        return self.run_inline(0)

    def release(self) -> None:
        self.seen_to.append("handed over")


@pytest.mark.parametrize("again", ["without a budget", "with one", "by others"])
def test_what_a_used_up_budget_leaves_is_seen_to(again: str) -> None:
    """A model that has become slow is led without a budget; the steps after it must not wait for ever."""
    clock = Clock()
    second = Promised(clock)
    first = Promised(clock, 10, second)
    lead = EnsembleClaim(first, clock)
    assert lead.run_inline(5), "there is more to lead"
    assert (first.seen_to, second.seen_to) == (["led"], [])
    if again == "without a budget":
        assert not lead.run_inline()
    elif again == "with one":
        assert lead.run_inline(5)
    else:
        lead.release()
    assert len(first.seen_to) == 2 or again == "with one"
    assert second.seen_to


def test_all_has_been_handed_over() -> None:
    clock = Clock()
    first = Promised(clock)
    lead = EnsembleClaim(first, clock)
    lead.release()
    assert not lead.run_inline()
    assert not lead.run_inline(5)
    assert first.seen_to == ["handed over"]
