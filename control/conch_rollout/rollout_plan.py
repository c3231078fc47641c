"""Decides which version of a model gets which share of its traffic: a pure state machine of one model.

Inputs are the declaration, the versions' states, verdicts of the guards, operators' calls and passed time,
each with its time. The output is actions, to be carried out in their order. States:

| state        | event                                                    | next                           |
|--------------|----------------------------------------------------------|--------------------------------|
| resting      | a candidate appears, or `start`                          | LOADING, a new number          |
| resting      | a split is declared                                      | SPLIT                          |
| LOADING      | the candidate serves, and its interface is stable's      | STEP 0                         |
| LOADING      | its load fails, or its interface differs                 | FAILED, candidate refused      |
| STEP k       | duration over, last verdict passes                       | STEP k+1, at last BAKING       |
| STEP k       | 3 times the duration over, last verdict inconclusive     | as `on_inconclusive`           |
| STEP, PAUSED | failing verdicts, worker back-off, candidate not ready   | ABORTING                       |
| STEP, PAUSED | `pause`, `resume`, `advance`, `set_weight`, `promote`    | as named; `set_weight`: PAUSED |
| live         | the candidate's files change, or a newer candidate comes | LOADING, a new number          |
| live         | the declaration changes                                  | IDLE, and on from there        |
| SPLIT        | the declaration changes, with the same versions          | SPLIT, with other shares       |
| SPLIT        | the declaration changes otherwise                        | IDLE, and on from there        |
| BAKING       | `keep` over, last verdict does not fail                  | DONE, old version released     |
| BAKING       | failing verdicts, worker back-off, stable not ready      | ABORTING, to the old version   |
| live, BAKING | `abort`; in BAKING also `rollback`                       | ABORTING                       |
| resting      | `rollback`                                               | ROLLING_BACK, old version held |
| ROLLING_BACK | the old version is ready / fails                         | ABORTING / DONE                |
| ABORTING     | the candidate serves no longer                           | ABORTED, candidate refused     |

Resting are IDLE, FAILED, ABORTED and DONE; live are LOADING, STEP and PAUSED. A refused version is no
candidate, and is not loaded for the version policy either, until its files change or `start` names it with
'again'; a declaration that makes it stable or part of a split waits for that, too. Without a ready stable
version there is no route, and an empty version means the newest ready one.

Promotion is one step: save, publish, move the label, release. An abort publishes first. After a restart a
step begins again at its weight once its versions serve.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from conch.core.errors import FailedPreconditionError, InvalidArgumentError
from conch_control.repository.layout import ROLLOUT_FILE
from conch_rollout.guards import SURE, Result, Verdict
from conch_rollout.rollout_file import (
    NEWEST,
    STABLE,
    WHOLE,
    Declaration,
    OnInconclusive,
    Rollout,
    percent,
)
from conch_rollout.rollout_state import (
    LIVE,
    RESTING,
    Action,
    Note,
    Progress,
    Publish,
    PublishLabels,
    Refusal,
    RolloutCommand,
    Save,
    Select,
    State,
    Traffic,
    VersionSight,
)
from conch_rollout.split_places import Places, first_places, moved_places

EXTENSION = 3
"""A step without a verdict lasts at most so many times its duration."""
LEAST_EXTENSION_NS = 60_000_000_000
_MOST_REFUSED = 100
_STEPPING = frozenset({State.STEP, State.PAUSED})
_SHARING = _STEPPING | {State.SPLIT}
_ENDS = {
    **dict.fromkeys(LIVE, "promote or abort it first"),
    State.BAKING: "wait until the time of 'keep' is over, or roll it back first",
    State.SPLIT: "delete it first",
}
"""Ways to end a rollout that stands in the way of another one."""
_ALARMING = frozenset({State.FAILED, State.ABORTING, State.ROLLING_BACK})
_NOTHING = VersionSight()


def next_number(group: str, last: int) -> int:
    """The number of a model's next rollout after its last one, if no other model shares its group."""
    return last + 1


