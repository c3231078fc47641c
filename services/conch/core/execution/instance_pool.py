"""Instances of one model version: created, warmed up, resized and closed.

Owns: the backend's model and its instances, passive ones too, and their resource grants.
Threads and locks: instances are created on several threads where the backend allows it. The pool's lock
guards changes of the members and closing, so that each instance is closed once; readers take no lock, as an
instance may take long to close.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial

from conch.core.backend import BackendInstance, BackendModel
from conch.core.execution.placement import InstanceKind, Placement, kind_of, place
from conch.core.execution.rate_limiter import RateLimiter, grant_of
from conch.core.execution.runner import Runner
from conch.core.execution.warmup import Warmup
from conch.core.model_control import cancellable_load, check_load_cancelled, load_cancelled
from conch.core.scheduling.resource_scheduler import ResourceGrant
from conch.core.spec import InstanceGroup, ModelSpec

log = logging.getLogger(__name__)

_LEAST_PARALLEL = 2
"""Instances created at the same time even on a single core: a slow creation may only wait."""


def start_in_parallel(tasks: Sequence[Callable[[], None]], most: int) -> None:
    """Runs tasks, in their order, on this thread and others; returns when all started tasks have ended.

    After a failure, or once the load is stopped, no further task starts, and `load_cancelled` is true in the
    running ones.

    Args:
        tasks: The tasks.
        most: Number of threads.

    Raises:
        BaseException: The error of the first task that failed.
    """
    todo = deque(tasks)
    failures: list[BaseException] = []
    stopped = load_cancelled()

    def work() -> None:
        with cancellable_load(lambda: bool(failures) or stopped()):
            while not failures:
                try:
                    task = todo.popleft()
                except IndexError:
                    return
                try:
                    check_load_cancelled()
                    task()
                except BaseException as error:  # boundary: backends; raised again by the first thread
                    failures.append(error)

    threads: list[threading.Thread] = []
    for number in range(1, min(most, len(tasks))):
        context = copy_context()  # the load's context variables
        thread = threading.Thread(
            target=context.run, args=(work,), name=f"conch-instances-{number}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            break  # no more threads: the running ones do all tasks
        threads.append(thread)
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@dataclass(frozen=True, slots=True, eq=False)
class PoolMember:
    """One instance; instances of the same kind are interchangeable."""

    kind: InstanceKind
    placement: Placement
    instance: BackendInstance


class InstancePool:
    """All instances of a model version, passive ones too.

    Args:
        spec: The model version.
        model: The loaded model; owned by the pool.
        limiter: The rate limiter; None without rate limits.

    Attributes:
        grants: The resource grants of those instances that need resources.
    """

    def __init__(self, spec: ModelSpec, model: BackendModel, limiter: RateLimiter | None = None) -> None:
        self._spec = spec
        self._model = model
        self.limiter = limiter
        self.grants: dict[BackendInstance, ResourceGrant] = {}
        self._lock = threading.Lock()
        self._members: tuple[PoolMember, ...] = ()  # replaced, never changed

    @property
    def notes(self) -> Sequence[str]:
        """Deviations of the model from its config."""
        return () if self._model.notes is None else self._model.notes.texts

    @property
    def active(self) -> list[BackendInstance]:
        """Instances that run batches."""
        return [member.instance for member in self._members if not member.placement.passive]

    @property
    def all(self) -> list[BackendInstance]:
        """All instances."""
        return [member.instance for member in self._members]

    def create(self, warm_up: Warmup) -> None:
        """Creates the instances of all groups; after a failure `close` closes the created ones.

        Raises:
            ConchError: An instance can't be created, fails a warm-up sample, or could never run.
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
        """Creates the instances that changed groups need, and finds those that become surplus.

        Args:
            groups: Groups of instances of the same kinds, with other counts, names or in another order.
            warm_up: Runs on each new instance.
            runner: Runs the instances.
            on_commit: Called when the instances have changed.

        Raises:
            ConchError: An instance can't be created; nothing has changed.
        """
        wanted: dict[InstanceKind, list[Placement]] = {}
        for group in groups:
            for placement in place([group]):
                wanted.setdefault(kind_of(group, placement.device_id), []).append(placement)
        missing: list[tuple[InstanceKind, Placement]] = []
        surplus: list[tuple[list[PoolMember], int]] = []
        for kind, placements in wanted.items():
            existing = [member for member in self._members if member.kind == kind]
            names = Counter(member.placement.name for member in existing)
            new = []
            for placement in placements:
                if names[placement.name]:
                    names[placement.name] -= 1
                else:
                    new.append(placement)  # a left instance of another name serves as well
            lacking = max(len(placements) - len(existing), 0)
            missing += [(kind, placement) for placement in new[len(new) - lacking :]]
            if len(existing) > len(placements):
                surplus.append((existing, len(existing) - len(placements)))
        return Resize(self, runner, self._make(missing, warm_up), surplus, on_commit)

    @property
    def unload_grace_s(self) -> float | None:
        """See `BackendModel.unload_grace_s`."""
        return self._model.unload_grace_s

    def close(self) -> None:
        """Closes all instances, none of which runs a batch, and the model."""
        with self._lock:
            self._close(self._members)
            self._try(self._model.close)

    def close_some(self, members: Sequence[PoolMember]) -> None:
        """Closes instances that run no batch, unless they are closed already."""
        with self._lock:
            self._close([member for member in members if member in self._members])

    def _make(self, placed: Sequence[tuple[InstanceKind, Placement]], warm_up: Warmup) -> list[PoolMember]:
        grants = [grant_of(self._spec.name, placement) for _, placement in placed]
        wanted = [grant for grant in grants if grant is not None] if self.limiter is not None else []
        if self.limiter is not None:
            self.limiter.add(wanted)  # first: fails for instances that could never run
        places: dict[int, PoolMember] = {}

        def make(number: int) -> None:
            kind, placement = placed[number]
            grant = grants[number]
            instance = self._model.create_instance(placement)
            places[number] = PoolMember(kind, placement, instance)
            if self.limiter is not None and grant is not None:
                self.grants[instance] = grant
            warm_up.run(instance, placement.name)
            if warm_up:
                instance.set_warm_up(lambda started: warm_up.run(started, placement.name))

        try:
            parallel = max(_cores(), _LEAST_PARALLEL) if self._model.creates_in_parallel else 1
            start_in_parallel([partial(make, number) for number in range(len(placed))], parallel)
        except BaseException:
            made = [places[number] for number in sorted(places)]
            with self._lock:
                self._members += tuple(made)
                self._close(made)
            if self.limiter is not None:
                self.limiter.remove(wanted)
            raise
        made = [places[number] for number in range(len(placed))]
        with self._lock:
            self._members += tuple(made)
        return made

    def _close(self, members: Sequence[PoolMember]) -> None:
        for member in members:
            self._members = tuple(each for each in self._members if each is not member)
            self._try(member.instance.close)
        if self.limiter is not None:
            removed = (self.grants.pop(member.instance, None) for member in members)
            self.limiter.remove([grant for grant in removed if grant is not None])

    def _try(self, close: Callable[[], None]) -> None:
        try:
            close()
        except Exception:  # boundary: backends
            name, version = self._spec.name, self._spec.version
            log.exception("model '%s' version %d failed to close cleanly", name, version)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


