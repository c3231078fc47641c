"""RPCs under an access policy: checks callers before messages come, and the model of each inference request.

A call is checked only if there is a policy and its RPC has roles. Methods that are not in the table of
operations, such as those of reflection, need any principal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from conch.access.access_guard import AccessGuard
from conch.access.principals import ANY, INFERS, Grant, Roles
from conch.core.errors import ConchError
from conch.core.request import InferenceRequest
from conch.frontends.grpc.response_encoder import retry_metadata
from conch.frontends.grpc.restricted_rpcs import OnRefused
from conch.frontends.grpc.rpc_calls import (
    Admit,
    RpcCall,
    StreamMethod,
    StreamRpc,
    UnaryMethod,
    UnaryRpc,
)
from conch.frontends.header_forwarding import HeaderForwarder
from conch.frontends.operations.operation_table import ENDPOINT_BY_RPC, INFER, STREAM_INFER

PrepareRequest = Callable[[InferenceRequest, RpcCall, int], None]
"""Completes or refuses a decoded request of a call, whose message has so many bytes."""


def guard_unary(methods: Iterable[str], guard: AccessGuard, on_refused: OnRefused) -> dict[str, Admit]:
    """Returns the checks of those methods that need a role."""

    def check(roles: Roles, action: str) -> Admit:
        def admit(call: UnaryRpc) -> bool:
            try:
                call.access = guard.admit(call, roles, action)
            except ConchError as error:
                if roles == INFERS:
                    on_refused(error, call, 0)  # it may add to the answer
                call.abort(error.grpc_status, error.message, retry_metadata(error))
                return False
            return True

        return admit

    needs = {method: _needs(method) for method in methods}
    return {method: check(roles, action) for method, (roles, action) in needs.items() if roles}


def charge_unary(handlers: Mapping[str, UnaryMethod]) -> dict[str, UnaryMethod]:
    """Returns the handlers by method; those that `guard_unary` checks charge the message to the principal."""

    def charged(method: str, handler: UnaryMethod) -> UnaryMethod:
        if not _needs(method)[0]:
            return handler

        def handle(call: UnaryRpc, message: bytes) -> None:
            _grant(call).principal.limiter.charge(len(message))
            handler(call, message)

        return handle

    return {method: charged(method, handler) for method, handler in handlers.items()}


def guard_streams(
    handlers: Mapping[str, StreamMethod], guard: AccessGuard, on_refused: OnRefused
) -> dict[str, StreamMethod]:
    """Returns the handlers by method; opening a stream counts as its first request."""

    def guarded(method: str, handler: StreamMethod) -> StreamMethod:
        roles, action = _needs(method)
        if not roles:
            return handler

        def handle(call: StreamRpc) -> None:
            try:
                call.access = guard.admit(call, roles, action, None)
            except ConchError as error:
                call.refuse(error.grpc_status, error.message, retry_metadata(error))
                if roles == INFERS:
                    on_refused(error, call, 0)
            else:
                handler(call)

        return handle

    return {method: guarded(method, handler) for method, handler in handlers.items()}


def _needs(method: str) -> tuple[Roles, str]:
    """The roles and the name of an RPC."""
    endpoint = ENDPOINT_BY_RPC.get(method)
    return (ANY, method) if endpoint is None else (endpoint.entry_roles, endpoint.name)


def preparation(
    forward: HeaderForwarder | None, guard: AccessGuard | None, stream: bool
) -> PrepareRequest | None:
    """What is done with each decoded request of ModelInfer or ModelStreamInfer; None for nothing."""
    check = None if guard is None else (_stream_check if stream else _unary_check)(guard)
    if forward is None:
        return check

    def prepare(request: InferenceRequest, call: RpcCall, size: int) -> None:
        if check is not None:
            check(request, call, size)
        forward.forward(request, call.metadata)

    return prepare


def _unary_check(guard: AccessGuard) -> PrepareRequest:
    def check(request: InferenceRequest, call: RpcCall, size: int) -> None:
        guard.check(call, _grant(call), INFERS, request.model_name, INFER.name)

    return check


def _stream_check(guard: AccessGuard) -> PrepareRequest:
    """Each further request is charged, and its caller identified anew after a change of the policy."""

    def check(request: InferenceRequest, call: RpcCall, size: int) -> None:
        call.access = guard.next(call, _grant(call), INFERS, request.model_name, STREAM_INFER.name, size)

    return check


def _grant(call: RpcCall) -> Grant:
    grant = call.access
    assert grant is not None, "the handler is wrapped"
    return grant
