"""`LocalDoor`: the core in this process.

Owns: the threads of operations. What waits for a model goes on, on the thread that has loaded it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from conch.access.access_guard import AccessGuard
from conch.core.admission import Admission, HeldBytes
from conch.core.cold_models import when_loaded
from conch.core.errors import ConchError, UnavailableError
from conch.core.request_log import Caller
from conch.core.server_state import ServerState
from conch.core.spec import ModelSpec
from conch.door.checked_operations import checked
from conch.door.door import AnswerT, Door, MakeLog, RequestT, ResultT
from conch.door.operation_handlers import Services
from conch.door.operation_pools import OperationPools
from conch.door.operation_table import Operation


class LocalDoor(Door):
    """The core of a server in this process.

    Args:
        core: The models and the stage of the server.
        services: State that operations use besides.
        held: Counts the bytes of clients' requests; None for no bound.
    """

    def __init__(self, core: ServerState, services: Services, held: HeldBytes | None = None) -> None:
        held = held or HeldBytes(sys.maxsize)
        super().__init__(core.server_id, core.version, core.registry, services.archives, held)
        self._core = core
        self._services = services
        self._pools = OperationPools()

    @property
    def alive(self) -> bool:
        """See `Door`."""
        return self._core.alive

    @property
    def serving(self) -> bool:
        """See `Door`."""
        return self._core.serving

    @property
    def loaded(self) -> bool:
        """See `Door`."""
        return self._core.loaded

    def check_running(self) -> None:
        """See `Door`."""
        self._core.check_running()
        self._core.check_started()

    def admission(self, protocol: str, log: MakeLog | None = None) -> Admission:
        """See `Door`."""
        request_log = None if log is None else log(self._core.request_log)
        return self._core.admission(protocol, request_log, self.held)

    def ask(
        self,
        operation: Operation[RequestT, ResultT],
        read: Callable[[], RequestT],
        write: Callable[[ResultT], AnswerT],
        caller: Caller | None = None,
        guard: AccessGuard | None = None,
        size: int = 0,
    ) -> Future[AnswerT]:
        """See `Door`."""
        result: Future[AnswerT] = Future()
        run = operation.handler
        if guard is not None and guard.identifies and caller is not None:
            run = checked(operation, guard, caller)
        payer = None if caller is None else caller.access

        def work() -> None:
            when_loaded(
                lambda: write(run(self._core, self._services, read())), size, payer=payer, into=result
            )

        try:
            queued = self._pools.submit(operation.runs_on, self._core, size, work)
        except RuntimeError:  # the pool is closed
            _fail(result, UnavailableError("Server exiting"))
        except ConchError as error:
            _fail(result, error)
        else:
            if queued is not None:
                result.add_done_callback(lambda ended: ended.cancelled() and queued.cancel())
                queued.add_done_callback(partial(_end_dropped, result))
        return result

    def check(self, operation: Operation[Any, Any], subject: str = "") -> None:
        """See `Door`."""
        if operation.check is not None:
            operation.check(self._core, self._services, subject)

    def describe(self, model: str, version: str) -> ModelSpec:
        """See `Door`."""
        return self._core.model(model, version).spec

    def end_sequence(self, model: str, correlation_id: int | str) -> None:
        """See `Door`."""
        self._core.end_sequence(model, correlation_id)

    def close(self, remaining_s: Callable[[], float]) -> bool:
        """Ends the threads; returns whether their work has ended in time, as it may hang with its storage."""
        return self._pools.close(remaining_s)


def _end_dropped(result: Future[Any], queued: Future[None]) -> None:
    """Ends an operation that the pool has dropped as it closed."""
    if queued.cancelled():
        _fail(result, UnavailableError("Server exiting"))


def _fail(result: Future[Any], error: ConchError) -> None:
    if not result.done() and result.set_running_or_notify_cancel():
        result.set_exception(error)
