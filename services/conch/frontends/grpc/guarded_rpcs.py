"""Asks the guard of the gRPC port: for calls before their messages come, and for the model of each request.

RPCs that the guard has no rule for are not wrapped. Methods that are not in the table of operations, such as
those of reflection, need any principal where there is a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from conch.access.access_guard import AccessGuard
from conch.access.principals import ANY, INFERS, Grant
from conch.core.errors import ConchError
from conch.core.request import InferenceRequest
from conch.core.request_log import Caller
from conch.core.tensor import Buffer
from conch.door.operation_table import ENDPOINT_BY_RPC, INFER, STREAM_INFER, Endpoint
from conch.frontends.grpc.response_encoder import retry_metadata
from conch.frontends.grpc.rpc_calls import (
    Admit,
    RpcCall,
    StreamMethod,
    StreamRpc,
    UnaryMethod,
    UnaryRpc,
)
from conch.frontends.header_forwarding import HeaderForwarder

PrepareRequest = Callable[[InferenceRequest, RpcCall, int], None]
"""Completes or refuses a decoded request of a call, whose message has so many bytes."""

OnRefused = Callable[[ConchError, Caller], None]
"""Logs a refused inference."""


def guard_unary(methods: Iterable[str], guard: AccessGuard, on_refused: OnRefused) -> dict[str, Admit]:
    """Returns the checks of those methods that need one."""

    def check(endpoint: Endpoint) -> Admit:
        roles, action, category = endpoint.entry_roles, endpoint.name, endpoint.access

        def admit(call: UnaryRpc) -> bool:
            try:
                call.access = guard.admit(call, roles, action, category=category)
            except ConchError as error:
                if category == INFER.access:
                    on_refused(error, call)  # it may add to the answer
                call.abort(error.grpc_status, error.message, retry_metadata(error))
                return False
            return True

        return admit

    return {method: check(endpoint) for method, endpoint in _guarded(methods, guard).items()}


def guard_streams(
    handlers: Mapping[str, StreamMethod], guard: AccessGuard, on_refused: OnRefused
) -> dict[str, StreamMethod]:
    """Returns the handlers by method; a stream is checked as it opens, which counts as its first request."""

    def guarded(endpoint: Endpoint, handler: StreamMethod) -> StreamMethod:
        roles, action, category = endpoint.entry_roles, endpoint.name, endpoint.access

        def handle(call: StreamRpc) -> None:
            try:
                call.access = guard.admit(call, roles, action, size=None, category=category)
            except ConchError as error:
                call.refuse(error.grpc_status, error.message, retry_metadata(error))
                if category == INFER.access:
                    on_refused(error, call)
            else:
                handler(call)

        return handle

    needs = _guarded(handlers, guard)
    return dict(handlers) | {method: guarded(needs[method], handlers[method]) for method in needs}


def charge_unary(handlers: Mapping[str, UnaryMethod], guard: AccessGuard) -> dict[str, UnaryMethod]:
    """Returns the handlers by method; where callers have limits, they charge the message to the principal."""
    if not guard.identifies:
        return dict(handlers)

    def charged(method: str, handler: UnaryMethod) -> UnaryMethod:
        if not _endpoint(method).entry_roles:
            return handler

        def handle(call: UnaryRpc, message: Buffer) -> None:
            _grant(call).principal.limiter.charge(len(message))
            handler(call, message)

        return handle

    return {method: charged(method, handler) for method, handler in handlers.items()}


def _guarded(methods: Iterable[str], guard: AccessGuard) -> dict[str, Endpoint]:
    endpoints = {method: _endpoint(method) for method in methods}
    return {
        method: endpoint
        for method, endpoint in endpoints.items()
        if guard.checks(endpoint.entry_roles, endpoint.access)
    }


def _endpoint(method: str) -> Endpoint:
    return ENDPOINT_BY_RPC.get(method) or Endpoint(method, "", "", roles=ANY)


def preparation(forward: HeaderForwarder | None, guard: AccessGuard, stream: bool) -> PrepareRequest | None:
    """Hook that checks each decoded request's grant and forwards headers; None if neither is configured."""
    check = (_stream_check if stream else _unary_check)(guard) if guard.identifies else None
    if forward is None:
        return check

    def prepare(request: InferenceRequest, call: RpcCall, size: int) -> None:
        if check is not None:
            check(request, call, size)
        forward.forward(request, call.metadata)

    return prepare


def _unary_check(guard: AccessGuard) -> PrepareRequest:
    def check(request: InferenceRequest, call: RpcCall, size: int) -> None:
        guard.check(call, _grant(call), INFERS, INFER.name, request.model_name)

    return check


def _stream_check(guard: AccessGuard) -> PrepareRequest:
    """Each further request is charged, and its caller identified anew after a change of the policy."""

    def check(request: InferenceRequest, call: RpcCall, size: int) -> None:
        call.access = guard.next(call, _grant(call), INFERS, STREAM_INFER.name, request.model_name, size)

    return check


def _grant(call: RpcCall) -> Grant:
    grant = call.access
    assert grant is not None, "the handler is wrapped"
    return grant
