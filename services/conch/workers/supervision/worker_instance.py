"""An instance in a worker process, as the core's `BackendInstance`. Used by: worker_placement."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

from conch.backends.python.python_settings import Settings
from conch.core.backend import AwaitableOutcome, BackendInstance, Outcome
from conch.core.bls import ServerCalls
from conch.core.custom_metrics import current_families
from conch.core.execution.placement import Placement
from conch.core.request import InferenceResponse
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


class WorkerInstance(BackendInstance):
    """An instance whose model runs in a worker process; made by `open`."""

    starts_async: ClassVar[bool] = True

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
        return instance

    def execute(self, batch: Batch) -> Sequence[InferenceResponse | None] | None:
        """Runs a batch and waits for it; see `BackendInstance.execute`."""
        return _wait_for(self, batch)

    def start(self, batch: Batch, done: Callable[[Outcome], None]) -> None:
        """Sends a batch to the worker; see `BackendInstance.start`."""
        link = self.supervisor.link
        if link is None:
            done(self.supervisor.refusal())
            return
        link.start(batch, done if self.limit is None else self.limit.watch(link, batch, done))

    def start_awaitable(self, batch: Batch, done: Callable[[Outcome], None]) -> AwaitableOutcome | None:
        """See `BackendInstance.start_awaitable`."""
        link = self.supervisor.link
        if link is None:
            done(self.supervisor.refusal())
            return None
        return link.start_awaitable(
            batch, done if self.limit is None else self.limit.watch(link, batch, done)
        )

    def available(self, on_available: OnAvailable) -> bool:
        """False while requests should wait for a restart; see `BackendInstance.available`."""
        return self.supervisor.link is not None or not self.supervisor.await_worker(on_available)

    def set_warm_up(self, warm_up: Callable[[BackendInstance], None]) -> None:
        """Sets the warm-up of restarted workers; see `BackendInstance.set_warm_up`."""
        self.supervisor.warm_up = lambda link: warm_up(_Loaded(link, self.limit))

    def worker(self) -> WorkerStatus:
        """State of its worker; see `BackendInstance.worker`."""
        return self.supervisor.status()

    def close(self) -> None:
        """Ends the worker; see `Supervisor.close`."""
        self.supervisor.close()

    def _set_readiness(self, readiness: Readiness | None) -> None:
        self.readiness = readiness


class _Loaded(BackendInstance):
    """A restarted worker before it serves, for its warm-up."""

    starts_async: ClassVar[bool] = True

    def __init__(self, link: WorkerConnection, limit: ExecutionLimit | None) -> None:
        self._link = link
        self.limit = limit

    def execute(self, batch: Batch) -> Sequence[InferenceResponse | None] | None:
        """Runs a batch and waits for it."""
        return _wait_for(self, batch)

    def start(self, batch: Batch, done: Callable[[Outcome], None]) -> None:
        """Sends a batch to the worker."""
        link, limit = self._link, self.limit
        link.start(batch, done if limit is None else limit.watch(link, batch, done))


def _wait_for(instance: BackendInstance, batch: Batch) -> Sequence[InferenceResponse | None] | None:
    """Runs a batch on an asynchronous instance and waits for it."""
    outcomes: list[Outcome] = []
    over = threading.Event()

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        over.set()

    instance.start(batch, done)
    over.wait()
    outcome = outcomes[0]
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
