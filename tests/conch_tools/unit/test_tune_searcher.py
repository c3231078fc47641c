"""The search reaches a recorded share of the optimum on simulated servers, and goes on where it stopped."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean

import pytest

from conch_tools.tune.searcher import Searcher, Variant

SPACE = {
    "batch": (1, 2, 4, 8, 16, 32, 64, 128),
    "instances": (1, 2, 3, 4, 5),
    "delay": (0.0, 0.0001, 0.0005, 0.001, 0.005),
    "threads": (1, 2, 4, 8),
}
TODAY = (8, 1, 0.0, 1)


class Surface:
    """A simulated server with a limit of latency."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(f"surface {seed}")
        self._a, self._c = 10 ** draw.uniform(-3.7, -2), 10 ** draw.uniform(-4.5, -2.5)
        self._cores, self._clients = draw.choice((4, 8, 16)), draw.choice((8, 32, 64, 128))
        self._e = draw.uniform(0.3, 0.95)
        self._noise = random.Random(f"noise {seed}")
        self._true = {each: self._measure(each) for each in itertools.product(*SPACE.values())}
        latencies = sorted(latency for _, latency in self._true.values())
        self._limit = latencies[int(draw.choice((0.15, 0.4, 0.8)) * len(latencies))]
        self._best = max(rate for rate, latency in self._true.values() if latency <= self._limit)

    def score(self, variant: Variant, window: float) -> float:
        scale = math.sqrt(1 / window)
        rate, latency = self._true[variant]
        rate *= 1 + 0.05 * scale * self._noise.gauss(0, 1)
        latency *= 1 + 0.08 * scale * self._noise.gauss(0, 1)
        return rate if latency <= self._limit else rate * 0.01 * self._limit / latency

    def share(self, variant: Variant) -> float:
        """Share of the true optimum; a limit exceeded by no more than latency's noise counts as met."""
        rate, latency = self._true[variant]
        return min(rate / self._best, 1.0) if latency <= self._limit * 1.08 else 0.0

    def _measure(self, variant: Variant) -> tuple[float, float]:
        b, i, d, t = variant
        over = max(1, i * t / self._cores) ** 1.15
        be = min(b, max(1, self._clients / i * (0.6 + 0.4 * min(1, d / 0.001))))
        cycle = (self._a + be * self._c / t**self._e) * over + (d if be < b else 0)
        rate = min(i * be, self._clients) / cycle
        return rate, 1.3 * self._clients / rate + cycle


def run_search(seed: int, budget: float) -> tuple[Searcher, Surface]:
    surface = Surface(seed)
    searcher = Searcher(SPACE, TODAY, budget, seed)
    while (asked := searcher.ask()) is not None:
        searcher.tell(*asked, surface.score(*asked))
    return searcher, surface


# Means of optuna 5.0's TPE on such surfaces.
@pytest.mark.parametrize(("budget", "least"), [(15, 0.81), (30, 0.87), (60, 0.91)])
def test_reaches_the_share_of_the_optimum_that_tpe_does(budget: float, least: float) -> None:
    shares = []
    for seed in range(60):
        searcher, surface = run_search(seed, budget)
        assert searcher.spent <= budget + 1
        shares.append(surface.share(searcher.ranking()[0]))
    assert fmean(shares) >= least


@pytest.mark.parametrize("stopped_at", [1, 7, 30])
def test_continues_where_it_stopped(stopped_at: int) -> None:
    whole, _ = run_search(3, 15)
    searcher = Searcher(SPACE, TODAY, 15, 3)
    for one in whole.told[:stopped_at]:
        searcher.tell(one.variant, one.window, one.score)
    for one in whole.told[stopped_at:]:
        assert searcher.ask() == (one.variant, one.window)
        searcher.tell(one.variant, one.window, one.score)
    assert searcher.ask() is None


@pytest.mark.parametrize("failed", [(1,), (2,)])
def test_measures_every_variant_of_a_small_space_and_never_one_that_failed_again(failed: Variant) -> None:
    searcher = Searcher({"batch": (1, 2, 4)}, (1,), 30, 0)
    asked = []
    while (found := searcher.ask()) is not None:
        asked.append(found[0])
        searcher.tell(*found, -1.0 if found[0] == failed else float(found[0][0]))
    assert set(asked) == {(1,), (2,), (4,)}
    assert asked.count(failed) == 1
    assert searcher.ranking()[0] == (4,)


def test_asks_for_one_of_the_variants_with_one_effect() -> None:
    def effective(variant: Variant) -> Variant:
        return variant if variant[0] else (0, 0)

    searcher = Searcher({"batch": (0, 4), "delay": (0, 1, 2)}, (4, 0), 60, 0, effective)
    asked = set()
    while (found := searcher.ask()) is not None:
        asked.add(found[0])
        searcher.tell(*found, 1.0)
    assert asked == {(0, 0), (4, 0), (4, 1), (4, 2)}
