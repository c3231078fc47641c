"""The instances of one model version: made, warmed up, added to, taken away from, closed."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from conch.core.backend import BackendInstance, BackendModel
from conch.core.execution.limiter import RateLimiter, claim_of
from conch.core.execution.placement import InstanceKind, Placement, kind_of, place
from conch.core.execution.runner import Runner
from conch.core.execution.together import run_together
from conch.core.execution.warmup import Warmup
from conch.core.scheduling.rate import Claim
from conch.core.spec import InstanceGroup, ModelSpec

log = logging.getLogger(__name__)

_LEAST_TOGETHER = 2
"""So many instances are made at the same time on a single core, too: what takes long may be a wait."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One instance.

    Attributes:
        kind: What it shares with instances that may stand for it.
        placement: Where it lives.
        instance: The instance.
    """

    kind: InstanceKind
    placement: Placement
    instance: BackendInstance


class Fleet:
    """All instances of a model version, passive ones too.

    Args:
        spec: The model version.
        model: What the backend loaded; belongs to the fleet from here on.
        limiter: Where instances that need resources get them; None where rates are not limited.

    Attributes:
        claims: The claims of those that need resources.
    """

    def __init__(self, spec: ModelSpec, model: BackendModel, limiter: RateLimiter | None = None) -> None:
        self._spec = spec
        self._model = model
        self.limiter = limiter
        self.claims: dict[BackendInstance, Claim] = {}
        self._lock = threading.Lock()  # guards what follows, and closing: each instance is closed once
        self._members: list[Member] = []

    @property
    def notes(self) -> Sequence[str]:
        """What the model does against its config."""
        return () if self._model.notes is None else self._model.notes.texts

    @property
    def active(self) -> list[BackendInstance]:
        """Instances that run batches."""
        with self._lock:
            return [member.instance for member in self._members if not member.placement.passive]

    @property
    def all(self) -> list[BackendInstance]:
        """All instances."""
        with self._lock:
            return [member.instance for member in self._members]

    def create(self, warm_up: Warmup) -> None:
        """Makes the instances of all groups; what was made when one fails, `close` closes.

        Raises:
            ConchError: An instance can't be made, can't run a sample, or could never run.
        """
        self._make(
            [
                (kind_of(group, placement.device_id), placement)
                for group in self._spec.instance_groups
                for placement in place([group])
            ],
            warm_up,
        )

    def prepare(
        self,
        groups: Sequence[InstanceGroup],
        warm_up: Warmup,
        runner: Runner,
        on_commit: Callable[[], None] = lambda: None,
    ) -> Resize:
        """Makes the instances that other groups need, and finds those that they don't.

        Args:
            groups: Groups of instances of the same kinds, with other counts, names or in another order.
            warm_up: What runs on each new instance.
            runner: Runs the instances.
            on_commit: Called when the instances have changed.

        Raises:
            ConchError: An instance can't be made; nothing has changed.
        """
        wanted: dict[InstanceKind, list[Placement]] = {}
        for group in groups:
            for placement in place([group]):
                wanted.setdefault(kind_of(group, placement.device_id), []).append(placement)
        missing: list[tuple[InstanceKind, Placement]] = []
        surplus: list[tuple[list[Member], int]] = []
        for kind, placements in wanted.items():
            there = [member for member in self._members if member.kind == kind]
            names = Counter(member.placement.name for member in there)
            new = []
            for placement in placements:
                if names[placement.name]:
                    names[placement.name] -= 1
                else:
                    new.append(placement)  # if there is an instance of another name left, that will do
            lacking = max(len(placements) - len(there), 0)
            missing += [(kind, placement) for placement in new[len(new) - lacking :]]
            if len(there) > len(placements):
                surplus.append((there, len(there) - len(placements)))
        return Resize(self, runner, self._make(missing, warm_up), surplus, on_commit)

    def close(self) -> None:
        """Closes everything; nothing may run any more."""
        with self._lock:
            self._close(list(self._members))
            self._try(self._model.close)

    def close_some(self, members: Sequence[Member]) -> None:
        """Closes instances that run nothing any more, unless it has been done already."""
        with self._lock:
            self._close([member for member in members if member in self._members])

    def _make(self, placed: Sequence[tuple[InstanceKind, Placement]], warm_up: Warmup) -> list[Member]:
        claims = [claim_of(self._spec.name, placement) for _, placement in placed]
        wanted = [claim for claim in claims if claim is not None] if self.limiter is not None else []
        if self.limiter is not None:
            self.limiter.add(wanted)  # first: what could never run need not be made
        places: dict[int, Member] = {}

        def make(number: int) -> None:
            kind, placement = placed[number]
            claim = claims[number]
            instance = self._model.create_instance(placement)
            places[number] = Member(kind, placement, instance)
            if self.limiter is not None and claim is not None:
                self.claims[instance] = claim
            warm_up.run(instance, placement.name)
            if warm_up:
                instance.warm_again(lambda started: warm_up.run(started, placement.name))

        try:
            together = max(_cores(), _LEAST_TOGETHER) if self._model.makes_together else 1
            run_together([partial(make, number) for number in range(len(placed))], together)
        except BaseException:
            made = [places[number] for number in sorted(places)]
            with self._lock:
                self._members += made
                self._close(made)
            if self.limiter is not None:
                self.limiter.remove(wanted)
            raise
        made = [places[number] for number in range(len(placed))]
        with self._lock:
            self._members += made
        return made

    def _close(self, members: Sequence[Member]) -> None:
        for member in members:
            self._members.remove(member)
            self._try(member.instance.close)
        if self.limiter is not None:
            gone = (self.claims.pop(member.instance, None) for member in members)
            self.limiter.remove([claim for claim in gone if claim is not None])

    def _try(self, close: Callable[[], None]) -> None:
        try:
            close()
        except Exception:
            name, version = self._spec.name, self._spec.version
            log.exception("model '%s' version %d failed to close cleanly", name, version)


def _cores() -> int:
    """How many instances may be made at the same time: more of them would mostly wait for one another."""
    return len(os.sched_getaffinity(0))


class Resize:
    """A change of the number of instances, made ready: `commit` or `abandon` it, then `finish` it.

    Args:
        fleet: The instances.
        runner: Runs them.
        added: Those that have been made.
        surplus: Of which how many are to go.
        on_commit: Called when the instances have changed.
    """

    def __init__(
        self,
        fleet: Fleet,
        runner: Runner,
        added: Sequence[Member],
        surplus: Sequence[tuple[Sequence[Member], int]],
        on_commit: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._runner = runner
        self._added = added
        self._surplus = surplus
        self._on_commit = on_commit
        self._going: list[Member] = []

    def commit(self) -> None:
        """Has new instances take requests, and those that go take no more."""
        surplus: list[tuple[list[BackendInstance], int]] = []
        members: dict[BackendInstance, Member] = {}
        for candidates, too_many in self._surplus:
            if candidates[0].placement.passive:
                self._going += candidates[-too_many:]
            else:
                surplus.append(([member.instance for member in candidates], too_many))
                members |= {member.instance: member for member in candidates}
        added = [member.instance for member in self._added if not member.placement.passive]
        self._going += [members[instance] for instance in self._runner.resize(added, surplus)]
        self._on_commit()

    def abandon(self) -> None:
        """Closes what was made; everything stays as it was."""
        self._fleet.close_some(self._added)

    def finish(self) -> None:
        """Waits for the batches of instances that go, and closes them."""
        self._runner.wait_gone([member.instance for member in self._going])
        self._fleet.close_some(self._going)
