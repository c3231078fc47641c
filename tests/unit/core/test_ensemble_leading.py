"""What a thread that leads an ensemble's first step owes to the steps that follow: nothing is forgotten."""

from __future__ import annotations

import pytest

from conch.core.ensembles.leading import Lead


class Time:
    """A clock that stands still unless it is told to go on."""

    now = 0

    def __call__(self) -> int:
        return self.now


class Promised:
    """A model that somebody has promised to lead or to hand over, and that notes which came first."""

    def __init__(self, clock: Time, takes_ns: int = 0, follows: Promised | None = None) -> None:
        self.fast = True
        self.seen_to: list[str] = []
        self._clock = clock
        self._takes_ns = takes_ns
        self._follows = follows

    def lead(self, budget_ns: int | None = None) -> bool:
        self.seen_to.append("led")
        self._clock.now += self._takes_ns
        lead = Lead.current()
        if self._follows is not None and lead is not None:
            lead.add(self._follows)
        return budget_ns is not None and self._takes_ns >= budget_ns

    def lead_one(self) -> bool:
        return self.lead(0)

    def hand_over(self) -> None:
        self.seen_to.append("handed over")


@pytest.mark.parametrize("again", ["without a budget", "with one", "by others"])
def test_what_a_used_up_budget_leaves_is_seen_to(again: str) -> None:
    """A model that has become slow is led without a budget; the steps after it must not wait for ever."""
    clock = Time()
    second = Promised(clock)
    first = Promised(clock, 10, second)
    lead = Lead(first, clock)
    assert lead.lead(5), "there is more to lead"
    assert (first.seen_to, second.seen_to) == (["led"], [])
    if again == "without a budget":
        assert not lead.lead()
    elif again == "with one":
        assert lead.lead(5)
    else:
        lead.hand_over()
    assert len(first.seen_to) == 2 or again == "with one"
    assert second.seen_to


def test_all_has_been_handed_over() -> None:
    clock = Time()
    first = Promised(clock)
    lead = Lead(first, clock)
    lead.hand_over()
    assert not lead.lead()
    assert not lead.lead(5)
    assert first.seen_to == ["handed over"]
