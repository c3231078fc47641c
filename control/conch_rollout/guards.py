"""Verdicts on a candidate from counters: pure statistics.

A limit is part of the null hypothesis: a guard fails if so many bad requests are improbable even though the
candidate were as bad as its limit allows. So looks every few seconds, over hours, hardly ever fail a
candidate within its limits, where a test against "no difference" does after a while.

A passing verdict needs many requests, a failing one need not: `judge_early` is a sequential test, which may
look after each request. Its p is the inverse of an e-process: the likelihood of all that was counted, mixed
over all shares (Beta(1/2, 1/2) for each side), over its greatest likelihood within the limit. For requests
that fail independently the chance that it ever falls below `SURE` is less than `SURE` (Ville's inequality).

Tails of the binomial distribution are exact for any number of requests; a sum of few terms suffices, as they
fall at least geometrically from the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from conch_control.managed_rollouts import Counts
from conch_rollout.rollout_file import WHOLE, Guard, duration, percent

IMPROBABLE = 0.01
"""A guard fails below this probability."""
SURE = 1e-6
"""A failing verdict below this probability aborts without a second one, and with fewer requests."""

_P99 = 0.01  # share of requests above the p99
_S = 1_000_000_000


class Result(Enum):
    """Result of a look at the counters."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A result with its figures in one sentence; `p` is the least probability of a failing guard."""

    result: Result
    sentence: str
    p: float = 1.0


@dataclass(frozen=True, slots=True)
class Window:
    """Both sides over the same time; `compared` and `mismatched` count shadow pairs."""

    stable: Counts
    candidate: Counts
    compared: int = 0
    mismatched: int = 0


def judge(guard: Guard, step: Window, recent: Window | None = None) -> Verdict:
    """The verdict of all guards that have a limit.

    Args:
        guard: The limits.
        step: Counters since the step began.
        recent: Counters of the last minute, which may fail the candidate, but need not be conclusive.
    """
    early = judge_early(guard, step, recent)
    if early is not None:
        return early
    verdicts = list(_verdicts(guard, step))
    if not verdicts:
        return Verdict(Result.PASS, "no guard has a limit: pass")
    if recent is not None:
        verdicts += [
            Verdict(each.result, f"in the last minute {each.sentence}", each.p)
            for each in _verdicts(guard, recent)
            if each.result is Result.FAIL
        ]
    for result in (Result.FAIL, Result.INCONCLUSIVE, Result.PASS):
        found = [each for each in verdicts if each.result is result]
        if found:
            break
    return Verdict(result, "; ".join(each.sentence for each in found), min(each.p for each in found))


def judge_early(guard: Guard, step: Window, recent: Window | None = None) -> Verdict | None:
    """The verdict on a candidate that is surely worse than allowed, from any number of requests; else None.

    The guards on latency take no part: the first requests of a version are slow, all together.
    """
    for window, place in ((step, ""), (recent, "in the last minute ")):
        for p, text in () if window is None else _early(guard, window):
            sentence = f"{place}{text} (p {_probability(p)} at any look): fail"
            return Verdict(Result.FAIL, sentence, p)
    return None


def traffic_note(guard: Guard, weight: int, per_second: float, least_ns: int) -> str:
    """Time that the traffic takes for a verdict, as a sentence, if longer than the step; else empty.

    Args:
        guard: The limits.
        weight: The candidate's share, of `WHOLE`.
        per_second: Requests of the model in a second.
        least_ns: Duration of the step.
    """
    rate = per_second * min(weight, WHOLE - weight) / WHOLE
    needed_ns = math.inf if rate <= 0 else guard.requests / rate * _S
    if needed_ns <= least_ns:
        return ""
    lasts = duration(least_ns)
    if not math.isfinite(needed_ns):
        return f"without requests there are no verdicts; the step lasts {lasts}"
    share = percent(weight) if weight <= WHOLE // 2 else f"the {percent(WHOLE - weight)} of stable"
    needed = f"{needed_ns / (60 * _S):.0f} min" if needed_ns >= 90 * _S else f"{needed_ns / _S:.0f} s"
    return (
        f"{share} of {per_second:.3g} requests/s gives {guard.requests} requests in {needed}; the step lasts "
        f"{lasts}"
    )


