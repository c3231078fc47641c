"""Bearer token authentication of the ModelControl service."""

from __future__ import annotations

import hmac
from typing import Any

import grpc

from conch.core.errors import UnauthenticatedError
from conch_control.remote_api.status_codes import abort

AUTHORIZATION = "authorization"
SCHEME = "Bearer "

_MISSING = "no token: the metadata 'authorization: Bearer TOKEN' is expected (--token-file of conch models)"
_WRONG = "wrong token: it is not the one in the server's --control-token-file"


class TokenGuard:
    """Method handlers for authenticated calls; a `grpc.GenericRpcHandler`.

    Args:
        handlers: The method handlers.
        token: The token.
    """

    def __init__(self, handlers: Any, token: str) -> None:
        self._handlers = handlers
        self._expected = (SCHEME + token).encode()

    def service(self, details: Any) -> Any:
        """The handler of a call, before any message is read."""
        shown = [value for key, value in details.invocation_metadata if key == AUTHORIZATION]
        if len(shown) == 1 and hmac.compare_digest(shown[0].encode(), self._expected):
            return self._handlers.service(details)
        error = UnauthenticatedError(_WRONG if shown else _MISSING)
        # A stream handler reads no message before it asks for one.
        return grpc.stream_stream_rpc_method_handler(lambda _, context: abort(context, error))
