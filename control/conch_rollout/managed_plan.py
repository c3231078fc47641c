"""The plan of a server whose rollout another process runs, for a whole fleet.

It takes the manager's progress as it is, and adds what only the server can know:

| event                                                          | what follows                        |
|----------------------------------------------------------------|-------------------------------------|
| candidate or stable is not ready                               | stable alone, or no route           |
| the manager names no stable version, and one serves            | it is stable here                   |
| failing verdicts, worker back-off, candidate no longer ready   | alarm: ABORTING until the next one  |
| `abort`                                                        | alarm                               |
| the manager is silent for the lease                            | stable alone, until it is heard     |

An alarm holds as long as the manager's rollout has the same number. While a promoted version bakes, it leads
to the version before, if that is ready. A split goes on without its manager: it has no candidate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from conch.core.errors import FailedPreconditionError
from conch_rollout.rollout_file import Declaration, duration
from conch_rollout.rollout_plan import RolloutPlan
from conch_rollout.rollout_state import Action, Progress, RolloutCommand, State

_TESTED = frozenset({State.STEP, State.PAUSED})


@dataclass
class ManagedPlan(RolloutPlan):
    """State machine of one model on one server of a fleet; not thread-safe.

    Attributes:
        manager: Name of the process that runs the rollout.
        alarm: Reason for which the candidate was left; empty if it was not.
        given: The manager's progress.
    """

    from_file: bool = False
    manager: str = ""
    alarm: str = field(default="", init=False)
    given: Progress = field(default_factory=Progress, init=False)
    _lease_ns: int = field(default=0, init=False)
    _heard: int = field(default=0, init=False)
    _silent: bool = field(default=False, init=False)  # the lease has ended

    @classmethod
    def after(cls, plan: RolloutPlan) -> ManagedPlan:
        """Takes the place of another plan, whose route, labels and selection are published."""
        made = cls(plan.model, plan.declaration, plan.progress)
        made._take_published(plan)
        return made

    def released(self, next_number: Callable[[str, int], int]) -> RolloutPlan:
        """The server's own plan again, without a declaration; what is held out stays so.

        Digests are the server's own.
        """
        given = self.given
        refused = tuple(
            replace(each, digest=self._state_of(each.version).files or each.digest) for each in given.refused
        )
        progress = Progress(number=given.number, refused=refused)
        made = RolloutPlan(self.model, Declaration(), progress, next_number=next_number)
        made.since = self.since
        made._take_published(self)
        return made

    def manage(
        self, manager: str, declaration: Declaration, progress: Progress, lease_ns: int, now: int
    ) -> list[Action]:
        """Processes what the manager says, which also renews its lease."""
        before, self.given = self.given, progress
        self.manager, self._lease_ns, self._heard = manager, lease_ns, now
        if progress.number != before.number:
            self.alarm = ""
            self._arrived = False
        if declaration != self.declaration:
            self.declaration, self._redeclared = declaration, True
        if _window_of(progress) != _window_of(before):
            self._begin_window(now)
        self._follow(now)
        return self._act(now)

    def declare(self, declaration: Declaration, now: int, by_call: bool = False) -> list[Action]:
        """Ignores the server's file. Raises FailedPreconditionError: the manager declares it."""
        if by_call:
            self._refuse_calls()
        return self._act(now)

    def call(
        self, call: RolloutCommand, now: int, weight: int | None = None, again: bool = False
    ) -> list[Action]:
        """Aborts on this server, which the manager follows on all.

        Raises:
            FailedPreconditionError: It is another call, or there is nothing to abort.
        """
        if call is not RolloutCommand.ABORT:
            self._refuse_calls()
        if self.given.state not in (*_TESTED, State.BAKING):
            self._fail(f"is {self.progress.state.value}; there is nothing to abort")
        self._abort("aborted by a call", now)
        return self._act(now)

    def end_rollout(self, reason: str, now: int) -> list[Action]:
        """Leaves it to the manager, which knows of its own loads and unloads."""
        return self._act(now)

    def wake_at(self, now: int) -> int | None:
        """End of the lease, if it lets the candidate have requests."""
        ends = self._heard + self._lease_ns
        return ends if self.progress.state in _TESTED and ends > now else None

    def _transition(self, now: int) -> None:
        self._follow(now)
        progress = self.progress
        if progress.state is State.BAKING:
            candidate, other = progress.stable, progress.previous
        elif progress.state in _TESTED:
            candidate, other = progress.candidate, progress.stable
        else:
            return
        if candidate is None:
            return
        sight = self._state_of(candidate)
        if not sight.serves and (other is None or not self._state_of(other).serves):
            self._arrived = False  # the model is not loaded here, or no longer
        elif self._arrived:
            trouble = self._abort_reason(candidate)
            if sight.serves and sight.differences:
                trouble = f"the interface of version {candidate} differs: {'; '.join(sight.differences)}"
            if trouble:
                self._abort(trouble, now)
                self._follow(now)
        elif sight.serves and sight.serves == sight.files:
            self._arrived = True
            self._begin_window(now)

    def _follow(self, now: int) -> None:
        """The progress that this server has with the manager's."""
        given = self.given
        self._silent = given.state in _TESTED and now >= self._heard + self._lease_ns
        rollout = self.declaration.rollout
        if given.stable is None and rollout is not None and not rollout.split:
            # The manager does not know yet what serves here, and a newer version must not take its place.
            own = self.progress.stable
            given = replace(given, stable=self._highest_serving() if own is None else own)
        if given.candidate is not None:  # digests are the server's own
            given = replace(given, digest=self._state_of(given.candidate).files)
        if self.alarm and given.state in _TESTED:
            given = replace(given, state=State.ABORTING, weight=0, shadow=0, reason=self.alarm)
        elif self.alarm and given.state is State.BAKING and self._can_go_back:
            given = replace(
                given,
                state=State.ABORTING,
                stable=given.previous,
                candidate=given.stable,
                previous=None,
                reason=self.alarm,
            )
        elif self._silent:
            silent = f"{self.manager} is silent for {duration(self._lease_ns)}"
            given = replace(given, weight=0, shadow=0, reason=silent)
        if given.state is not self.progress.state or given.reason != self.progress.reason:
            self.progress = given
            self._enter(given.state, given.reason, given.called)
        self.progress = given

    @property
    def _sharing(self) -> bool:
        return super()._sharing and not self._silent

    @property
    def _can_go_back(self) -> bool:
        return self.given.previous is not None and bool(self._state_of(self.given.previous).serves)

    def _abort(self, reason: str, now: int, called: bool = False) -> None:
        self.alarm = self.alarm or reason
        self._urgent = True

    def _refuse_calls(self) -> None:
        raise FailedPreconditionError(
            f"the rollout of '{self.model}' is managed by {self.manager}; change it there, or abort it here"
        )


def _window_of(progress: Progress) -> tuple[object, ...]:
    """Key of a window of counters: two windows differ in one of these values."""
    return progress.number, progress.state, progress.step, progress.weight, progress.stable
