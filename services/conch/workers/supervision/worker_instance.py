"""An instance in a worker process, as the core's `BackendInstance`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

from conch.backends.python.python_settings import Settings
from conch.core.backend import BackendInstance, BatchOutcome, Done, Pending
from conch.core.bls import ServerCalls
from conch.core.custom_metrics import current_families
from conch.core.execution.placement import Placement
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import Readiness, WorkerStatus
from conch.core.spec import ModelSpec
from conch.ipc.spec_json import Library
from conch.workers.connection.waiting_calls import WorkerWaiter
from conch.workers.connection.worker_connection import WorkerConnection
from conch.workers.environment import Environment
from conch.workers.supervision.process_monitor import ProcessMonitor
from conch.workers.supervision.supervisor import Supervisor
from conch.workers.supervision.watchdog import ExecutionLimit
from conch.workers.supervision.worker_group import OnAvailable, WorkerGroup
from conch.workers.supervision.worker_process import Launch

_MOST_BATCHES = 32
"""Batches sent to a worker that only starts their requests: enough to cover the way there and back."""


class WorkerInstance(BackendInstance):
    """An instance whose model runs in a worker process; made by `open`, or by `open_shared` with others."""

    blocks: ClassVar[bool] = False

    def __init__(self, worker: _Worker, number: int) -> None:
        self.supervisor = worker.supervisor
        self.limit = worker.supervisor.limit
        self._worker = worker
        self._number = number

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
        (instance,) = cls.open_shared(spec, [placement], settings, environment, calls, monitor, group)
        # Batches are formed of what waits meanwhile; the others name their instance, or need its resources.
        waits = spec.batching is not None or spec.sequence is not None
        waits = waits or any(group.resources for group in spec.instance_groups)
        link = instance.supervisor.link
        if link is not None and link.starts_requests and not waits:
            instance.most_batches = _MOST_BATCHES
        return instance

    @classmethod
    def open_shared(
        cls,
        spec: ModelSpec,
        placements: Sequence[Placement],
        settings: Settings,
        environment: Environment,
        calls: ServerCalls,
        monitor: ProcessMonitor,
        group: WorkerGroup,
        library: Library | None = None,
    ) -> list[WorkerInstance]:
        """Makes instances that share a worker, which ends when the last of them is closed.

        Raises:
            ConchError: The start failed, the model raised, or the worker died.
        """
        name = placements[0].name if library is None else spec.name
        waiter = WorkerWaiter(calls, name, spec)
        families = current_families()  # the server's thread that loads the model
        launch = Launch(
            *(spec, placements, settings, environment, calls, waiter, families, monitor, group.notes),
            library=library,
        )
        worker = _Worker(launch, group)
        worker.supervisor.open()
        return list(worker.instances)

    def start(self, batch: Batch, done: Done) -> BatchOutcome | Pending:
        """Sends a batch to the worker."""
        link, limit = self.supervisor.link, self.limit
        if link is None:
            return self.supervisor.refusal()
        return link.start(batch, done if limit is None else limit.watch(link, done), self._number)

    def available(self, on_available: OnAvailable) -> bool:
        """False while requests should wait for a restart."""
        return self.supervisor.link is not None or not self.supervisor.await_worker(on_available)

    def set_warm_up(self, warm_up: Callable[[BackendInstance], None]) -> None:
        """Sets the warm-up of restarted workers."""
        self._worker.set_warm_up(self._number, warm_up)

    def worker(self) -> WorkerStatus:
        """State of its worker."""
        return self.supervisor.status()

    def cancel_running(self) -> None:
        """Cancels the worker's requests."""
        link = self.supervisor.link
        if link is not None:
            link.cancel_open()

    def close(self) -> None:
        """Ends the worker, if no other instance has it."""
        self._worker.leave(self)


class _Worker:
    """A worker and its instances.

    Attributes:
        instances: Those that are not closed.
    """

    def __init__(self, launch: Launch, group: WorkerGroup) -> None:
        self._lock = threading.Lock()  # guards the instances and their warm-ups
        self._warm_ups: dict[int, Callable[[BackendInstance], None]] = {}
        self.supervisor = Supervisor(launch, group, self._set_readiness, self._warm_up)
        self.instances = [WorkerInstance(self, number) for number in range(len(launch.placements))]

    def set_warm_up(self, number: int, warm_up: Callable[[BackendInstance], None]) -> None:
        """Sets the warm-up of an instance in restarted workers."""
        with self._lock:
            self._warm_ups[number] = warm_up

    def leave(self, instance: WorkerInstance) -> None:
        """Ends the worker with its last instance."""
        with self._lock:
            if instance not in self.instances:
                return
            self.instances.remove(instance)
            left = len(self.instances)
        if not left:
            self.supervisor.close()

    def _warm_up(self, link: WorkerConnection) -> None:
        with self._lock:
            warm_ups = list(self._warm_ups.items())
        for number, warm_up in warm_ups:
            warm_up(_Loaded(link, self.supervisor.limit, number))

    def _set_readiness(self, readiness: Readiness | None) -> None:
        for instance in self.instances:
            instance.readiness = readiness


class _Loaded(BackendInstance):
    """An instance of a restarted worker before it serves, for its warm-up."""

    blocks: ClassVar[bool] = False

    def __init__(self, link: WorkerConnection, limit: ExecutionLimit | None, number: int) -> None:
        self._link = link
        self._limit = limit
        self._number = number

    def start(self, batch: Batch, done: Done) -> Pending:
        """Sends a batch to the worker."""
        link, limit = self._link, self._limit
        return link.start(batch, done if limit is None else limit.watch(link, done), self._number)
