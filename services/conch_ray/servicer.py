"""Registers conch's RPCs with Ray Serve's gRPC proxies.

Ray calls the function that `grpc_servicer_functions` names with its server, and replaces the handlers by its
own, which send each message to a replica. The handlers here have no serializers, so that messages stay bytes
on their way: conch's message classes belong to a private descriptor pool, and the replica decodes anyway.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from conch.door.operation_handlers import SERVICE
from conch.door.operation_table import ENDPOINTS, STREAM_INFER

STREAM_METHODS = frozenset({STREAM_INFER.rpc})
"""RPCs of the service that are bidirectional streams."""

UNARY_METHODS = frozenset(each.rpc for each in ENDPOINTS if each.rpc and "/" not in each.rpc) - STREAM_METHODS
"""The other RPCs of the service."""

_LOST = ("ActorDiedError", "ActorUnavailableError", "The actor died", "The actor is dead")
"""Parts of Ray's error text for a request whose replica has died; its status is INTERNAL."""
_RETRY = "the replica of the request has died; another one may answer it"


def add_GRPCInferenceServiceServicer_to_server(servicer: Any, server: Any) -> None:
    """Adds the service to a server of Ray Serve; the name is that of protoc's function.

    Args:
        servicer: Has a method for each RPC; Ray replaces it.
        server: Ray's server.
    """
    unary = {
        f"/{SERVICE}/{name}": grpc.unary_unary_rpc_method_handler(getattr(servicer, name))
        for name in UNARY_METHODS
    }
    streams = {
        f"/{SERVICE}/{name}": grpc.stream_stream_rpc_method_handler(getattr(servicer, name))
        for name in STREAM_METHODS
    }
    server.add_generic_rpc_handlers((_Handlers({**unary, **streams}),))


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The handlers of the service, with the status of calls whose replica has died.

    Attributes:
        _method_handlers: Read and replaced by Ray, as in the handlers that grpcio makes.
    """

    def __init__(self, handlers: dict[str, Any]) -> None:
        self._method_handlers = handlers

    def service(self, handler_call_details: Any) -> Any:
        """Returns the handler of a method; None for an unknown one."""
        handler = self._method_handlers.get(handler_call_details.method)
        if handler is None:
            return None
        if handler.request_streaming:
            return handler._replace(stream_stream=_retryable_stream(handler.stream_stream))
        return handler._replace(unary_unary=_retryable(handler.unary_unary))


def _retryable(handler: Callable[[Any, Any], Awaitable[bytes]]) -> Callable[[Any, Any], Awaitable[bytes]]:
    async def handle(request: bytes, context: Any) -> bytes:
        message = await handler(request, context)
        _correct_status(context)
        return message

    return handle


def _retryable_stream(
    handler: Callable[[Any, Any], AsyncIterator[bytes]],
) -> Callable[[Any, Any], AsyncIterator[bytes]]:
    async def handle(requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for message in handler(requests, context):
            yield message
        _correct_status(context)

    return handle


def _correct_status(context: Any) -> None:
    """Sets UNAVAILABLE, which clients retry, instead of INTERNAL if the call's replica has died."""
    if context.code() is grpc.StatusCode.INTERNAL and any(each in context.details() for each in _LOST):
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_details(_RETRY)
