"""Verdicts of guards: exact tails, sentences, and simulated rollouts of known versions."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from conch.core.latencies import PLACES, Latencies
from conch_control.managed_rollouts import Counts
from conch_rollout.guards import (
    IMPROBABLE,
    SURE,
    Result,
    Window,
    evidence,
    judge,
    judge_early,
    tail,
    traffic_note,
)
from conch_rollout.rollout_file import Guard

MINUTE = 60_000_000_000
ERRORS = Guard(errors=0.01)

# The simulated traffic: 200 requests/s, 5 % of them to the candidate, a look every 10 s for half an hour.
LOOKS = 180
LOOK_S = 10
STABLE = 1900
CANDIDATE = 100
BASE = 0.002

Ints = NDArray[np.int64]


def buckets(ms: Ints | NDArray[np.float64]) -> tuple[int, ...]:
    """The histogram of times, as the server keeps it."""
    places = np.frexp(np.asarray(ms) * 1e6)[1]
    return tuple(int(count) for count in np.bincount(places.ravel(), minlength=PLACES))


def window(stable: tuple[int, int], candidate: tuple[int, int]) -> Window:
    """Requests and failures of both sides."""
    return Window(Counts(*stable), Counts(*candidate))


def exact_tail(count: int, trials: int, share: float) -> float:
    terms = (math.comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in range(count, trials + 1))
    return math.fsum(terms)


@given(st.integers(0, 300), st.integers(1, 300), st.floats(0.001, 0.999))
def test_tails_are_those_of_the_binomial_distribution(count: int, trials: int, share: float) -> None:
    count = min(count, trials)
    assert tail(count, trials, share) == pytest.approx(exact_tail(count, trials, share), rel=1e-9, abs=1e-13)


def test_tails_of_many_requests_are_those_of_the_normal_distribution() -> None:
    trials, share = 10_000_000, 0.01
    sd = math.sqrt(trials * share * (1 - share))
    for z in (-3, 0.5, 3):
        normal = 0.5 * math.erfc(z / math.sqrt(2))
        assert tail(round(trials * share + z * sd), trials, share) == pytest.approx(normal, rel=0.02)
    assert (tail(0, 10, 0.5), tail(11, 10, 0.5), tail(3, 10, 0.0), tail(3, 10, 1.0)) == (1, 0, 0, 1)


def aborted_after(seed: int, runs: int, share: float, bursts: bool = False) -> list[float]:
    """Seconds to the abort of simulated rollouts, infinite for none; the candidate fails a share."""
    rng = np.random.default_rng(seed)
    factor = np.where(rng.random((runs, LOOKS)) < 0.03, 9.0, 1.0) if bursts else np.ones((runs, LOOKS))
    stable = rng.binomial(STABLE, np.minimum(BASE * factor, 1))
    candidate = rng.binomial(CANDIDATE, np.minimum(share * factor, 1))
    sums = [
        np.concatenate([np.zeros((runs, 1), int), side.cumsum(axis=1)], axis=1)
        for side in (stable, candidate)
    ]
    return [_abort(*(side[run].tolist() for side in sums)) for run in range(runs)]


def _abort(stable: list[int], candidate: list[int]) -> float:
    failing = 0
    for look in range(1, LOOKS + 1):
        begun = max(look - 6, 0)
        step, recent = (
            window(
                (STABLE * (look - start), stable[look] - stable[start]),
                (CANDIDATE * (look - start), candidate[look] - candidate[start]),
            )
            for start in (0, begun)
        )
        verdict = judge(ERRORS, step, recent)
        failing = failing + 1 if verdict.result is Result.FAIL else 0
        if failing == 2 or verdict.p < SURE:
            return look * LOOK_S
    return math.inf


@pytest.mark.parametrize("worse", [0.0, 0.005])
def test_candidates_within_the_limit_are_not_aborted(worse: float) -> None:
    """However often the guard looks; a test against no difference aborts most of those with 0.5 % more."""
    assert aborted_after(1, 100, BASE + worse).count(math.inf) == 100


@pytest.mark.parametrize(("worse", "median_s", "late_s"), [(0.03, 50, 120), (0.1, 20, 30)])
def test_bad_candidates_are_aborted_soon(worse: float, median_s: int, late_s: int) -> None:
    times = aborted_after(2, 300, BASE + worse)
    assert np.median(times) <= median_s
    assert np.quantile(times, 0.95) <= late_s
    assert max(times) < math.inf


def test_bursts_of_errors_on_both_sides_are_no_reason() -> None:
    assert aborted_after(3, 100, BASE, bursts=True).count(math.inf) >= 99


def looks(seed: int, weight: float, shares: tuple[float, float], most: int) -> Iterator[Window]:
    """The counters after each request of both sides, until the candidate has got `most`, about.

    Args:
        seed: Seed of the run.
        weight: The candidate's share of the requests.
        shares: Failures of stable and candidate.
        most: Requests of the candidate.
    """
    rng = np.random.default_rng(seed)
    sides = rng.random(round(most / weight)) < weight
    bad = rng.random(sides.size) < np.where(sides, shares[1], shares[0])
    counts = [Counts(), Counts()]
    for side, fails in zip(sides.tolist(), bad.tolist(), strict=True):
        counts[side] = Counts(counts[side].requests + 1, counts[side].failures + fails)
        yield Window(counts[0], counts[1])


@pytest.mark.parametrize(
    ("share", "weight", "median", "most"),
    [(1.0, 0.01, 6, 8), (1.0, 0.05, 8, 10), (1.0, 0.5, 16, 25), (0.5, 0.05, 16, 30), (0.2, 0.05, 70, 140)],
)
def test_very_bad_candidates_end_within_tens_of_requests(
    share: float, weight: float, median: int, most: int
) -> None:
    found = []
    for seed in range(30):
        for window in looks(seed, weight, (BASE, share), 300):
            verdict = judge_early(ERRORS, window)
            if verdict is not None:
                break
        assert verdict is not None
        assert (verdict.result, verdict.p < SURE) == (Result.FAIL, True), "it aborts alone"
        found.append(window.candidate.requests)
    assert np.median(found) <= median
    assert max(found) <= most


@pytest.mark.parametrize(
    ("base", "worse", "limit", "weight"),
    [(0.002, 0.0, 0.01, 0.2), (0.002, 0.01, 0.01, 0.5), (0.05, 0.0, 0.0, 0.5), (0.5, 0.0, 0.0, 0.5)],
)
def test_looks_after_each_request_find_as_few_candidates_within_the_limit_bad_as_promised(
    base: float, worse: float, limit: float, weight: float
) -> None:
    least = []
    for seed in range(300):
        found = 0.0
        for each in looks(seed, weight, (base, base + worse), 100):
            beside = each.stable.failures, each.stable.requests
            found = max(found, evidence(each.candidate.failures, each.candidate.requests, limit, beside))
        least.append(math.exp(-found))
    for level in (0.2, 0.05, 0.01, SURE):
        assert np.mean(np.array(least) < level) <= level


@given(st.integers(1, 60), st.integers(0, 60), st.floats(0.0, 0.9), st.integers(0, 60), st.integers(0, 60))
def test_no_shares_within_the_limit_are_likelier_than_those_that_evidence_compares_with(
    total: int, bad: int, limit: float, stable_total: int, stable_bad: int
) -> None:
    bad, stable_bad = min(bad, total), min(stable_bad, stable_total)

    def likelihood(bad: int, total: int, share: NDArray[np.float64]) -> NDArray[np.float64]:
        return share**bad * (1 - share) ** (total - bad)

    grid = np.linspace(0, 1, 20_001)
    grid = (grid[1:] + grid[:-1]) / 2
    mixed = 1.0
    for each, every in ((bad, total), (stable_bad, stable_total)):
        mixed *= math.gamma(each + 0.5) * math.gamma(every - each + 0.5) / math.gamma(every + 1) / math.pi
    stable = grid * (1 - limit)
    within = likelihood(stable_bad, stable_total, stable) * likelihood(bad, total, stable + limit)
    found = evidence(bad, total, limit, (stable_bad, stable_total))
    if found:
        assert found == pytest.approx(math.log(mixed / within.max()), rel=1e-3, abs=1e-3)
    elif bad > total * limit + total * (stable_bad / stable_total if stable_total else 1.0):
        assert mixed <= within.max() * 1.001


def test_slower_candidates_fail_and_equal_ones_do_not() -> None:
    rng = np.random.default_rng(4)
    guard = Guard(slower=0.05)
    factors = ((1.0, Result.PASS), (1.1, Result.PASS), (2.0, Result.FAIL), (4.0, Result.FAIL))
    for factor, result in factors:
        for _ in range(60):
            middle = rng.uniform(2.0, 2.0 + math.log(2))  # anywhere between the edges of buckets
            stable = buckets(rng.lognormal(middle, 0.5, 20_000))
            candidate = buckets(factor * rng.lognormal(middle, 0.5, 1000))
            verdict = judge(guard, Window(Counts(20_000, 0, stable), Counts(1000, 0, candidate)))
            assert verdict.result is result, verdict.sentence


@given(st.lists(st.floats(0.001, 1e5), min_size=200, max_size=400), st.data())
def test_a_candidate_with_stables_own_times_passes(times: list[float], data: st.DataObject) -> None:
    histogram = buckets(np.array(times))
    side = Counts(len(times), 0, histogram)
    assert judge(Guard(slower=0.01), Window(side, side)).result is Result.PASS


def test_buckets_are_those_of_the_server() -> None:
    latencies = Latencies()
    times = (1, 2, 3, 1000, 52_000_000)
    for ns in times:
        latencies.add(ns, 0)
    assert tuple(latencies.request) == buckets(np.array(times) / 1e6)


def test_an_absolute_p99_counts_from_the_next_bucket_on() -> None:
    guard = Guard(p99_ms=50)
    for ms, result in ((60.0, Result.PASS), (70.0, Result.FAIL)):
        times = np.full(300, ms)
        verdict = judge(guard, Window(Counts(), Counts(300, 0, buckets(times))))
        assert verdict.result is result
    assert (
        verdict.sentence
        == "slower than 67.1 ms 100.0 % of 300, limit 1 % for a p99 of 50 ms (p below 1e-99): fail"
    )


@pytest.mark.parametrize(
    ("guard", "counted", "sentence"),
    [
        (
            ERRORS,
            window((7905, 16), (412, 17)),
            "errors 4.1 % of 412 against 0.2 % of 7,905, limit 1.0 % more (p 1e-5): fail",
        ),
        (
            ERRORS,
            window((7905, 16), (412, 1)),
            "errors 0.2 % of 412 against 0.2 % of 7,905, limit 1.0 % more: pass",
        ),
        (
            ERRORS,
            window((7905, 16), (199, 5)),
            "199 requests of the candidate and 7,905 of stable, 200 needed: inconclusive",
        ),
        (
            ERRORS,
            window((2693, 0), (172, 35)),
            "errors 20.3 % of 172 against 0.0 % of 2,693, limit 1.0 % more (p 4e-30 at any look): fail",
        ),
        (
            Guard(mismatch=0.001),
            Window(Counts(), Counts(), 1000, 9),
            "mismatches 0.9 % of 1,000 pairs, limit 0.1 % (p 1e-6): fail",
        ),
        (
            Guard(mismatch=0.001),
            Window(Counts(), Counts(), 7, 7),
            "mismatches 100.0 % of 7 pairs, limit 0.1 % (p 5e-21 at any look): fail",
        ),
        (
            Guard(mismatch=0.0),
            Window(Counts(), Counts(), 7, 1),
            "mismatches 14.3 % of 7 pairs, limit 0.0 % (p below 1e-99 at any look): fail",
        ),
        (
            Guard(mismatch=0.001),
            Window(Counts(), Counts(), 7, 1),
            "7 of 200 shadow pairs compared: inconclusive",
        ),
        (
            Guard(slower=0.05),
            Window(Counts(900, 0, (900,)), Counts(900, 890, (10,))),
            "10 times of the candidate and 900 of stable, 200 needed: inconclusive",
        ),
        (Guard(), window((0, 0), (9, 9)), "no guard has a limit: pass"),
    ],
)
def test_sentences_have_the_figures(guard: Guard, counted: Window, sentence: str) -> None:
    verdict = judge(guard, counted)
    assert verdict.sentence == sentence
    assert sentence.endswith(verdict.result.value)
    assert (verdict.p < IMPROBABLE) == (verdict.result is Result.FAIL)


def test_failures_of_the_last_minute_count_for_themselves() -> None:
    step, recent = window((100_000, 200), (5000, 30)), window((3000, 6), (300, 20))
    assert judge(ERRORS, step).result is Result.PASS
    verdict = judge(ERRORS, step, recent)
    assert verdict.sentence.startswith("in the last minute errors 6.7 % of 300 against")
    # Too few requests in it are no reason to doubt the step.
    assert judge(ERRORS, step, window((30, 0), (3, 0))).result is Result.PASS


def test_one_failing_guard_fails_and_one_inconclusive_one_holds() -> None:
    guard = Guard(errors=0.01, mismatch=0.01)
    few = Window(Counts(9000, 0), Counts(400, 0), 10, 0)
    assert judge(guard, few).sentence == "10 of 200 shadow pairs compared: inconclusive"
    bad = Window(Counts(9000, 0), Counts(400, 40), 10, 0)
    assert judge(guard, bad).result is Result.FAIL
    good = Window(Counts(9000, 0), Counts(400, 0), 1000, 0)
    assert judge(guard, good).sentence.count(": pass; ") == 1


def test_counts_since_an_earlier_look() -> None:
    early, late = Counts(3, 1, (1, 1)), Counts(9, 2, (2, 4, 1))
    assert late.minus(early) == Counts(6, 1, (1, 3, 1))
    assert late.minus(Counts()) == late


def test_few_requests_are_announced() -> None:
    assert traffic_note(Guard(errors=0.1), 100, 12, 5 * MINUTE) == (
        "1% of 12 requests/s gives 200 requests in 28 min; the step lasts 5m"
    )
    assert traffic_note(Guard(errors=0.1), 100, 120, 5 * MINUTE) == ""
    assert traffic_note(Guard(errors=0.1), 9900, 120, MINUTE).startswith("the 1% of stable of 120 requests/s")
    assert traffic_note(Guard(errors=0.1), 100, 0, MINUTE).startswith(
        "without requests there are no verdicts"
    )
