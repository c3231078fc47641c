"""Shared state of the instances of one model."""

from __future__ import annotations

from functools import partial

from conch.core.servable import Readiness
from conch.workers.supervision.restart_policy import QUIET_WAIT_NS, Phase, RestartPolicy
from conch.workers.supervision.worker_group import NOT_READY, Member, NotReady, WorkerGroup


class _Told:
    """An instance that notes its notifications."""

    def __init__(
        self, group: WorkerGroup, phase: Phase, passive: bool = False, check: Readiness | None = None
    ) -> None:
        self.readiness: Readiness | None = None
        self.member = Member(RestartPolicy(phase), passive, self._tell, check)
        group.join(self.member)

    def _tell(self, readiness: Readiness | None) -> None:
        self.readiness = readiness


def test_readiness_follows_the_quorum() -> None:
    group = WorkerGroup()
    check = NotReady()  # any would do
    told = [
        _Told(group, Phase.SERVING),
        _Told(group, Phase.SERVING, check=check),
        _Told(group, Phase.SERVING),
    ]
    assert [each.readiness for each in told] == [None, check, None]
    told[0].member.policy.phase = Phase.LOST
    group.changed()
    assert [each.readiness for each in told] == [None, check, None]
    told[2].member.policy.phase = Phase.WAITING
    group.changed()
    assert [each.readiness for each in told] == [NOT_READY] * 3
    assert not NOT_READY.result()
    group.leave(told[2].member)
    assert [each.readiness for each in told[:2]] == [None, check]


def test_passive_instances_do_not_count() -> None:
    group = WorkerGroup()
    serving, dead = _Told(group, Phase.SERVING), [_Told(group, Phase.WAITING, passive=True) for _ in range(3)]
    assert [serving.readiness] == [None]
    for each in dead:
        each.member.policy.wait_ns = QUIET_WAIT_NS + 1
    serving.member.policy.phase = Phase.LOST
    group.changed()
    assert (serving.readiness, group.refuses_requests) == (NOT_READY, False)


def test_who_waits_is_told_when_there_is_no_hope_left() -> None:
    group = WorkerGroup()
    first, second = (_Told(group, Phase.WAITING) for _ in range(2))
    told: list[int] = []
    for number, each in enumerate((first, second)):
        each.member.on_available.append(partial(told.append, number))
    first.member.policy.wait_ns = QUIET_WAIT_NS + 1
    group.changed()
    assert (group.refuses_requests, told) == (False, [])
    second.member.policy.wait_ns = QUIET_WAIT_NS + 1
    group.changed()
    assert (group.refuses_requests, told) == (True, [0, 1])
    group.changed()
    assert told == [0, 1]
    second.member.policy.phase = Phase.STARTING
    group.changed()
    assert (group.refuses_requests, told) == (False, [0, 1])
