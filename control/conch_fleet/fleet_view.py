"""One model's rollout over all servers, as one plan sees it. Pure.

What the servers answer becomes the states of versions that `RolloutPlan` takes, and the counters that it is
judged by; its progress becomes the directive of each server.

- A version serves if a server has it; one that is to be brought to the servers, if all have it that serve the
  model. A server counts while it is reached.
- The candidate comes to one server after the other, in their order: the next one gets it when the one before
  has it, or can't load it.
- A server's alarm and a failed load are the fleet's. A version under test that no server has is no alarm: the
  plan waits, as servers that were started again load it.
- Counters are sums of what the servers have counted since they were first seen; a server that is lost and
  returns adds what it has counted meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from conch_control.managed_rollouts import Counts, ManagedReport, ManagedVersion
from conch_rollout.rollout_state import Progress, State, VersionSight
from conch_rollout.state_file import SavedRollout

_OTHER_FILES = "other files"
_TESTED = frozenset({State.STEP, State.PAUSED})
_GONE = ManagedVersion(0)
_RANKS = {
    State.LOADING: 1,
    State.STEP: 2,
    State.PAUSED: 2,
    State.SPLIT: 2,
    State.BAKING: 3,
    State.DONE: 3,
}


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """Answer of a server, with the state of the files that the request was for."""

    files: str
    number: int
    alarm: str
    versions: Mapping[int, ManagedVersion]

    @classmethod
    def of(cls, report: ManagedReport, files: str) -> ServerAnswer:
        """A server's answer."""
        versions = {each.version: each for each in report.versions}
        return cls(files, report.rollout.id, report.alarm, versions)

    @property
    def serves(self) -> bool:
        """True if the server serves the model."""
        return any(each.ready for each in self.versions.values())

    def is_like(self, other: ServerAnswer | None) -> bool:
        """True if only counters differ."""
        return other is not None and self._without_counters() == other._without_counters()

    def _without_counters(self) -> ServerAnswer:
        still = {
            version: replace(each, counts=Counts(), shadows=Counts(), pairs=(0, 0))
            for version, each in self.versions.items()
        }
        return replace(self, versions=still)


@dataclass
class FleetView:
    """Servers of one model.

    Attributes:
        servers: All servers of the fleet, in their order.
        files: Names the state of the model's files.
        digests: Digests of the versions that have files.
        answers: The last answer of each server that is reached.
        unknown: Servers that have neither answered nor been found out of reach.
    """

    servers: Sequence[str]
    files: str = ""
    digests: Mapping[int, str] = field(default_factory=dict)
    answers: dict[str, ServerAnswer] = field(default_factory=dict)
    unknown: set[str] = field(init=False)
    _totals: dict[int, ManagedVersion] = field(default_factory=dict)
    _counted: dict[tuple[str, int], ManagedVersion] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unknown = set(self.servers)

    def answered(self, server: str, answer: ServerAnswer) -> bool:
        """Takes an answer; returns True if more than counters has changed."""
        for version, now in answer.versions.items():
            before = self._counted.get((server, version))
            self._counted[server, version] = now
            if before is not None:
                self._totals[version] = _plus(self._totals.get(version, _GONE), now, before)
        known = self.answers.get(server)
        self.unknown.discard(server)
        self.answers[server] = answer
        return not answer.is_like(known)

    def lost(self, server: str) -> bool:
        """A server can't be reached; returns True if that is new."""
        was_unknown = server in self.unknown
        self.unknown.discard(server)
        return self.answers.pop(server, None) is not None or was_unknown

    def total(self, version: int) -> ManagedVersion:
        """Sums of a version's counters."""
        return self._totals.get(version, _GONE)

    def sights(self, progress: Progress) -> dict[int, VersionSight] | None:
        """The versions of the model; None while no server can tell."""
        serving = self._serving()
        tested = _version_under_test(progress)
        if not self.answers or (
            tested is not None
            and not any(answer.versions.get(tested, _GONE).ready for answer in serving.values())
            and not self._alarm(tested, progress, serving)
        ):
            return None
        found = set(self.digests)
        for answer in serving.values():
            found.update(version for version, each in answer.versions.items() if each.ready)
        return {version: self._sight(version, progress, serving) for version in found}

    def told(self, server: str, progress: Progress) -> Progress:
        """The plan's progress for one server."""
        candidate = progress.candidate
        if progress.state is not State.LOADING or candidate is None:
            return progress
        for each in self.servers:
            if each == server:
                return progress
            answer = self.answers.get(each)
            if answer is not None and answer.serves and not self._has_tried(answer, candidate):
                return replace(progress, state=State.IDLE, candidate=None)
        return progress

    def _serving(self) -> dict[str, ServerAnswer]:
        answers = ((server, self.answers.get(server)) for server in self.servers)
        return {server: answer for server, answer in answers if answer is not None and answer.serves}

    def _sight(self, version: int, progress: Progress, serving: Mapping[str, ServerAnswer]) -> VersionSight:
        seen = {server: answer.versions.get(version, _GONE) for server, answer in serving.items()}
        ready = [each for each in seen.values() if each.ready]
        current = [server for server in seen if self._is_current(serving[server], version)]
        everywhere = not (
            version == progress.stable
            or (version == progress.candidate and progress.state in (*_TESTED, State.SPLIT))
            or any(version == placed for placed, _ in progress.places)
        )
        digest = self.digests.get(version, "")
        serves = _OTHER_FILES if ready else ""
        if current and not everywhere:
            serves = digest
        elif everywhere and progress.state is not State.ABORTING:
            if self.unknown or len(ready) < len(serving):
                serves = ""
            elif len(current) == len(serving):
                serves = digest
        failures = [
            (f"server {server}: {each.failure}" if len(self.servers) > 1 else each.failure, each.since)
            for server, each in seen.items()
            if each.failure and server not in current and serving[server].files == self.files
        ]
        differences = [each.differences for each in ready if each.differences is not None]
        failure, since = failures[0] if failures else ("", 0.0)
        return VersionSight(
            digest,
            serves,
            failure,
            since,
            differences=tuple(dict.fromkeys(text for each in differences for text in each))
            if differences
            else None,
            alarm=self._alarm(version, progress, serving),
        )

    def _alarm(self, version: int, progress: Progress, serving: Mapping[str, ServerAnswer]) -> str:
        if version != _version_under_test(progress):
            return ""
        alarms = (
            f"server {server}: {answer.alarm}"
            for server, answer in serving.items()
            if answer.alarm and answer.number == progress.number
        )
        return next(alarms, "")

    def _is_current(self, answer: ServerAnswer, version: int) -> bool:
        return answer.files == self.files and answer.versions.get(version, _GONE).current

    def _has_tried(self, answer: ServerAnswer, version: int) -> bool:
        failed = answer.files == self.files and bool(answer.versions.get(version, _GONE).failure)
        return failed or self._is_current(answer, version)


