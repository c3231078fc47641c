"""What instances of one model know of each other."""

from __future__ import annotations

from functools import partial

from conch.core.servable import Readiness
from conch.workers.supervision.restart_policy import QUIET_WAIT_NS, Life, Phase
from conch.workers.supervision.worker_group import NOT_READY, Member, NotReady, Team


class _Told:
    """An instance that notes what it is told."""

    def __init__(
        self, team: Team, phase: Phase, passive: bool = False, check: Readiness | None = None
    ) -> None:
        self.readiness: Readiness | None = None
        self.member = Member(Life(phase), passive, self._tell, check)
        team.join(self.member)

    def _tell(self, readiness: Readiness | None) -> None:
        self.readiness = readiness


def test_readiness_follows_the_quorum() -> None:
    team = Team()
    check = NotReady()  # any would do
    told = [_Told(team, Phase.SERVING), _Told(team, Phase.SERVING, check=check), _Told(team, Phase.SERVING)]
    assert [each.readiness for each in told] == [None, check, None]
    told[0].member.life.phase = Phase.LOST
    team.changed()
    assert [each.readiness for each in told] == [None, check, None]
    told[2].member.life.phase = Phase.WAITING
    team.changed()
    assert [each.readiness for each in told] == [NOT_READY] * 3
    assert not NOT_READY.result()
    team.leave(told[2].member)
    assert [each.readiness for each in told[:2]] == [None, check]


def test_passive_instances_do_not_count() -> None:
    team = Team()
    serving, dead = _Told(team, Phase.SERVING), [_Told(team, Phase.WAITING, passive=True) for _ in range(3)]
    assert [serving.readiness] == [None]
    for each in dead:
        each.member.life.wait_ns = QUIET_WAIT_NS + 1
    serving.member.life.phase = Phase.LOST
    team.changed()
    assert (serving.readiness, team.hopeless) == (NOT_READY, False)


def test_who_waits_is_told_when_there_is_no_hope_left() -> None:
    team = Team()
    first, second = (_Told(team, Phase.WAITING) for _ in range(2))
    told: list[int] = []
    for number, each in enumerate((first, second)):
        each.member.again.append(partial(told.append, number))
    first.member.life.wait_ns = QUIET_WAIT_NS + 1
    team.changed()
    assert (team.hopeless, told) == (False, [])
    second.member.life.wait_ns = QUIET_WAIT_NS + 1
    team.changed()
    assert (team.hopeless, told) == (True, [0, 1])
    team.changed()
    assert told == [0, 1]
    second.member.life.phase = Phase.STARTING
    team.changed()
    assert (team.hopeless, told) == (False, [0, 1])
