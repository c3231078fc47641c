"""An instance in a worker process, as the core's `BackendInstance`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from conch.backends.python.python_settings import Settings
from conch.core.backend import BackendInstance, Done, Outcome, Pending
from conch.core.bls import ServerCalls
from conch.core.custom_metrics import current_families
from conch.core.execution.placement import Placement
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import Readiness, WorkerStatus
from conch.core.spec import ModelSpec
from conch.workers.connection.waiting_calls import WorkerWaiter
from conch.workers.connection.worker_connection import WorkerConnection
from conch.workers.environments import Environment
from conch.workers.supervision.process_monitor import ProcessMonitor
from conch.workers.supervision.supervisor import Supervisor
from conch.workers.supervision.watchdog import ExecutionLimit
from conch.workers.supervision.worker_group import OnAvailable, WorkerGroup
from conch.workers.supervision.worker_process import Launch

_MOST_BATCHES = 32
"""Batches sent to a worker that only starts their requests: enough to cover the way there and back."""


class WorkerInstance(BackendInstance):
    """An instance whose model runs in a worker process; made by `open`."""

    blocks: ClassVar[bool] = False

    def __init__(self, launch: Launch, group: WorkerGroup) -> None:
        self.supervisor = Supervisor(launch, group, self._set_readiness)
        self.limit = self.supervisor.limit

    @classmethod
    def open(
        cls,
        spec: ModelSpec,
        placement: Placement,
        settings: Settings,
        environment: Environment,
        calls: ServerCalls,
        monitor: ProcessMonitor,
        group: WorkerGroup,
    ) -> WorkerInstance:
        """Makes an instance and loads the model in its first worker.

        Raises:
            ConchError: The start failed, the model raised, or the worker died.
        """
        waiter = WorkerWaiter(calls, placement.name, spec)
        families = current_families()  # the server's thread that loads the model
        launch = Launch(spec, placement, settings, environment, calls, waiter, families, monitor, group.notes)
        instance = cls(launch, group)
        instance.supervisor.open()
        # Batches are formed of what waits meanwhile; the others name their instance, or need its resources.
        waits = spec.batching is not None or spec.sequence is not None
        waits = waits or any(group.resources for group in spec.instance_groups)
        link = instance.supervisor.link
        if link is not None and link.starts_requests and not waits:
            instance.most_batches = _MOST_BATCHES
        return instance

    def start(self, batch: Batch, done: Done) -> Outcome | Pending:
        """Sends a batch to the worker."""
        link, limit = self.supervisor.link, self.limit
        if link is None:
            return self.supervisor.refusal()
        return link.start(batch, done if limit is None else limit.watch(link, done))

    def available(self, on_available: OnAvailable) -> bool:
        """False while requests should wait for a restart."""
        return self.supervisor.link is not None or not self.supervisor.await_worker(on_available)

    def set_warm_up(self, warm_up: Callable[[BackendInstance], None]) -> None:
        """Sets the warm-up of restarted workers."""
        self.supervisor.warm_up = lambda link: warm_up(_Loaded(link, self.limit))

    def worker(self) -> WorkerStatus:
        """State of its worker."""
        return self.supervisor.status()

    def cancel_running(self) -> None:
        """Cancels the worker's requests."""
        link = self.supervisor.link
        if link is not None:
            link.cancel_open()

    def close(self) -> None:
        """Ends the worker."""
        self.supervisor.close()

    def _set_readiness(self, readiness: Readiness | None) -> None:
        self.readiness = readiness


class _Loaded(BackendInstance):
    """A restarted worker before it serves, for its warm-up."""

    blocks: ClassVar[bool] = False

    def __init__(self, link: WorkerConnection, limit: ExecutionLimit | None) -> None:
        self._link = link
        self._limit = limit

    def start(self, batch: Batch, done: Done) -> Pending:
        """Sends a batch to the worker."""
        link, limit = self._link, self._limit
        return link.start(batch, done if limit is None else limit.watch(link, done))