@dataclass
class RolloutPlan:
    """State machine of one model; not thread-safe.

    Args:
        next_number: Gives a group and the model's last number the next one. Models of a group give one key
            one side only if their rollouts have one number.

    Attributes:
        from_file: The declaration came by file, so that calls can't change it.
        window: Number of the current window of counters: each new one begins at zero.
        verdict: The last verdict on this window.
        since: Start of the state, or of its last window.
        notes: Decisions since the caller has last taken them out.
    """

    model: str
    declaration: Declaration
    progress: Progress = field(default_factory=Progress)
    from_file: bool = True
    next_number: Callable[[str, int], int] = next_number
    window: int = field(default=0, init=False)
    verdict: Verdict | None = field(default=None, init=False)
    since: int = field(default=0, init=False)
    notes: list[Note] = field(default_factory=list, init=False)
    _versions: Mapping[int, VersionSight] = field(default_factory=dict, init=False)
    _seen: bool = field(default=False, init=False)
    _arrived: bool = field(default=False, init=False)  # the version under test has served in this process
    _failing: int = field(default=0, init=False)
    _old_failure: tuple[int, float] = field(default=(0, 0.0), init=False)  # of a load before this rollout
    _urgent: bool = field(default=False, init=False)  # publish before saving
    _redeclared: bool = field(default=False, init=False)  # what goes with a route has changed
    _traffic: Traffic | None = field(default=None, init=False)
    _labels: Mapping[str, int] = field(default_factory=dict, init=False)
    _selection: Select = field(default_factory=Select, init=False)
    _saved: Progress = field(default_factory=Progress, init=False)

    def __post_init__(self) -> None:
        self._saved = self.progress

    # --- inputs

    def start(self, now: int) -> list[Action]:
        """Begins, before the model is loaded; the first action tells which versions to load."""
        self.since = now
        self._follow_declaration()
        return self._act(now)

    def declare(self, declaration: Declaration, now: int, by_call: bool = False) -> list[Action]:
        """Processes another declaration, from the file or by a call.

        Raises:
            FailedPreconditionError: A call may not change what a file declares, or make a refused version
                stable.
        """
        if by_call:
            self._refuse_calls()
            if declaration.stable not in (None, self.declaration.stable):
                self._admit([declaration.stable], False)
        self.from_file = not by_call and declaration != Declaration()
        changed, self.declaration = declaration != self.declaration, declaration
        self._follow_declaration()
        actions = self._act(now)
        if changed and self.held_out:
            self._add_note(f"the rollout of '{self.model}' {self.held_out}", logging.WARNING)
        return actions

    def start_by_call(
        self, declaration: Declaration, now: int, again: bool = False, begun: bool = False
    ) -> list[Action]:
        """Declares a rollout and starts it, or changes nothing.

        Args:
            declaration: The declaration.
            now: The time.
            again: Also start with refused versions.
            begun: Also take the place of one that runs.

        Raises:
            FailedPreconditionError: One runs, a file declares it, or the candidate or a version of the split
                is missing or refused.
        """
        self._refuse_calls()
        before = self.declaration, self.progress
        split = () if declaration.rollout is None else declaration.rollout.split
        changes_split = bool(split) and self.progress.state is State.SPLIT
        if self.progress.state not in RESTING and not begun and not changes_split:
            self._fail_begun()
        for version, _ in split:
            if not self._state_of(version).exists:
                self._fail(f"can't split: version {version} is not in the repository")
        self._admit([version for version, _ in split], again)
        self.declaration = declaration
        self._follow_declaration()
        self._follow_stable()
        try:
            if not self._rollout.split and self.progress.state in RESTING:
                self._start(again)
        except FailedPreconditionError:
            self.declaration, self.progress = before
            raise
        return self._act(now)

    def take_states(self, versions: Mapping[int, VersionSight], now: int) -> list[Action]:
        """Processes the states of all versions."""
        before, self._versions = self._versions, dict(versions)
        self._seen = True
        progress = self.progress
        kept = tuple(
            each for each in progress.refused if self._state_of(each.version).files in ("", each.digest)
        )
        self.progress = replace(progress, refused=kept)
        for version in (progress.stable, progress.candidate):
            old = before.get(version, _NOTHING).serves if version is not None else ""
            if version is not None and old and self._state_of(version).serves not in ("", old):
                self._begin_window(now)  # another copy, whose counters begin at zero
        return self._act(now)

    def take_verdict(self, verdict: Verdict, window: int, now: int) -> list[Action]:
        """Processes a verdict on a window; verdicts on former windows are ignored."""
        if window != self.window or self.progress.state not in (*_STEPPING, State.BAKING):
            return []
        self.verdict = verdict
        if verdict.result is Result.PASS:
            self._failing = 0
        elif verdict.result is Result.FAIL:
            self._failing += 1
            if self._failing >= self._rollout.guard.failures or verdict.p < SURE:
                self._abort(verdict.sentence, now)
        return self._act(now)

    def call(
        self, call: RolloutCommand, now: int, weight: int | None = None, again: bool = False
    ) -> list[Action]:
        """Processes an operator's call.

        Args:
            call: The call.
            now: Its time.
            weight: With `RolloutCommand.SET_WEIGHT`, the candidate's share of `WHOLE`.
            again: With `RolloutCommand.START`, also starts with a refused candidate.

        Raises:
            FailedPreconditionError: The state does not allow it; the text says what would.
            InvalidArgumentError: The weight is missing or out of range.
        """
        if self.progress.state is State.SPLIT:
            self._fail(f"has a fixed split; change rollout.split {self._place}")
        match call:
            case RolloutCommand.START:
                self._start(again)
            case RolloutCommand.ABORT:
                self._stop_by_call("aborted by a call", now)
            case RolloutCommand.ROLLBACK:
                self._roll_back(now)
            case _:
                self._step_by_call(call, weight, now)
        return self._act(now)

    def end_rollout(self, reason: str, now: int) -> list[Action]:
        """Ends a rollout that a load or unload by others has made pointless."""
        if self.progress.state in LIVE:
            self._abort(reason, now, called=True)
        elif self.progress.state in (State.BAKING, State.ROLLING_BACK):
            self._enter(State.DONE, reason)
        return self._act(now)

    def tick(self, now: int) -> list[Action]:
        """Processes passed time; see `wake_at`."""
        return self._act(now)

    def wake_at(self, now: int) -> int | None:
        """Time of the next `tick`; None for none."""
        state = self.progress.state
        if state is State.STEP:
            least = self._rollout.steps[self.progress.step].least_ns
            times = [self.since + least, self.since + _extended(least)]
        elif state is State.BAKING:
            times = [self.since + self._rollout.keep_ns]
        else:
            return None
        return min((time for time in times if time > now), default=None)

    # --- calls

    def _start(self, again: bool) -> None:
        if self.progress.state not in RESTING:
            self._fail_begun()
        awaited = self._awaited
        if awaited:
            self._admit(awaited, again)
            return
        rollout = self.declaration.rollout
        if rollout is None:
            self._fail("is not declared; give a candidate and steps")
        if self._named_candidate(rollout) is None:
            self._fail(f"has no candidate: {self._missing(rollout)}")

    def _admit(self, versions: Sequence[int], again: bool) -> None:
        """Ends refusals. Raises FailedPreconditionError: without `again`, a version is refused."""
        for version in versions:
            if self.progress.refusal(version) is not None:
                if not again:
                    self._fail(self._refused_text(version))
                self._allow(version)

    def _stop_by_call(self, reason: str, now: int) -> None:
        progress = self.progress
        if progress.state is State.BAKING and progress.previous is None:
            self._fail("can't go back: the previous version is gone")
        if progress.state in LIVE or progress.state is State.BAKING:
            self._abort(reason, now, called=True)
        elif progress.state is not State.ABORTING:
            self._fail(f"is {progress.state.value}; there is nothing to abort")

    def _roll_back(self, now: int) -> None:
        progress = self.progress
        if progress.state in LIVE:
            self._fail(f"is {progress.state.value}; abort it instead")
        if progress.previous is None or not self._state_of(progress.previous).exists:
            self._fail("has no previous version to go back to")
        self._admit([progress.previous], False)
        if progress.state is State.BAKING:
            self._abort("rolled back by a call", now, called=True)
        elif progress.state in RESTING:
            self._go_back("rolled back by a call", now, called=True)
        else:
            self._fail(f"is {progress.state.value} already")

    def _step_by_call(self, call: RolloutCommand, weight: int | None, now: int) -> None:
        state = self.progress.state
        if state not in _STEPPING:
            self._fail(f"is {state.value}; {call.value} needs one at a step")
        if call is RolloutCommand.PAUSE:
            self._enter(State.PAUSED, "paused by a call", called=True)
        elif call is RolloutCommand.RESUME:
            if state is State.STEP:
                self._fail("is not paused")
            self._enter(State.STEP, "resumed by a call", called=True)
            self._begin_window(now)
        elif call in (RolloutCommand.ADVANCE, RolloutCommand.PROMOTE) and not self._sharing:
            self._fail(f"waits for version {self.progress.candidate} and stable to be ready")
        elif call is RolloutCommand.ADVANCE:
            self._next_step("advanced by a call", now, called=True)
        elif call is RolloutCommand.PROMOTE:
            self._promote("promoted by a call", now, called=True)
        else:
            if weight is None or not 0 <= weight <= WHOLE:
                raise InvalidArgumentError(f"weight: must be from 0 to {WHOLE}, for 0 to 100 %, not {weight}")
            self.progress = replace(self.progress, weight=weight)
            self._enter(State.PAUSED, f"weight set to {percent(weight)} by a call", called=True)
            self._begin_window(now)

    def _refuse_calls(self) -> None:
        if self.from_file:
            raise FailedPreconditionError(
                f"the rollout of '{self.model}' is declared in {ROLLOUT_FILE}; change it there, or in the "
                f"model's repository"
            )

    def _fail_begun(self) -> NoReturn:
        state = self.progress.state
        self._fail(f"is {state.value} already; {_ENDS.get(state, 'wait until it has ended')}")

    def _fail(self, text: str) -> NoReturn:
        raise FailedPreconditionError(f"the rollout of '{self.model}' {text}")

    @property
    def _place(self) -> str:
        return f"in {ROLLOUT_FILE}" if self.from_file else "by a call"

    def _missing(self, rollout: Rollout) -> str:
        stable = self.progress.stable
        if stable is None or not self._state_of(stable).exists:
            return "no version is stable yet"
        if self._label_waits:
            return f"the label {STABLE} waits for version {self.declaration.stable}"
        if rollout.candidate == NEWEST:
            return f"no version is above version {stable}"
        if rollout.candidate == stable:
            return f"version {stable} is stable already"
        return f"version {rollout.candidate} is not in the repository"

    # --- the declaration

    def _follow_declaration(self) -> None:
        """Ends what the former declaration asked for."""
        progress, rollout = self.progress, self.declaration.rollout
        digest = rollout.digest if rollout is not None else ""
        other_stable = self._label_waits
        if (
            digest == progress.declared
            and not other_stable
            and progress.step < len(self._rollout.steps or "-")
        ):
            return
        if digest != progress.declared:
            self.progress = replace(progress, declared=digest)
            self._redeclared = True
        changed = "the declaration has changed"
        if progress.state is State.SPLIT and rollout is not None and _same_versions(progress, rollout):
            places = moved_places(_places(progress), rollout.split)
            self.progress = replace(self.progress, weight=rollout.split[1][1], places=places)
        elif progress.state is State.ROLLING_BACK and digest == progress.declared:
            pass  # the label is followed afterwards
        elif progress.state in (State.BAKING, State.ROLLING_BACK) and rollout is not None:
            if other_stable:
                self._enter(State.DONE, changed)
        elif progress.state in RESTING:
            # What is held out stays so, with its reason: no declaration puts it into service.
            stays = progress.candidate is not None and progress.refusal(progress.candidate) is not None
            if digest != progress.declared and (rollout is None or not stays):
                self._enter_resting("")
        elif progress.state is not State.ABORTING:
            self._enter_resting(changed)

    def _enter_resting(self, reason: str) -> None:
        self._urgent = self._urgent or self.progress.state in _SHARING
        self.progress = replace(
            self.progress,
            candidate=None,
            digest="",
            step=0,
            weight=0,
            shadow=0,
            state=State.IDLE,
            reason=reason,
            places=(),
        )
        if reason:
            self._add_note(f"rollout {self.progress.number} of '{self.model}' ends: {reason}")

    @property
    def _label_waits(self) -> bool:
        """True if the label ``stable`` names another version than it did, which is not stable yet."""
        return self.declaration.stable not in (None, self.progress.declared_stable)

    @property
    def _rollout(self) -> Rollout:
        return self.declaration.rollout or Rollout()

    def _highest_serving(self) -> int | None:
        """The highest version that serves and is not held out."""
        serving = (each for each, sight in self._versions.items() if sight.serves)
        return max((each for each in serving if self.progress.refusal(each) is None), default=None)

    def _follow_stable(self) -> None:
        """Takes over the label, or chooses a first stable version."""
        progress, label = self.progress, self.declaration.stable
        rollout = self.declaration.rollout
        if label is None:
            if rollout is None:
                if progress.stable is not None and progress.state in RESTING:
                    self.progress = Progress(number=progress.number, refused=progress.refused)
                return
            stable = progress.stable
            if stable is None and not rollout.split:
                stable = self._highest_serving()
            self.progress = replace(progress, stable=stable, declared_stable=None)
        elif label != progress.declared_stable and progress.state in RESTING:
            moves = progress.stable not in (None, label)
            if progress.refusal(label) is not None or (moves and not self._state_of(label).serves):
                return  # the label moves once the version is ready
            previous = progress.stable if moves else progress.previous
            self.progress = replace(progress, stable=label, previous=previous, declared_stable=label)
            if moves:
                self._add_note(f"the label {STABLE} of '{self.model}' is version {label} now")

    # --- transitions

    def _act(self, now: int) -> list[Action]:
        """Makes all transitions that are due, and returns what has to change."""
        while self._seen:
            before = self.progress
            self._transition(now)
            if self.progress == before:
                break
        traffic, labels, selection = self._wanted_traffic(), self._wanted_labels(), self._wanted_selection()
        publish: list[Action] = []
        if traffic != self._traffic or (self._redeclared and traffic is not None):
            publish.append(Publish(traffic))
        if labels != self._labels:
            publish.append(PublishLabels(labels))
        save: list[Action] = [Save(self.progress)] if self.progress != self._saved else []
        actions = publish + save if self._urgent else save + publish
        if selection != self._selection:
            actions.append(Select(selection.hold, selection.out))
        self._traffic, self._labels, self._selection = traffic, labels, selection
        self._saved, self._urgent, self._redeclared = self.progress, False, False
        return actions

    def _transition(self, now: int) -> None:
        self._drop_missing()
        self._follow_stable()
        state = self.progress.state
        if state in RESTING:
            self._leave_rest(now)
        elif state in LIVE:
            if not self._replace_candidate(now):
                if state is State.LOADING:
                    self._loading(now)
                else:
                    self._stepping(now)
        elif state is State.BAKING:
            self._baking(now)
        elif state is State.ROLLING_BACK:
            self._rolling_back()
        elif state is State.ABORTING:
            left = self.progress.candidate
            if left is None or not self._state_of(left).serves or left in self._labelled:
                self._enter(State.ABORTED, self.progress.reason, self.progress.called)

    def _drop_missing(self) -> None:
        """Drops progress whose stable version no longer exists."""
        progress = self.progress
        if progress.previous is not None and not self._state_of(progress.previous).exists:
            self.progress = progress = replace(progress, previous=None)
        stable, state = progress.stable, progress.state
        if stable is None or self._state_of(stable).exists or state is State.SPLIT:
            return
        if state in RESTING and stable == self.declaration.stable:
            return  # the label waits for its version
        if state is State.BAKING and progress.previous is not None:
            return  # an abort leads there
        self._add_note(
            f"version {stable} of '{self.model}', its stable version, no longer exists: the progress of its "
            f"rollout is dropped",
            logging.WARNING,
        )
        self._urgent = True
        self.progress = Progress(number=progress.number, refused=progress.refused, declared=progress.declared)

    def _leave_rest(self, now: int) -> None:
        rollout = self.declaration.rollout
        if rollout is None:
            return
        if rollout.split:
            if self._awaited:
                return
            (stable, _), (other, weight), *_ = rollout.split
            before = self.progress.stable
            number = self.next_number(rollout.group, self.progress.number)
            self.progress = replace(
                self.progress,
                number=number,
                stable=stable,
                previous=self.progress.previous if before in (None, stable) else before,
                declared_stable=self.declaration.stable,
                candidate=other,
                weight=weight,
                places=first_places(rollout.split),
            )
            self._enter(State.SPLIT, "")
            return
        candidate = self._candidate()
        if candidate is not None:
            self._begin(candidate, "", now)

    def _named_candidate(self, rollout: Rollout) -> int | None:
        """The version that the declaration means, refused or not."""
        stable = self.progress.stable
        if stable is None or not self._state_of(stable).exists or self._label_waits:
            return None
        present = {version for version, sight in self._versions.items() if sight.files}
        if rollout.candidate == NEWEST:
            newest = max(present, default=0)
            return newest if newest > stable else None
        version = rollout.candidate
        return version if isinstance(version, int) and version in present and version != stable else None

    @property
    def _awaited(self) -> list[int]:
        """Refused versions that the declaration would bring back to clients."""
        stable, rollout = self.declaration.stable, self.declaration.rollout
        versions: list[int | None] = []
        if stable is not None and self._label_waits:
            versions = [stable]
        elif rollout is not None and rollout.split:
            versions = [version for version, _ in rollout.split]
        elif rollout is not None:
            versions = [self._named_candidate(rollout)]
        return [each for each in versions if each is not None and self.progress.refusal(each) is not None]

    @property
    def held_out(self) -> str:
        """Sentence on a version that a resting rollout is not begun with; empty if there is none."""
        awaited = self._awaited if self.progress.state in RESTING else []
        return self._refused_text(awaited[0]) if awaited else ""

    def _refused_text(self, version: int) -> str:
        progress = self.progress
        reason = f": {progress.reason}" if progress.reason and progress.candidate == version else ""
        return f"holds version {version} out{reason}; change its files, or start it with 'again'"

    def _candidate(self) -> int | None:
        """The version to test now; None for none."""
        version = self._named_candidate(self._rollout)
        return None if version is None or self.progress.refusal(version) is not None else version

    def _begin(self, candidate: int, reason: str, now: int) -> None:
        """Begins a rollout: new number, new salt, counters at zero."""
        self._urgent = self._urgent or self.progress.state in _SHARING
        sight = self._state_of(candidate)
        self.progress = replace(
            self.progress,
            number=self.next_number(self._rollout.group, self.progress.number),
            candidate=candidate,
            digest=sight.files,
            step=0,
            weight=0,
            shadow=0,
        )
        self._old_failure = (candidate, sight.since) if sight.failure else (0, 0.0)
        self._arrived = False
        self._enter(State.LOADING, reason)
        self._begin_window(now)

    def _replace_candidate(self, now: int) -> bool:
        """Begins again if the candidate has changed or is another one; aborts if it is gone."""
        progress = self.progress
        wanted, candidate = self._candidate(), progress.candidate
        if wanted is not None and wanted != candidate:
            self._begin(wanted, f"version {wanted} replaces version {candidate}", now)
            return True
        if candidate is None:  # progress from a file that was edited
            self._enter_resting("there is no candidate")
            return True
        files = self._state_of(candidate).files
        if not files:
            self._abort(f"version {candidate} is no longer in the repository", now)
            return True
        if files != progress.digest:
            self._begin(candidate, f"the files of version {candidate} have changed", now)
            return True
        return False

    def _loading(self, now: int) -> None:
        progress = self.progress
        candidate = progress.candidate or 0
        sight = self._state_of(candidate)
        if sight.serves != progress.digest:
            if self._failed(candidate):
                self._refuse(candidate)
                self._enter(State.FAILED, sight.failure)
        elif sight.differences:
            self._refuse(candidate)
            self._enter(State.FAILED, f"its interface differs: {'; '.join(sight.differences)}")
        elif sight.differences is not None and self._stable_ready:
            self._enter_step(0, "", now)

    def _stepping(self, now: int) -> None:
        progress, rollout = self.progress, self._rollout
        candidate = progress.candidate or 0
        sight = self._state_of(candidate)
        trouble = self._abort_reason(candidate)
        if sight.serves and sight.differences:
            trouble = f"the interface of version {candidate} differs: {'; '.join(sight.differences)}"
        if trouble:
            self._abort(trouble, now)
            return
        if not self._sharing:
            self._begin_window(now)
            return
        if not self._arrived:
            self._arrived = True
            self._begin_window(now)
        if progress.state is State.PAUSED:
            return
        least, elapsed = rollout.steps[progress.step].least_ns, now - self.since
        result = Result.INCONCLUSIVE if self.verdict is None else self.verdict.result
        if elapsed >= least and self.verdict is not None and result is Result.PASS:
            self._next_step(self.verdict.sentence, now)
        elif elapsed >= _extended(least) and result is Result.INCONCLUSIVE:
            said = self.verdict.sentence if self.verdict is not None else "there was no verdict"
            if rollout.on_inconclusive is OnInconclusive.ADVANCE:
                self._next_step(said, now)
            elif rollout.on_inconclusive is OnInconclusive.ABORT:
                self._abort(said, now)
            else:
                self._enter(State.PAUSED, said)

    def _baking(self, now: int) -> None:
        stable = self.progress.stable or 0
        trouble = self._abort_reason(stable)
        if trouble:
            self._abort(trouble, now)
        elif not self._stable_ready:
            self._begin_window(now)
        else:
            if not self._arrived:
                self._arrived = True
                self._begin_window(now)
            failing = self.verdict is not None and self.verdict.result is Result.FAIL
            if now - self.since >= self._rollout.keep_ns and not failing:
                self._enter(State.DONE, self.progress.reason, self.progress.called)

    def _rolling_back(self) -> None:
        progress = self.progress
        left, back = progress.stable, progress.previous
        if back is None or self._failed(back):
            why = "it is gone" if back is None else self._state_of(back).failure
            self._enter(State.DONE, f"can't go back to the previous version: {why}")
        elif self._state_of(back).serves and left is not None:
            self._refuse(left)
            self._urgent = True
            files = self._state_of(left).files
            self.progress = replace(
                self.progress, stable=back, candidate=left, digest=files, previous=None, weight=0, shadow=0
            )
            self._enter(State.ABORTING, progress.reason, progress.called)

    def _abort_reason(self, version: int) -> str:
        """Reason for which a version under test must leave; empty if it may stay."""
        sight = self._state_of(version)
        if self._failed(version) and not sight.serves:
            return f"version {version} could not be loaded: {sight.failure}"
        if not sight.serves and self._arrived:
            return f"version {version} is no longer ready"
        return f"the workers of version {version} fail again and again" if sight.backs_off else sight.alarm

    def _failed(self, version: int) -> bool:
        sight = self._state_of(version)
        return bool(sight.failure) and (version, sight.since) != self._old_failure

    def _enter_step(self, step: int, reason: str, now: int, called: bool = False) -> None:
        chosen = self._rollout.steps[step]
        self.progress = replace(self.progress, step=step, weight=chosen.weight, shadow=chosen.shadow)
        self._arrived = True
        self._enter(State.STEP, reason, called)
        self._begin_window(now)

    def _next_step(self, reason: str, now: int, called: bool = False) -> None:
        step = self.progress.step + 1
        if step < len(self._rollout.steps):
            self._enter_step(step, reason, now, called)
        else:
            self._promote(reason, now, called)

    def _promote(self, reason: str, now: int, called: bool = False) -> None:
        """All traffic to the candidate, which becomes stable."""
        progress = self.progress
        self.progress = replace(
            progress,
            previous=progress.stable,
            stable=progress.candidate,
            candidate=None,
            digest="",
            step=0,
            weight=0,
            shadow=0,
        )
        self._enter(State.BAKING, reason, called)
        self._begin_window(now)

    def _abort(self, reason: str, now: int, called: bool = False) -> None:
        """All traffic back to stable; in BAKING to the version before."""
        progress = self.progress
        if progress.state is State.BAKING:
            self._go_back(reason, now, called)
            return
        self._urgent = True
        if progress.candidate is not None:
            self._refuse(progress.candidate)
        self.progress = replace(self.progress, weight=0, shadow=0)
        self._enter(State.ABORTING, reason, called)

    def _go_back(self, reason: str, now: int, called: bool) -> None:
        back = self.progress.previous or 0
        sight = self._state_of(back)
        self._old_failure = (back, sight.since) if sight.failure else (0, 0.0)
        self._enter(State.ROLLING_BACK, reason, called)
        self._begin_window(now)

    def _refuse(self, version: int) -> None:
        self._allow(version)
        digest = self._state_of(version).files or self.progress.digest
        refused = (*self.progress.refused, Refusal(version, digest))
        self.progress = replace(self.progress, refused=refused[-_MOST_REFUSED:])

    def _allow(self, version: int) -> None:
        refused = tuple(each for each in self.progress.refused if each.version != version)
        self.progress = replace(self.progress, refused=refused)

    def _begin_window(self, now: int) -> None:
        self.window += 1
        self.since = now
        self.verdict = None
        self._failing = 0

    def _enter(self, state: State, reason: str, called: bool = False) -> None:
        self.progress = progress = replace(self.progress, state=state, reason=reason, called=called)
        text = f"rollout {progress.number} of '{self.model}' is {state.value}"
        if state is State.STEP:
            steps = self._rollout.steps
            text += f" {progress.step + 1} of {len(steps)} ({steps[progress.step]})"
        if progress.candidate is not None:
            text += f", version {progress.candidate} beside {progress.stable}"
        self._add_note(
            f"{text}: {reason}" if reason else text, logging.WARNING if state in _ALARMING else logging.INFO
        )

    def _take_published(self, plan: RolloutPlan) -> None:
        """Goes on from what another plan has published and selected."""
        self._traffic, self._labels, self._selection = plan._traffic, plan._labels, plan._selection
        self._redeclared = True

    def _add_note(self, text: str, level: int = logging.INFO) -> None:
        self.notes.append(Note(text, level))

    # --- outputs

    def _state_of(self, version: int) -> VersionSight:
        return self._versions.get(version, _NOTHING)

    @property
    def waiting(self) -> list[int]:
        """Versions of a split whose requests stable gets, as they can't serve."""
        if self.progress.state is not State.SPLIT:
            return []
        versions = {version for version, _ in _places(self.progress)} - {self.progress.stable}
        return sorted(version for version in versions if not self._fits(version))

    @property
    def _stable_ready(self) -> bool:
        stable = self.progress.stable
        return stable is not None and bool(self._state_of(stable).serves)

    @property
    def _sharing(self) -> bool:
        """True if the candidate may get requests."""
        progress = self.progress
        if progress.state not in _STEPPING or progress.candidate is None or not self._stable_ready:
            return False
        return self._state_of(progress.candidate).serves == progress.digest and self._fits(progress.candidate)

    def _fits(self, version: int) -> bool:
        """True if a version is ready, and has the interface of the stable one."""
        sight = self._state_of(version)
        return bool(sight.serves) and sight.differences == ()

    def _wanted_traffic(self) -> Traffic | None:
        progress = self.progress
        if progress.stable is None or not self._stable_ready:
            return None
        places: Places = ()
        if progress.state is State.SPLIT:
            # Stable has the places of those that can't serve, and no other key moves.
            places = tuple(
                (version if self._fits(version) else progress.stable, count)
                for version, count in _places(progress)
            )
        if not self._sharing and all(version == progress.stable for version, _ in places):
            return Traffic(progress.stable)
        key = f"{self._rollout.group or self.model}\0{progress.number}".encode(errors="surrogatepass")
        salt = hashlib.blake2b(key, digest_size=16).digest()
        candidate = progress.candidate
        if places and candidate is not None and not self._fits(candidate):
            candidate = None  # no match rule leads to it
        traffic = Traffic(progress.stable, candidate, salt=salt, places=places, rollout=progress.number)
        if not places:
            traffic = replace(traffic, weight=progress.weight, shadow_percent=progress.shadow / 100)
        return traffic

    @property
    def _labelled(self) -> frozenset[int]:
        """Versions that labels other than ``stable`` name."""
        return frozenset(version for label, version in self.declaration.labels.items() if label != STABLE)

    def _wanted_labels(self) -> dict[str, int]:
        """Labels with their versions; one whose version is not ready stays with a former one that is."""
        wanted = dict(self.declaration.labels)
        wanted.pop(STABLE, None)
        if self.progress.stable is not None:
            wanted[STABLE] = self.progress.stable
        labels = {}
        for label, version in wanted.items():
            ready = [each for each in (version, self._labels.get(label, 0)) if self._state_of(each).serves]
            if ready or label in self.declaration.labels:
                labels[label] = ready[0] if ready else version
        return labels

    def _wanted_selection(self) -> Select:
        progress = self.progress
        held = set(self._labelled)
        for version in (progress.stable, self.declaration.stable):
            # A label that has not been followed yet waits for its version.
            waits = version != progress.declared_stable and version not in self._awaited
            if version is not None and (version == progress.stable or waits):
                held.add(version)
        out = {each.version for each in progress.refused}
        beside: set[int] = set()
        if progress.state is State.SPLIT:
            beside |= {version for version, _ in _places(progress)}
        elif progress.state in LIVE:
            beside |= _numbers(progress.candidate)
        elif progress.state in (State.BAKING, State.ROLLING_BACK):
            beside |= _numbers(progress.previous)
        elif progress.state is State.ABORTING and not self._stable_ready:
            held |= _numbers(progress.candidate)  # better than no version at all
        rollout = self.declaration.rollout
        if rollout is not None and not rollout.split:
            if rollout.candidate == NEWEST and progress.stable:
                out |= {version for version in self._versions if version > progress.stable}
            elif progress.stable is None and self._versions.keys() - {rollout.candidate}:
                beside |= {version for version in self._versions if version == rollout.candidate}
        for version in beside:
            # Stable is loaded and has its route first: no request may miss the route, and a candidate that
            # can't be loaded keeps no other version from serving.
            (held if self._stable_ready or self._state_of(version).serves else out).add(version)
        return Select(frozenset(held), frozenset(out - held))


def _same_versions(progress: Progress, rollout: Rollout) -> bool:
    """True if a split has the versions of the declared one, and the same stable one."""
    declared = [version for version, _ in rollout.split]
    placed = {version for version, _ in _places(progress)}
    return bool(declared) and declared[0] == progress.stable and set(declared) == placed


def _places(progress: Progress) -> Places:
    """The places of a split; the progress of a former release has only the weight."""
    if progress.places or progress.stable is None or progress.candidate is None:
        return progress.places
    return first_places(((progress.stable, WHOLE - progress.weight), (progress.candidate, progress.weight)))


def _numbers(version: int | None) -> frozenset[int]:
    return frozenset() if version is None else frozenset({version})


def _extended(least_ns: int) -> int:
    """Longest duration of a step without a verdict."""
    return max(EXTENSION * least_ns, LEAST_EXTENSION_NS)
