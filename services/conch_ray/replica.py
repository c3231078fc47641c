"""The actor of the deployment: a server without ports, whose RPCs come through Ray's proxies.

Owns: the server, its handlers and its models. Threads and locks: Ray calls the methods on one event loop,
which is not the main thread's; the server answers from its own threads. No signal handlers; nothing of the
process is changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import grpc
from ray import serve
from starlette.responses import PlainTextResponse

from conch.core.errors import ERRORS_BY_CODE, ConchError, InternalError, UnavailableError
from conch.door.operation_handlers import SERVICE
from conch.door.operation_table import STREAM_INFER
from conch.frontends.grpc.open_calls import OpenCalls
from conch.observability.metrics.load_meter import LoadMeter
from conch.protocol import inference_pb2
from conch.settings.option import FlagError
from conch_api.embedded_server import Server
from conch_api.server_keywords import ServerKeywords
from conch_grpcio.asyncio_calls import CallEnd, CallHead, RefusalError, StreamCall, UnaryCall
from conch_ray.multiplexing import ReplicaModels
from conch_ray.saturation import SATURATION
from conch_ray.servicer import UNARY_METHODS

_PORT_FLAGS = (
    "grpc_",
    "http_",
    "metrics_",
    "control_",
    "reuse_",
    "allow_grpc",
    "allow_http",
    "allow_metrics",
    "allow_gpu_metrics",
    "allow_cpu_metrics",
    "listen_while_loading",
    "otlp_metrics_url",
)
_OTHERS_REFUSED = {
    "allow_client_shm": "clients share no memory with replicas",
    "allow_model_upload": "files in load requests are refused, as they would reach one replica only",
}
_CLOSE_S = 1.0

MAX_ONGOING_REQUESTS = 256
"""Requests that Ray gives a replica at a time: Ray's default of 5 would keep conch from batching."""

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
_ERRORS = {error.grpc_status: error for error in ERRORS_BY_CODE.values()}
_RESPONSES: Mapping[str, Any] = {
    method.name: getattr(inference_pb2, method.output_type.name)
    for method in inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
}


@dataclass(frozen=True, slots=True)
class EncodedMessage:
    """A message as bytes, where Ray expects a protobuf message."""

    message: bytes

    def SerializeToString(self) -> bytes:
        """The bytes."""
        return self.message


class ConchReplica:
    """A replica. Its methods have the names of the RPCs.

    Called by Ray's gRPC proxy, they take bytes and return what Ray sends; called through a deployment handle,
    they take and return the messages of `conch.protocol.inference_pb2` and raise `conch.ConchError`.

    Args:
        repositories: Model repositories, as of `conch.Server`; each node must see them.
        multiplexed_models: Most models that requests with a `multiplexed_model_id` have loaded at a time; 0
            for none.
        flags: The flags of `conch.Server`, without those of ports and of shared memory.

    Raises:
        FlagError: A flag is unknown, invalid, or has no effect here.
        ConchError: The server cannot start.
    """

    _server: Server | None = None

    def __init__(
        self, *repositories: str, multiplexed_models: int = 0, **flags: Unpack[ServerKeywords]
    ) -> None:
        _check_flags(flags, multiplexed_models)
        ports: ServerKeywords = {"grpc_port": None, "http_port": None, "metrics_port": None}
        keywords: ServerKeywords = {**ports, "allow_client_shm": False, **flags}
        server = Server(*repositories, **keywords)
        self._server = server.start()
        self._methods = server.grpc_methods()
        self._open_calls = OpenCalls()
        explicit = flags.get("model_control_mode") == "explicit"
        self._models = ReplicaModels(server, _startup_models(flags), explicit, multiplexed_models)
        self._meter = LoadMeter(server.registry)

    async def ModelStreamInfer(
        self, request_stream: Any, grpc_context: Any | None = None
    ) -> AsyncIterator[EncodedMessage]:
        """Answers a stream of Ray's gRPC proxy, a `gRPCInputStream`."""
        call = StreamCall(_head(grpc_context), self._open_calls, self._receiver(request_stream))
        try:
            self._methods.streams[STREAM_INFER.grpc_method](call)
            async for message in call.responses():
                yield EncodedMessage(message)
        except RefusalError as refusal:
            if grpc_context is not None:
                _set_status(grpc_context, refusal.end)
            raise _error(refusal.end) from None
        finally:
            call.finish()

    async def __call__(self, request: Any) -> PlainTextResponse:
        """Refuses HTTP requests, which Ray's HTTP proxy passes on."""
        return PlainTextResponse("conch answers gRPC behind Ray Serve; REST is not served here.\n", 501)

    async def check_health(self) -> None:
        """Raises if the server is not ready; Ray replaces the replica after some failures.

        Models whose workers can't be restarted are not ready, and neither are models that say so.

        Raises:
            UnavailableError: It is not ready, with the models that are not.
        """
        server = self._running()
        if not await asyncio.to_thread(lambda: server.ready):
            states = [f"{each.name} ({each.state}: {each.reason})" for each in server.models if each.reason]
            raise UnavailableError(f"the server is not ready; models: {', '.join(states) or 'none failed'}")

    async def reconfigure(self, user_config: Any) -> None:
        """Loads the models of ``{"models": [...]}``, and unloads those of the config before."""
        await self._models.configure(user_config)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the largest saturation of the models since the last call, for `SaturationPolicy`."""
        return {SATURATION: self._meter.read().utilization}

    def shutdown(self) -> None:
        """Finishes running requests and stops the server; later calls do nothing."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
            self._methods.close(_CLOSE_S)

    def __del__(self) -> None:
        """Stops the server; Ray calls this when the replica has no more requests."""
        self.shutdown()

    def _running(self) -> Server:
        if self._server is None:
            raise UnavailableError("the server has been stopped")
        return self._server

    async def _call(self, method: str, request: Any, context: Any | None) -> Any:
        try:
            await self._models.need(serve.get_multiplexed_model_id())
            call = UnaryCall(_head(context), self._open_calls)
            self._methods.handle(f"/{SERVICE}/{method}", call, _encoded(request))
            message = (await call.answer()).message  # compression and trailing metadata are the proxy's
        except (RefusalError, ConchError) as error:
            if context is None:
                raise (_error(error.end) if isinstance(error, RefusalError) else error) from None
            # The status without an exception: Ray logs a traceback on two processes for each of those.
            _set_status(context, error.end if isinstance(error, RefusalError) else _end(error))
            return EncodedMessage(b"")
        return _RESPONSES[method].FromString(message) if context is None else EncodedMessage(message)

    def _receiver(self, request_stream: Any) -> Callable[[], Awaitable[bytes | None]]:
        model = serve.get_multiplexed_model_id()

        async def receive() -> bytes | None:
            try:
                request = await anext(request_stream)
            except StopAsyncIteration:
                if request_stream.is_cancelled():
                    raise ConnectionError from None
                return None
            await self._models.need(model)
            return _encoded(request)

        return receive


