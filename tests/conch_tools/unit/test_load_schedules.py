"""Times of an open loop."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch_tools.perf.load import schedules


@given(st.floats(0.5, 1e5), st.integers(1, 7))
def test_processes_share_a_constant_rate(rate: float, shares: int) -> None:
    whole = list(islice(schedules.constant(rate), 70))
    parts = [islice(schedules.constant(rate, share, shares), 70 // shares + 1) for share in range(shares)]
    assert sorted(time for part in parts for time in part)[: len(whole) - shares] == whole[:-shares]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(sum), st.integers(1, 5))
def test_processes_share_a_trace_that_repeats(gaps: list[float], shares: int) -> None:
    whole = list(islice(schedules.traced(gaps), 60))
    parts = [islice(schedules.traced(gaps, share, shares), 60 // shares) for share in range(shares)]
    assert sorted(time for part in parts for time in part) == whole
    steps = [later - earlier for earlier, later in pairwise([0.0, *whole])]
    assert steps == pytest.approx(
        [1e3 * gaps[number % len(gaps)] for number in range(60)], abs=1e-3 * sum(gaps)
    )


@given(st.integers(0, 2**32))
def test_poisson_gaps_have_their_mean_and_depend_on_the_seed(seed: int) -> None:
    times = list(islice(schedules.poisson(1000, seed), 4000))
    assert times == list(islice(schedules.poisson(1000, seed), 4000))
    assert times[:10] != list(islice(schedules.poisson(1000, seed + 1), 10))
    assert times == sorted(times)
    # The standard error of the mean is 1.6 %; this is eight of them.
    assert times[-1] / 4000 == pytest.approx(1e6, rel=0.13)


@pytest.mark.parametrize(("text", "problem"), [("1\nx\n", "line 2"), ("-1", "line 1"), ("0\n0", "above 0")])
def test_refuses_traces_that_are_none(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        schedules.read_gaps(text)
