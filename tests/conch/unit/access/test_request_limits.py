"""Limits hold over any time, waits are as long as needed and no longer, and principals have their own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.access.request_limits import Limiter, RequestLimits
from conch.core.errors import ResourceExhaustedError

S = 1_000_000_000
rates = st.floats(0.1, 1000)
steps = st.lists(st.tuples(st.integers(0, 2 * S), st.integers(0, 5000)), max_size=60)


class SteeredClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 10**15

    def __call__(self) -> int:
        return self.now


def taken(limiter: Limiter, size: int) -> float | None:
    """The seconds to wait, None if a call was admitted."""
    try:
        limiter.take_request(size)
    except ResourceExhaustedError as error:
        assert error.retry_after_ms is not None and error.retry_after_ms > 0
        return error.retry_after_ms / 1000
    return None


@given(rates, steps)
def test_calls_of_any_time_keep_to_the_rate_and_the_wait_is_true(
    rate: float, steps: list[tuple[int, int]]
) -> None:
    clock = SteeredClock()
    limiter = Limiter("a", RequestLimits(requests_per_second=rate), clock)
    admitted: list[int] = []
    for wait_ns, size in steps:
        clock.now += wait_ns
        wait_s = taken(limiter, size)
        if wait_s is not None:
            assert wait_s <= 1 / rate + 0.001
            clock.now += int(wait_s * S)
            assert taken(limiter, size) is None
        admitted.append(clock.now)
    assert limiter.requests == len(admitted)
    for first, began in enumerate(admitted):
        for last in range(first, len(admitted)):
            seconds = (admitted[last] - began) / S
            assert last - first + 1 <= max(rate, 1.0) + rate * seconds + 1e-3


@given(rates, steps)
def test_bytes_are_taken_on_credit(rate: float, steps: list[tuple[int, int]]) -> None:
    clock = SteeredClock()
    limiter = Limiter("a", RequestLimits(bytes_per_second=rate), clock)
    began, total = clock.now, 0
    for wait_ns, size in steps:
        clock.now += wait_ns
        wait_s = taken(limiter, size)
        if wait_s is None:
            # The bucket was not overdrawn before this call.
            assert total <= rate * (1 + (clock.now - began) / S) + 1
            total += size
        else:
            clock.now += int(wait_s * S)
            assert taken(limiter, 0) is None


def test_a_refused_call_is_charged_for_nothing() -> None:
    clock = SteeredClock()
    limiter = Limiter("a", RequestLimits(requests_per_second=1, bytes_per_second=100), clock)
    assert taken(limiter, 10_000) is None
    assert taken(limiter, 0) == 1.0  # by calls, although bytes take longer
    clock.now += S
    assert taken(limiter, 0) == 98.0
    clock.now += 98 * S
    assert taken(limiter, 0) is None


def test_loads_of_models() -> None:
    clock = SteeredClock()
    limiter = Limiter("a", RequestLimits(cold_loads_per_minute=2), clock)
    limiter.take_load()
    limiter.take_load()
    with pytest.raises(
        ResourceExhaustedError, match=r"of 2 loads of models per minute \(cold_loads"
    ) as refused:
        limiter.take_load()
    assert refused.value.retry_after_ms == 30_000
    clock.now += 30 * S
    limiter.take_load()
    Limiter("b", RequestLimits(requests_per_second=1), clock).take_load()


def test_requests_in_flight() -> None:
    limiter = Limiter("a", RequestLimits(concurrent=2))
    limiter.enter()
    limiter.enter()
    with pytest.raises(ResourceExhaustedError, match="'a' is over its limit of 2 requests at a time"):
        limiter.enter()
    limiter.leave()
    limiter.enter()
    limiter.change(RequestLimits(concurrent=3))  # those in flight still count
    limiter.enter()
    assert limiter.in_flight == 3
