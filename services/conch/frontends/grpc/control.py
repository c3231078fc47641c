"""The RPCs about the server, its models and its repository: one small function each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from conch.core.errors import (
    ConchError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from conch.core.server_core import EXTENSIONS, LoadParameter, ServerCore
from conch.frontends.answers import counted_models, refuse_repository_name, served_versions
from conch.frontends.grpc.adapter import UnaryCall, UnaryHandler
from conch.frontends.grpc.convert import metadata_message, statistics_message
from conch.frontends.grpc.wire import check_fields
from conch.frontends.uploads import UploadRule, is_local_peer
from conch.protocol import health_pb2
from conch.protocol import inference_pb2 as pb
from conch.protocol import model_config_pb2 as config_pb

log = logging.getLogger(__name__)

MOST_BYTES = 64 * 1024
"""How long the requests of RPCs are at most that carry names and settings."""

HEALTH_SERVICES = frozenset(("", "inference.GRPCInferenceService"))
"""What the health service knows: the server as a whole, and the one service that has a status."""

_LOAD_DEPTH = 3  # the request, the entries of its parameters, their values


class ControlHandlers:
    """Answers everything that is not inference.

    Args:
        core: The server.
        quick: Runs what reads the repository, off the polling threads.
        unloads: Runs unloads, which do not.
        slow: Runs loads.
        checks: Waits for models that look whether they are ready.
        uploads: Which clients may load models of files that they bring.
    """

    def __init__(
        self,
        core: ServerCore,
        quick: Executor,
        unloads: Executor,
        slow: Executor,
        checks: Executor,
        uploads: UploadRule,
    ) -> None:
        self._uploads = uploads
        self._checks = checks
        self._core = core
        self._quick = quick
        self._unloads = unloads
        self._slow = slow

    def handlers(self) -> dict[str, UnaryHandler]:
        """Every unary method of the service but ModelInfer, and the health check."""
        service = "/inference.GRPCInferenceService/"
        quick: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "ServerLive": (pb.ServerLiveRequest, self._server_live),
            "ServerMetadata": (pb.ServerMetadataRequest, self._server_metadata),
            "ModelMetadata": (pb.ModelMetadataRequest, self._model_metadata),
            "ModelConfig": (pb.ModelConfigRequest, self._model_config),
            "ModelStatistics": (pb.ModelStatisticsRequest, self._model_statistics),
        }
        later: dict[str, tuple[Any, Callable[[Any], Any], Executor]] = {
            "RepositoryIndex": (pb.RepositoryIndexRequest, self._repository_index, self._quick),
            "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, self._unload, self._unloads),
        }
        table: dict[str, UnaryHandler] = {
            service + name: answering(kind, answer) for name, (kind, answer) in quick.items()
        }
        table |= {
            service + name: answering_later(kind, answer, pool)
            for name, (kind, answer, pool) in later.items()
        }
        table[service + "RepositoryModelLoad"] = self._loading
        table[service + "ServerReady"] = self._checking(pb.ServerReadyRequest, self._server_ready)
        table[service + "ModelReady"] = self._checking(pb.ModelReadyRequest, self._model_ready)
        table["/grpc.health.v1.Health/Check"] = self._checking(health_pb2.HealthCheckRequest, self._health)
        return table

    def _server_live(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._core.live)

    def _server_ready(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._core.ready)

    def _model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._core.model_ready(request.name, request.version))

    def _checking(self, kind: Any, answer: Callable[[Any], Any]) -> UnaryHandler:
        """A handler that is not to run on a polling thread as long as any model checks itself."""
        now, later = answering(kind, answer), answering_later(kind, answer, self._checks)

        def handle(call: UnaryCall, message: bytes) -> None:
            (later if any(self._core.readiness()) else now)(call, message)

        return handle

    def _server_metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        core = self._core
        core.check_running()
        return pb.ServerMetadataResponse(name=core.server_id, version=core.version, extensions=EXTENSIONS)

    def _model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        return metadata_message(*served_versions(self._core, request.name, request.version))

    def _model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        spec = self._core.model(request.name, request.version).spec
        return pb.ModelConfigResponse(config=config_pb.ModelConfig.FromString(spec.config_message))

    def _model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        models = counted_models(self._core, request.name, request.version)
        return pb.ModelStatisticsResponse(
            model_stats=[statistics_message(model.spec, model.statistics.snapshot()) for model in models]
        )

    def _repository_index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        refuse_repository_name(request.repository_name)
        return pb.RepositoryIndexResponse(
            models=[
                pb.RepositoryIndexResponse.ModelIndex(
                    name=entry.name, version=entry.version, state=entry.state, reason=entry.reason
                )
                for entry in self._core.agent.index(request.ready)
            ]
        )

    def _loading(self, call: UnaryCall, message: bytes) -> None:
        local = is_local_peer(call.peer)
        may_upload = self._uploads.allows(local, (key for key, _ in call.metadata))
        answer = partial(self._load, may_upload=may_upload)
        # Its parameters hold files, so it may have any length.
        answering_later(_LoadRequest, answer, self._slow, None)(call, message)

    def _load(
        self, request: pb.RepositoryModelLoadRequest, may_upload: bool
    ) -> pb.RepositoryModelLoadResponse:
        refuse_repository_name(request.repository_name)
        parameters: dict[str, LoadParameter] = {}
        for key, value in request.parameters.items():
            wanted = _load_parameter_kind(key)
            if value.WhichOneof("parameter_choice") != wanted:
                raise InvalidArgumentError(
                    f"invalid value type for load parameter '{key}', expected {wanted}."
                )
            parameters[key] = getattr(value, wanted)
        self._core.agent.load(request.model_name, parameters, may_upload)
        return pb.RepositoryModelLoadResponse()

    def _unload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        refuse_repository_name(request.repository_name)
        dependents = False
        for key, value in request.parameters.items():
            if key != "unload_dependents":
                raise InvalidArgumentError(f"unrecognized unload parameter '{key}'.")
            if value.WhichOneof("parameter_choice") != "bool_param":
                raise InvalidArgumentError(f"invalid value type for '{key}' parameter, expected bool_param.")
            dependents = value.bool_param
        self._core.agent.unload(request.model_name, dependents)
        return pb.RepositoryModelUnloadResponse()

    def _health(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        if request.service not in HEALTH_SERVICES:
            raise NotFoundError(f"unknown service '{request.service}'")
        states = health_pb2.HealthCheckResponse
        return states(status=states.SERVING if self._core.serving else states.NOT_SERVING)


class _LoadRequest:
    """Reads load requests; protobuf lets no other thread run while it parses, so their fields are counted."""

    @staticmethod
    def FromString(message: bytes) -> pb.RepositoryModelLoadRequest:
        check_fields(message, depth=_LOAD_DEPTH)
        return pb.RepositoryModelLoadRequest.FromString(message)


def _load_parameter_kind(key: str) -> str:
    if key == "config":
        return "string_param"
    if key.startswith("file:"):
        return "bytes_param"
    raise InvalidArgumentError(f"unrecognized load parameter '{key}'.")


def answering(kind: Any, answer: Callable[[Any], Any]) -> UnaryHandler:
    """A handler that parses, answers and serialises on the polling thread.

    Args:
        kind: Message class of the request.
        answer: Takes the request, gives the response message; raises `ConchError`.
    """

    def handle(call: UnaryCall, message: bytes) -> None:
        if _fits(call, message, MOST_BYTES):
            _answer(call, message, kind, answer)

    return handle


def _fits(call: UnaryCall, message: bytes, most_bytes: int | None) -> bool:
    """Whether a request is no longer than those of its RPC may be; refuses it if it is."""
    if most_bytes is None or len(message) <= most_bytes:
        return True
    call.abort(
        ResourceExhaustedError.grpc_status,
        f"the request message has {len(message)} bytes, of which this RPC takes {most_bytes}",
    )
    return False


def _answer(call: UnaryCall, message: bytes, kind: Any, answer: Callable[[Any], Any]) -> None:
    try:
        call.reply(answer(kind.FromString(message)).SerializeToString())
    except ConchError as error:
        call.abort(error.grpc_status, error.message)
    except DecodeError as error:
        call.abort(InvalidArgumentError.grpc_status, f"the request message is malformed: {error}")
    except Exception as error:
        log.exception("%s could not be answered", kind.__name__)
        call.abort(InternalError.grpc_status, f"the request could not be answered: {error}")


def answering_later(
    kind: Any, answer: Callable[[Any], Any], pool: Executor, most_bytes: int | None = MOST_BYTES
) -> UnaryHandler:
    """A handler like that of `answering`, but off the polling threads.

    Args:
        kind: Message class of the request.
        answer: Takes the request, gives the response message; raises `ConchError`.
        pool: Runs it.
        most_bytes: How long the request may be; None for any length.
    """

    def handle(call: UnaryCall, message: bytes) -> None:
        if _fits(call, message, most_bytes):
            pool.submit(_answer, call, message, kind, answer)

    return handle