class Resize:
    """A prepared change of the number of instances: `commit` or `abandon` it, then `finish` it.

    Args:
        pool: The instances.
        runner: Runs them.
        added: The created instances.
        surplus: Candidates and how many of them are to be removed.
        on_commit: Called when the instances have changed.
    """

    def __init__(
        self,
        pool: InstancePool,
        runner: Runner,
        added: Sequence[PoolMember],
        surplus: Sequence[tuple[Sequence[PoolMember], int]],
        on_commit: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._runner = runner
        self._added = added
        self._surplus = surplus
        self._on_commit = on_commit
        self._removed: list[PoolMember] = []

    def commit(self) -> None:
        """Lets new instances take batches; removed instances take no more."""
        surplus: list[tuple[list[BackendInstance], int]] = []
        members: dict[BackendInstance, PoolMember] = {}
        for candidates, too_many in self._surplus:
            if candidates[0].placement.passive:
                self._removed += candidates[-too_many:]
            else:
                surplus.append(([member.instance for member in candidates], too_many))
                members |= {member.instance: member for member in candidates}
        added = [member.instance for member in self._added if not member.placement.passive]
        self._removed += [members[instance] for instance in self._runner.instances.resize(added, surplus)]
        self._on_commit()

    def abandon(self) -> None:
        """Closes the created instances; nothing else changes."""
        self._pool.close_some(self._added)

    def finish(self) -> None:
        """Waits for the batches of removed instances and closes them."""
        self._runner.instances.wait_gone([member.instance for member in self._removed])
        self._pool.close_some(self._removed)