def _unary(name: str) -> Callable[..., Awaitable[Any]]:
    async def method(self: ConchReplica, request: Any, grpc_context: Any | None = None) -> Any:
        return await self._call(name, request, grpc_context)

    method.__name__ = name
    method.__qualname__ = f"{ConchReplica.__qualname__}.{name}"
    method.__doc__ = f"Answers the RPC {name}."
    return method


for _name in UNARY_METHODS:
    setattr(ConchReplica, _name, _unary(_name))

ConchDeployment = serve.deployment(name="conch", max_ongoing_requests=MAX_ONGOING_REQUESTS)(ConchReplica)
"""The deployment; see `ConchReplica` for the arguments of `bind`."""


def build_app(args: Mapping[str, Any]) -> Any:
    """Builds the application of a config file of Ray Serve, whose `import_path` is ``conch_ray:build_app``.

    Args:
        args: ``repositories``, a list, and the other arguments of `ConchReplica`.

    Raises:
        FlagError: One is unknown or has no effect.
    """
    flags = dict(args)
    repositories = flags.pop("repositories", None)
    if not isinstance(repositories, list | tuple) or not repositories:
        raise FlagError(f"repositories must be a list of model repositories, not {repositories!r}")
    multiplexed = flags.pop("multiplexed_models", 0)
    _check_flags(flags, multiplexed)
    return ConchDeployment.bind(*repositories, multiplexed_models=multiplexed, **flags)


def _check_flags(flags: Mapping[str, Any], multiplexed_models: int) -> None:
    for name in flags:
        if name.startswith(_PORT_FLAGS):
            raise FlagError(f"{name} has no effect in Ray Serve, whose proxies have the ports")
        if name in _OTHERS_REFUSED:
            raise FlagError(f"{name} has no effect in Ray Serve: {_OTHERS_REFUSED[name]}")
    if isinstance(multiplexed_models, bool) or not isinstance(multiplexed_models, int):
        raise FlagError(f"multiplexed_models must be a whole number, not {multiplexed_models!r}")
    if multiplexed_models < 0:
        raise FlagError(f"multiplexed_models must be 0 or more, not {multiplexed_models}")
    if multiplexed_models and (
        flags.get("model_control_mode") != "explicit" or "*" in _startup_models(flags)
    ):
        raise FlagError(
            "multiplexed_models loads models when they are needed: it needs model_control_mode='explicit', "
            "and load_model without '*'"
        )


def _startup_models(flags: Mapping[str, Any]) -> Sequence[str]:
    names = flags.get("load_model") or ()
    return (names,) if isinstance(names, str) else names


def _encoded(request: Any) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


def _head(context: Any | None) -> CallHead:
    """Client and metadata of a call, and that the call was forwarded: a client is never local.

    Ray passes on no deadline of the client: it cancels the call. Its proxies ask for no certificates.

    Args:
        context: Ray's `RayServegRPCContext`; None for a call through a deployment handle.
    """
    client: str = "" if context is None else context.peer()
    sent: list[tuple[str, str | bytes]] = [] if context is None else context.invocation_metadata()
    return CallHead(client, (*sent, ("x-forwarded-for", client)))


def _error(end: CallEnd) -> ConchError:
    return _ERRORS.get(end.status, InternalError)(end.details)


def _end(error: ConchError) -> CallEnd:
    return CallEnd(error.grpc_status, error.message)


def _set_status(context: Any, end: CallEnd) -> None:
    context.set_code(_STATUS_CODES[end.status])
    context.set_details(end.details)
    if end.trailing:
        context.set_trailing_metadata(list(end.trailing))
