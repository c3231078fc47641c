"""The instances of a runner, by what they do.

    ===========  =========================================  ===========
    state        event                                      next state
    ===========  =========================================  ===========
    idle         `available` is false                       unavailable
    idle         a batch is taken, it has room for more     idle
    idle         a batch is taken                           busy
    busy         a batch is finished                        idle
    busy         `resize`                                   retiring
    retiring     its last batch is finished                 removed
    unavailable  the instance is available again            idle
    idle         `resize`, it runs a batch                  retiring
    idle         `resize`                                   removed
    unavailable  `resize`                                   removed
    ===========  =========================================  ===========

Most instances take one batch at a time, and the one that was idle last runs the next: its caches are warm.
Those that only start requests and answer them later take several (`BackendInstance.most_batches`), in turn:
with one at a time, each request would wait until the instance has said that it has started the one before.

Requests that only an unavailable instance may run wait in the queue, where they can be cancelled and expire.

Locks: the runner's; held by the caller where a method does not say that it takes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from functools import partial

from conch.core.backend import BackendInstance
from conch.core.execution.resource_limits import ResourceLimits
from conch.core.execution.response_tracker import ResponseTracker
from conch.core.execution.runner_base import RunnerBase
from conch.core.scheduling.scheduler import Batch
from conch.core.statistics_snapshot import Gauges

log = logging.getLogger(__name__)


class InstanceSet:
    """The instances of a runner, at first all idle.

    Attributes:
        blocks: True if they run batches on the thread that starts them.
        allow_inline: True if batches may run inline; those that are only started always may.
        count: Number of instances that are not removed.
        idle: The instances that can take a batch; the last one runs next.
        several: True if any takes several batches at a time.
        by_number: Instances by the numbers that batches may name.
        retiring: Instances that are removed with their last batch.
        running: The batches of busy and retiring instances.
        past_ns: Time that instances have run the batches that are finished, in nanoseconds.
    """

    __slots__ = (
        "_gone",
        "_limits",
        "_next_number",
        "_runner",
        "_tracker",
        "_unavailable",
        "allow_inline",
        "blocks",
        "by_number",
        "count",
        "idle",
        "past_ns",
        "retiring",
        "running",
        "several",
    )

    def __init__(
        self,
        runner: RunnerBase,
        instances: Sequence[BackendInstance],
        tracker: ResponseTracker,
        limits: ResourceLimits | None,
    ) -> None:
        self._runner = runner
        self._tracker = tracker
        self._limits = limits
        self._gone = threading.Condition(runner.lock)
        self._unavailable: dict[BackendInstance, object] = {}
        self.blocks = not instances or any(instance.blocks for instance in instances)
        self.count = self._next_number = 0
        self.idle: list[BackendInstance] = []
        self.by_number: dict[int, BackendInstance] = {}
        self.retiring: list[BackendInstance] = []
        self.running: set[Batch] = set()
        self.several = False
        self.past_ns = 0
        self._add(instances)

    def gauges(self) -> Gauges:
        """Current gauges of the version; takes the lock."""
        runner = self._runner
        with runner.lock:
            now = runner.clock()
            running = self._tracker.count  # also the requests in the batches of a decoupled model
            if not self._tracker.decoupled:
                running += sum(len(batch.requests) - batch.fillers for batch in self.running)
            busy_ns = self.past_ns + sum(now - batch.compute_start_ns for batch in self.running)
            return Gauges(runner.scheduler.pending, running, busy_ns, self.count)

    def resize(
        self, added: Sequence[BackendInstance], surplus: Iterable[tuple[Sequence[BackendInstance], int]]
    ) -> list[BackendInstance]:
        """Adds and removes instances while requests run; no request is lost or waits for it.

        `surplus` has candidates and how many of them to remove; unavailable and idle ones go first, later
        ones before earlier. Returns the removed instances; busy ones still run their batch, see `wait_gone`.
        Takes the lock.
        """
        runner = self._runner
        limits = self._limits
        if limits is not None:
            limits.watch(added)
        with runner.lock:
            removed = self._remove(surplus)
            self._add(added)
            if limits is not None:
                limits.remove(removed)
            runner.wake_if_due(runner.clock())
        if limits is not None:
            limits.return_unused_grants()
        return removed

    def wait_gone(self, instances: Sequence[BackendInstance]) -> None:
        """Waits until instances that `resize` removed run no batch; takes the lock."""
        with self._runner.lock:
            self._gone.wait_for(lambda: not any(one in self.retiring for one in instances))

    @property
    def all_rest(self) -> bool:
        """True if no instance runs a batch."""
        return not self.running

    def take(self, instance: BackendInstance) -> None:
        """Gives an idle instance a batch; it is not yet in `running`."""
        self.idle.remove(instance)
        if instance.most_batches > 1 and self._batches_of(instance) + 1 < instance.most_batches:
            self.idle.insert(0, instance)

    def give_back(self, instance: BackendInstance) -> bool:
        """Makes an instance idle after its batch; False if it is removed instead, now or later."""
        if self.retiring and instance in self.retiring:
            if not self._batches_of(instance):
                self.retiring.remove(instance)
                self.count -= 1
                self._gone.notify_all()
            return False
        if instance.most_batches == 1 or not (instance in self.idle or instance in self._unavailable):
            self.idle.append(instance)
        return True

    def is_available(self, instance: BackendInstance) -> bool:
        """True if an idle instance can take a batch; if not, it becomes unavailable."""
        if instance.blocks:
            return True
        token = object()
        try:
            if instance.available(partial(self.restore, instance, token)):
                return True
        except Exception:  # boundary: backends
            log.exception("an instance can not say whether it is available")
            return True  # its batches complete with whatever error it raises
        self.idle.remove(instance)
        self._unavailable[instance] = token
        return False

    def restore(self, instance: BackendInstance, token: object) -> None:
        """Makes an instance idle that is available again; called by it, from any thread, without the lock.

        The token tells a call for an instance that was removed, or is restored already.
        """
        runner = self._runner
        with runner.lock:
            if self._unavailable.get(instance) is token:
                del self._unavailable[instance]
                self.idle.append(instance)
                # A thread of the model starts batches: the calling thread may hold locks.
                runner.wake_if_due(runner.clock())

    def _add(self, instances: Sequence[BackendInstance]) -> None:
        self.idle += instances
        self.count += len(instances)
        self.by_number |= enumerate(instances, self._next_number)
        self._next_number += len(instances)
        self.several = any(one.most_batches > 1 for one in self.by_number.values())
        # A decoupled model waits for its clients to read; the polling threads send to them.
        may = not self._tracker.decoupled and all(one.allows_inline for one in self.by_number.values())
        self.allow_inline = may or not self.blocks

    def _remove(self, surplus: Iterable[tuple[Sequence[BackendInstance], int]]) -> list[BackendInstance]:
        for instance in self.idle[:]:
            self.is_available(instance)
        removed: list[BackendInstance] = []
        for candidates, count in surplus:
            removed += sorted(reversed(candidates), key=self._rank)[:count]
        for instance in removed:
            if self._unavailable.pop(instance, None) is None and instance in self.idle:
                self.idle.remove(instance)
            if self._batches_of(instance):
                self.retiring.append(instance)
            else:
                self.count -= 1
        self.by_number = {number: one for number, one in self.by_number.items() if one not in removed}
        return removed

    def _rank(self, instance: BackendInstance) -> int:
        return -1 if instance in self._unavailable else self._batches_of(instance)

    def _batches_of(self, instance: BackendInstance) -> int:
        return sum(batch.runs_on is instance for batch in self.running)