def _version_under_test(progress: Progress) -> int | None:
    if progress.state is State.BAKING:
        return progress.stable
    return progress.candidate if progress.state in _TESTED else None


def _plus(total: ManagedVersion, now: ManagedVersion, before: ManagedVersion) -> ManagedVersion:
    return replace(
        total,
        counts=_sum(total.counts, now.counts, before.counts),
        shadows=_sum(total.shadows, now.shadows, before.shadows),
        pairs=_pairs(total.pairs, now.pairs, before.pairs),
    )


def _sum(total: Counts, now: Counts, before: Counts) -> Counts:
    if now.requests < before.requests or len(now.latencies) < len(before.latencies):  # loaded again
        before = Counts()
    new = now.minus(before)
    latencies = tuple(a + b for a, b in zip_longest(total.latencies, new.latencies, fillvalue=0))
    return Counts(total.requests + new.requests, total.failures + new.failures, latencies)


def _pairs(total: tuple[int, int], now: tuple[int, int], before: tuple[int, int]) -> tuple[int, int]:
    if now[0] < before[0]:
        before = (0, 0)
    return total[0] + now[0] - before[0], total[1] + now[1] - before[1]


def resumed(kept: SavedRollout | None, shown: Iterable[SavedRollout]) -> SavedRollout | None:
    """Rollout that a restarted manager continues; None if there is none.

    Args:
        kept: The rollout in its state directory.
        shown: The rollouts last sent to its servers.
    """
    found = [*([] if kept is None else [kept]), *shown]
    if not found:
        return None
    number = max(each.progress.number for each in found)
    lowest = min((each for each in found if each.progress.number == number), key=_rank)
    if kept is None or kept.progress.number < number:
        return lowest
    if lowest is not kept and {lowest.progress.state, kept.progress.state} <= _TESTED:
        step, weight, shadow = lowest.progress.step, lowest.progress.weight, lowest.progress.shadow
        return replace(kept, progress=replace(kept.progress, step=step, weight=weight, shadow=shadow))
    return kept


def _rank(saved: SavedRollout) -> tuple[int, int, int]:
    """Order of progress within one rollout; ended ones are first, as nothing may begin again."""
    return _RANKS.get(saved.progress.state, 0), saved.progress.step, saved.progress.weight
