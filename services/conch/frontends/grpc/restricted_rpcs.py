"""Checks the metadata of restricted RPCs, of unary calls before their message is received.

Source: Triton's ``--grpc-restricted-protocol``; see `access_policy.parse_restricted_protocols`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hmac import compare_digest

from conch.core.errors import ConchError, UnauthenticatedError, UnavailableError
from conch.core.request_log import Caller
from conch.frontends.access_policy import Restrictions
from conch.frontends.grpc.adapter import Metadata
from conch.frontends.grpc.rpc_calls import Admit, StreamMethod, StreamRpc, UnaryRpc
from conch.frontends.operations.operation_table import ACCESS_BY_RPC

OnRefused = Callable[[ConchError, Caller, int], None]
"""Logs a refused inference: error, call, bytes of the request."""


def _ignore(error: ConchError, call: Caller, size: int) -> None:
    """Logs nothing."""


def restrict(
    methods: Iterable[str], restrictions: Restrictions, on_refused: OnRefused = _ignore
) -> dict[str, Admit]:
    """Returns the checks of those methods that are restricted."""

    def check(key: str, value: str, notify: OnRefused) -> Admit:
        def admit(call: UnaryRpc) -> bool:
            if _carries(call.metadata, key, value):
                return True
            notify(UnauthenticatedError(_text(key)), call, 0)  # it may add to the answer
            call.abort(UnavailableError.grpc_status, _text(key))
            return False

        return admit

    found = {}
    for method in methods:
        secret = restrictions.get(ACCESS_BY_RPC.get(method, ""))
        if secret is not None:
            found[method] = check(*secret, on_refused if ACCESS_BY_RPC[method] == "inference" else _ignore)
    return found


def restrict_streams(
    handlers: Mapping[str, StreamMethod], restrictions: Restrictions, on_refused: OnRefused = _ignore
) -> dict[str, StreamMethod]:
    """Returns the handlers by method; restricted ones check the metadata once, when a stream opens."""

    def guarded(method: str, handler: StreamMethod) -> StreamMethod:
        secret = restrictions.get(ACCESS_BY_RPC.get(method, ""))
        if secret is None:
            return handler
        key, value = secret
        notify = on_refused if ACCESS_BY_RPC[method] == "inference" else _ignore

        def handle(call: StreamRpc) -> None:
            if _carries(call.metadata, key, value):
                handler(call)
            else:
                call.refuse(UnavailableError.grpc_status, _text(key))
                notify(UnauthenticatedError(_text(key)), call, 0)

        return handle

    return {method: guarded(method, handler) for method, handler in handlers.items()}


def _carries(metadata: Metadata, key: str, value: str) -> bool:
    return any(
        name == key and isinstance(given, str) and compare_digest(given.encode(), value.encode())
        for name, given in metadata
    )


def _text(key: str) -> str:
    return f"This protocol is restricted, expecting header '{key}'"