def evidence(bad: int, total: int, limit: float, stable: tuple[int, int] | None = None) -> float:
    """Logarithm of the e-process against a share of bad requests within the limit; at least 0.

    Args:
        bad: The candidate's bad requests.
        total: All its requests.
        limit: The greatest allowed share, beyond stable's if that is given.
        stable: Stable's bad requests and all of them.
    """
    stable_bad, stable_total = stable or (0, 0)
    low = 0.0 if stable is None else stable_bad / stable_total if stable_total else 1.0
    high = bad / total - limit if total else low
    if high <= low:
        return 0.0
    if stable is None:
        high = low
    # Within the limit the likelihood is greatest at it, and concave along it: stable's share is in between.
    for _ in range(0 if stable is None else 40):
        share = (low + high) / 2
        allowed = share + limit
        slope = _over(stable_bad, share) + _over(bad, allowed)
        slope -= _over(stable_total - stable_bad, 1 - share) + _over(total - bad, 1 - allowed)
        low, high = (share, high) if slope > 0 else (low, share)
    within = _log_likelihood(bad, total, high + limit) + _log_likelihood(stable_bad, stable_total, high)
    return max(_log_mixture(bad, total) + _log_mixture(stable_bad, stable_total) - within, 0.0)


def _over(count: int, share: float) -> float:
    return count / share if count else 0.0


def _log_likelihood(bad: int, total: int, share: float) -> float:
    if bad and not share:
        return -math.inf
    good = total - bad
    return (bad * math.log(share) if bad else 0.0) + (good * math.log1p(-share) if good else 0.0)


def _log_mixture(bad: int, total: int) -> float:
    """Likelihood averaged over all shares."""
    return (
        math.lgamma(bad + 0.5) + math.lgamma(total - bad + 0.5) - math.lgamma(total + 1) - math.log(math.pi)
    )


def tail(count: int, trials: int, share: float) -> float:
    """Probability of at least `count` successes in `trials` of a share each."""
    if count <= 0:
        return 1.0
    if count > trials or share <= 0.0:
        return 0.0
    if share >= 1.0:
        return 1.0
    if count > trials * share:
        return min(_sum(count, trials, share, 1), 1.0)
    return max(1.0 - _sum(count - 1, trials, share, -1), 0.0)


def _sum(first: int, trials: int, share: float, step: int) -> float:
    """Sum of binomial probabilities from `first` on, away from the mean."""
    log_first = (
        math.lgamma(trials + 1)
        - math.lgamma(first + 1)
        - math.lgamma(trials - first + 1)
        + first * math.log(share)
        + (trials - first) * math.log1p(-share)
    )
    odds = share / (1.0 - share)
    total = term = 1.0
    count = first
    while term > total * 1e-12:
        if step > 0:
            term *= (trials - count) / (count + 1) * odds
        else:
            term *= count / (trials - count + 1) / odds
        count += step
        total += term
    return total * math.exp(log_first)


def _verdicts(guard: Guard, window: Window) -> Iterator[Verdict]:
    stable, candidate, needed = window.stable, window.candidate, guard.requests
    if guard.errors is not None:
        few = _few("requests", candidate.requests, stable.requests, needed)
        yield few or _errors(guard.errors, stable, candidate)
    if guard.slower is not None:
        few = _few("times", sum(candidate.latencies), sum(stable.latencies), needed)
        yield few or _slower(guard.slower, stable, candidate)
    if guard.p99_ms is not None:
        times = sum(candidate.latencies)
        yield _few("times", times, None, needed) or _absolute(guard.p99_ms, candidate)
    # Only shadow steps have pairs.
    if guard.mismatch is not None and window.compared:
        if window.compared < needed:
            yield Verdict(
                Result.INCONCLUSIVE,
                f"{window.compared:,} of {needed:,} shadow pairs compared: inconclusive",
            )
        else:
            text = _mismatches_text(guard.mismatch, window)
            yield _verdict(text, window.mismatched, window.compared, guard.mismatch)


