"""Restarts of a worker that died, and its requests meanwhile."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from conch.workers.supervision.restart_policy import (
    FIRST_WAIT_NS,
    HEALTHY_NS,
    LONGEST_WAIT_NS,
    QUIET_WAIT_NS,
    Phase,
    RestartPolicy,
    has_quorum,
    none_serves_soon,
)

S = 1_000_000_000


def _die(life: RestartPolicy, served_ns: int, now: int = 0) -> int:
    """Has it be started and die after a time; returns for how long it now waits."""
    life.served(now)
    life.lost(now + served_ns, "why")
    life.ended(now + served_ns, "why")
    waits = life.wait_ns
    life.begin()
    return waits


def test_waits_double() -> None:
    life = RestartPolicy()
    waits = [_die(life, 0) / S for _ in range(12)]
    assert waits == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]
    assert life.restarts == 12


def test_starts_that_fail_count_as_deaths() -> None:
    life = RestartPolicy()
    waits = []
    for _ in range(4):
        life.failed(0, "no file")
        waits.append(life.wait_ns / S)
        assert life.reason == "no file"
        life.begin()
    assert waits == [0, 0.1, 0.2, 0.4]


def test_a_minute_of_health_takes_it_back_to_the_start() -> None:
    life = RestartPolicy()
    for _ in range(12):
        _die(life, 0)
    assert _die(life, HEALTHY_NS - 1) == LONGEST_WAIT_NS // 2
    assert _die(life, HEALTHY_NS) == 0
    assert _die(life, 0) == FIRST_WAIT_NS


def test_what_dies_now_and_then_does_not_wait_longer_and_longer() -> None:
    life = RestartPolicy()
    assert [_die(life, 2 * S) / S for _ in range(20)] == [0, *[0.1] * 19]


def test_waits_become_shorter_when_it_serves_for_longer() -> None:
    life = RestartPolicy()
    for _ in range(5):
        _die(life, 0)
    assert life.wait_ns == 800_000_000
    assert [_die(life, 2 * S) / S for _ in range(5)] == [0.4, 0.2, 0.1, 0.1, 0.1]
    assert [_die(life, 0) / S for _ in range(3)] == [0.2, 0.4, 0.8]


def test_times_of_tries() -> None:
    life = RestartPolicy()
    life.served(0)
    life.lost(5 * S, "died")
    assert (life.phase, life.reason) == (Phase.LOST, "died")
    life.ended(6 * S, "died of something")
    assert (life.phase, life.reason, life.try_ns) == (Phase.WAITING, "died of something", 6 * S)
    life.begin()
    life.failed(7 * S, "again")
    assert life.try_ns == 7 * S + FIRST_WAIT_NS
    life.begin()
    life.served(8 * S)
    assert (life.phase, life.reason) == (Phase.SERVING, "")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100 * S)), max_size=60))
def test_waits_stay_within_bounds(deaths: list[tuple[bool, int]]) -> None:
    life, now, before = RestartPolicy(), 0, 0
    for in_start, lived in deaths:
        if not in_start:
            life.served(now)
        now += lived
        if in_start:
            life.failed(now, "failed")
        else:
            life.lost(now, "lost")
            life.ended(now, "ended")
        assert 0 <= life.wait_ns <= LONGEST_WAIT_NS
        assert life.wait_ns <= max(2 * before, FIRST_WAIT_NS)
        assert life.try_ns == now + life.wait_ns
        assert life.serves_soon == (life.wait_ns <= QUIET_WAIT_NS)
        if in_start and before < LONGEST_WAIT_NS and before:
            assert life.wait_ns > before
        before = life.wait_ns
        now = life.try_ns
        life.begin()
        assert life.serves_soon
    assert life.restarts == len(deaths)


@pytest.mark.parametrize(
    ("phases", "quorum"),
    [("S", True), ("W", False), ("SW", True), ("WW", False), ("SWW", False), ("SSW", True), ("SLWW", False),
     ("SSTW", True), ("", False)],
)  # fmt: skip
def test_quorum_is_half_rounded_up(phases: str, quorum: bool) -> None:
    names = {"S": Phase.SERVING, "W": Phase.WAITING, "L": Phase.LOST, "T": Phase.STARTING}
    assert has_quorum([RestartPolicy(names[each]) for each in phases]) is quorum


def test_requests_wait_for_as_long_as_any_instance_is_hopeful() -> None:
    blocking, quiet = (
        RestartPolicy(Phase.WAITING, wait_ns=wait) for wait in (QUIET_WAIT_NS, QUIET_WAIT_NS + 1)
    )
    assert none_serves_soon([quiet, RestartPolicy(Phase.CLOSED)])
    others = (
        RestartPolicy(phase, wait_ns=LONGEST_WAIT_NS) for phase in (Phase.STARTING, Phase.LOST, Phase.SERVING)
    )
    for other in (blocking, *others):
        assert not none_serves_soon([quiet, other])
