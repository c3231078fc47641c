"""The resources of a runner's instances: which idle instance may take a batch now.

An instance takes a batch only while its resource grant is held (states: `scheduling.resource_scheduler`):

    ========  ============================================  =======================================
    grant     event                                         effect
    ========  ============================================  =======================================
    resting   a batch is due                                all idle instances ask until one holds
    waiting   granted: `use_grant`                          held; a thread of the model is woken
    waiting   nothing is due any more                       resting
    held      its batch runs and ends                       resting, or asks again if more is due
    held      nothing is due any more                       resting; others may be granted
    ========  ============================================  =======================================

Requests stay queued until a grant is held: there they can be cancelled, expire, and be joined by others.

Locks: all is called with the runner's lock held, but `settle` and `use_grant`. These take it, and notify
other models without it, as that takes their locks (see `RateLimiter`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from conch.core.backend import BackendInstance
from conch.core.execution.rate_limiter import RateLimiter
from conch.core.execution.runner_base import RunnerBase
from conch.core.scheduling.resource_scheduler import GrantState, ResourceGrant


class ResourceLimits:
    """See the module.

    Args:
        limiter: Grants resources.
        grants: The grant of each instance that needs resources, registered with the limiter; read also for
            instances added later.

    Attributes:
        asking: Grants that wait, or are held and not used yet.
    """

    def __init__(self, limiter: RateLimiter, grants: Mapping[BackendInstance, ResourceGrant]) -> None:
        self._limiter = limiter
        self._grants = grants
        self.asking: set[ResourceGrant] = set()
        self._to_notify: list[ResourceGrant] = []
        self._runner: RunnerBase

    def attach(self, runner: RunnerBase, instances: Iterable[BackendInstance]) -> None:
        """Serves a runner with its first instances."""
        self._runner = runner
        self.watch(instances)

    def watch(self, instances: Iterable[BackendInstance]) -> None:
        """Has grants of instances used as soon as they are held."""
        for instance in instances:
            if instance in self._grants:
                self._grants[instance].notify_with(self.use_grant)

    def use_grant(self) -> None:
        """Uses a grant that is held now; called by the thread that freed the resources."""
        with self._runner.lock:
            self._runner.wake_if_due(self._runner.clock())
        self.return_unused_grants()

    def return_unused_grants(self) -> None:
        """Gives back resources of instances that have nothing to run any more; notifies other models."""
        runner = self._runner
        with runner.lock:
            now = runner.clock()
            if self._give_back(runner.needed(now)):
                runner.wake_if_due(now)  # a batch may be due later, and no thread waits for that
            granted, self._to_notify = self._to_notify, []
        if granted:
            self._limiter.notify(granted)

    def choose(self, candidates: Iterable[BackendInstance]) -> BackendInstance | None:
        """An idle instance that may run now; if there is none, all of them wait."""
        resting: dict[ResourceGrant, BackendInstance] = {}
        for instance in candidates:
            grant = self._grants.get(instance)
            if grant is None or grant.state is GrantState.HELD:
                return instance
            if grant.state is GrantState.RESTING:
                resting[grant] = instance
        if not resting:
            return None
        granted = self._limiter.ask(resting)
        self.asking.update(grant for grant in resting if grant.state is not GrantState.RESTING)
        return None if granted is None else resting[granted]

    def take(self, instance: BackendInstance) -> None:
        """Uses the grant of an instance for a batch."""
        if instance in self._grants:
            self.asking.discard(self._grants[instance])

    def release_instance(self, instance: BackendInstance, again: bool) -> None:
        """Releases the grant of an instance after its batch, and asks `again` if more is due."""
        grant = self._grants.get(instance)
        if grant is None:
            return
        granted = self._limiter.release_grant(grant, again)
        if again:
            self.asking.add(grant)
        self._to_notify += [other for other in granted if other is not grant]

    def _give_back(self, needed: Iterable[BackendInstance]) -> bool:
        """Gives back what instances ask for, except the needed ones; whether there was anything."""
        unneeded = self.asking - {self._grants[one] for one in needed if one in self._grants}
        self.asking -= unneeded
        if unneeded:
            self._to_notify += self._limiter.return_grants(unneeded)
        return bool(unneeded)

    def remove(self, instances: Iterable[BackendInstance]) -> None:
        """Gives back what removed instances ask for."""
        grants = self.asking.intersection(self._grants[one] for one in instances if one in self._grants)
        self.asking -= grants
        self._to_notify += self._limiter.return_grants(grants)

    def may_run(self, instance: BackendInstance) -> bool:
        """True if an idle instance holds its grant, needs none or has requested none yet."""
        grant = self._grants.get(instance)
        return grant is None or grant.state is not GrantState.WAITING

    def needs_grant(self, instance: BackendInstance) -> bool:
        """True if an idle instance waits for a grant or holds one."""
        grant = self._grants.get(instance)
        return grant is not None and grant.state is not GrantState.RESTING