def _early(guard: Guard, window: Window) -> Iterator[tuple[float, str]]:
    """Guards that surely fail: the probability, and the figures with the limit."""
    stable, candidate = window.stable, window.candidate
    if guard.errors is not None:
        beside = stable.failures, stable.requests
        p = math.exp(-evidence(candidate.failures, candidate.requests, guard.errors, beside))
        if p < SURE:
            yield p, _errors_text(guard.errors, stable, candidate)
    if guard.mismatch is not None:
        p = math.exp(-evidence(window.mismatched, window.compared, guard.mismatch))
        if p < SURE:
            yield p, _mismatches_text(guard.mismatch, window)


def _few(what: str, candidate: int, stable: int | None, needed: int) -> Verdict | None:
    """The verdict on too few requests; None for enough. `stable` is None where that side does not matter."""
    if min(candidate, candidate if stable is None else stable) >= needed:
        return None
    beside = "" if stable is None else f" and {stable:,} of stable"
    figures = f"{candidate:,} {what} of the candidate{beside}, {needed:,} needed"
    return Verdict(Result.INCONCLUSIVE, f"{figures}: inconclusive")


def _errors(limit: float, stable: Counts, candidate: Counts) -> Verdict:
    allowed = stable.failures / stable.requests + limit
    text = _errors_text(limit, stable, candidate)
    return _verdict(text, candidate.failures, candidate.requests, allowed)


def _errors_text(limit: float, stable: Counts, candidate: Counts) -> str:
    return (
        f"errors {_share(candidate.failures, candidate.requests)} of {candidate.requests:,} against "
        f"{_share(stable.failures, stable.requests)} of {stable.requests:,}, limit {_percent(limit)} more"
    )


def _mismatches_text(limit: float, window: Window) -> str:
    share = _share(window.mismatched, window.compared)
    return f"mismatches {share} of {window.compared:,} pairs, limit {_percent(limit)}"


def _slower(limit: float, stable: Counts, candidate: Counts) -> Verdict:
    total = sum(candidate.latencies)
    edge = _edge(stable.latencies)
    # The p99 is within a bucket: as much of the candidate's is above it as of stable's.
    part = (sum(stable.latencies) * _P99 - sum(stable.latencies[edge + 1 :])) / stable.latencies[edge]
    above = int(sum(candidate.latencies[edge + 1 :]) + part * sum(candidate.latencies[edge : edge + 1]))
    return _verdict(
        f"slower than stable's p99, at most {_milliseconds(edge)}, {_share(above, total)} of {total:,}, "
        f"limit {_percent(limit)}",
        *(above, total, limit),
    )


def _absolute(limit_ms: float, candidate: Counts) -> Verdict:
    total = sum(candidate.latencies)
    # Only buckets wholly above count, so the limit is the next edge.
    edge = (math.ceil(limit_ms * 1e6) - 1).bit_length()
    above = sum(candidate.latencies[edge + 1 :])
    return _verdict(
        f"slower than {_milliseconds(edge)} {_share(above, total)} of {total:,}, "
        f"limit 1 % for a p99 of {limit_ms:g} ms",
        *(above, total, _P99),
    )


def _verdict(text: str, bad: int, total: int, allowed: float) -> Verdict:
    if bad <= total * allowed:  # as bad as allowed, at most
        return Verdict(Result.PASS, f"{text}: pass")
    p = tail(bad, total, allowed)
    result = Result.FAIL if p < IMPROBABLE else Result.PASS
    return Verdict(result, f"{text} (p {_probability(p)}): {result.value}", p)


def _edge(latencies: Sequence[int]) -> int:
    """The bucket of the p99: at most 1 % of the requests are in higher ones."""
    most = sum(latencies) * _P99
    above = 0
    for place in range(len(latencies) - 1, -1, -1):
        above += latencies[place]
        if above > most:
            return place
    return 0


def p99_ns(counts: Counts) -> int | None:
    """The upper bound of the p99 of a version's requests; None without times."""
    return 2 ** _edge(counts.latencies) if any(counts.latencies) else None


def _milliseconds(place: int) -> str:
    return f"{2**place / 1e6:.3g} ms"


def _share(count: int, total: int) -> str:
    return _percent(count / total) if total else "0 %"


def _percent(share: float) -> str:
    value = share * 100
    return f"{value:.1f} %" if value >= 0.1 or not value else f"{value:.2g} %"


def _probability(p: float) -> str:
    return f"{p:.0e}".replace("e-0", "e-") if p >= 1e-99 else "below 1e-99"
