"""Operations under an access policy: checks the model of a request, filters listings, audits changes.

The front end has identified the caller before it read the request. Threads and locks: those of the handler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from conch.access.access_guard import AccessGuard
from conch.access.principals import CONTROLS, Grant
from conch.core.errors import as_conch_error
from conch.core.request_log import Caller
from conch.core.server_state import ServerState
from conch.door.operation_handlers import Services
from conch.door.operation_table import Operation

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


def checked(
    operation: Operation[RequestT, ResultT], guard: AccessGuard, caller: Caller
) -> Callable[[ServerState, Services, RequestT], ResultT]:
    """The handler of an operation for one caller; it raises PermissionDeniedError as `AccessGuard.check`."""
    grant = caller.access
    if not isinstance(grant, Grant):
        assert not (operation.roles and guard.identifies), "the front end identifies callers of these"
        return operation.handler

    def handle(core: ServerState, services: Services, request: RequestT) -> ResultT:
        roles, model = operation.roles_for(request), operation.model_of(request)
        guard.check(caller, grant, roles, operation.name, model)
        try:
            result = operation.handler(core, services, request)
        except BaseException as error:  # audited, and raised again
            if roles == CONTROLS:
                audit_failure(operation, guard, caller, model, error)
            raise
        if roles == CONTROLS:
            guard.changed(caller, grant, operation.name, model, None)
        if operation.shown is None:
            return result
        return operation.shown(result, lambda name: grant.principal.allows(roles, name))

    return handle


def audit_failure(
    operation: Operation[RequestT, ResultT],
    guard: AccessGuard,
    caller: Caller,
    model: str,
    error: BaseException,
) -> None:
    """Audits a change that was asked for and failed; no other calls."""
    grant = caller.access
    if operation.roles == CONTROLS and isinstance(grant, Grant):
        guard.changed(caller, grant, operation.name, model, as_conch_error(error))
