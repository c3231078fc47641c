"""One table of the protocol's calls for both front ends.

An `Endpoint` is a call that clients see: its RPC, its paths, its access category and roles. An `Operation` is
an endpoint other than inference, with a handler from a plain request to a plain result, which `Door.ask`
runs. The front ends only convert: `grpc.operation_rpcs` messages, `http.routes` JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

from conch.access.principals import ANY, CONTROLS, EVERY_MODEL, INFERS, OPEN, READS, Roles
from conch.core.server_state import ServerState
from conch.door import operation_handlers as handlers
from conch.door.operation_handlers import SERVICE, Services

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class RunsOn(Enum):
    """The thread that runs a handler; each kind but `CALLER` has a pool of its own."""

    CALLER = auto()
    """The front end's thread: the handler does not block."""
    READINESS = auto()
    """The pool while any model has readiness checks of its own, else the front end's thread."""
    DESCRIPTION = auto()
    """The result may be long; in on-demand mode the handler may read files."""
    STATISTICS = auto()
    """The result may be long, and is made of all models."""
    REPOSITORY = auto()
    """The handler reads storage, which may hang."""
    UNLOAD = auto()
    LOAD = auto()
    MEMORY = auto()
    """The handler opens or closes shared memory."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A call that clients see.

    Attributes:
        name: Unique in the table.
        access: Category of restricted protocols and APIs.
        summary: One line for OpenAPI.
        rpc: Method of `SERVICE`, or ``service/method`` of another service; empty without an RPC.
        http_method: Method of all paths.
        paths: Templates such as ``/v2/models/{model}[/versions/{version}]``, with one optional part each.
        roles: Roles of an access policy, of which one suffices; none for calls without credentials.
    """

    name: str
    access: str
    summary: str
    rpc: str = ""
    http_method: str = "GET"
    paths: tuple[str, ...] = ()
    roles: Roles = field(kw_only=True)

    @property
    def entry_roles(self) -> Roles:
        """The roles of which one is needed for any request, before it is read."""
        return self.roles

    @property
    def grpc_method(self) -> str:
        """The RPC as gRPC writes it, such as ``/inference.GRPCInferenceService/ServerLive``."""
        return f"/{self.rpc}" if "/" in self.rpc else f"/{SERVICE}/{self.rpc}"


@dataclass(frozen=True, slots=True)
class Operation(Endpoint, Generic[RequestT, ResultT]):
    """An endpoint with its handler.

    Attributes:
        handler: Maps a plain request to a plain result; raises `ConchError`.
        runs_on: The thread that runs the handler.
        mutates: True if the handler changes the server.
        model_of: The model that a request names; empty for none, `EVERY_MODEL` for the server as a whole.
        changes: Returns True if a request changes anything, for calls that may also read; None for others.
        check: Raises if the operation is not allowed at all; its last argument is the model that it names.
        shown: Reduces a listing to the models whose names pass a test; None if the result is no listing.
    """

    handler: Callable[[ServerState, Services, RequestT], ResultT] = field(kw_only=True)
    runs_on: RunsOn = field(default=RunsOn.CALLER, kw_only=True)
    mutates: bool = field(default=False, kw_only=True)
    model_of: Callable[[RequestT], str] = field(default=lambda request: "", kw_only=True)
    changes: Callable[[RequestT], bool] | None = field(default=None, kw_only=True)
    check: Callable[[ServerState, Services, str], None] | None = field(default=None, kw_only=True)
    shown: Callable[[ResultT, Callable[[str], bool]], ResultT] | None = field(default=None, kw_only=True)

    @property
    def entry_roles(self) -> Roles:
        """`READS` where only some requests change anything."""
        return self.roles if self.changes is None else READS

    def roles_for(self, request: RequestT) -> Roles:
        """The roles for one request."""
        return READS if self.changes is not None and not self.changes(request) else self.roles


_MODEL = "/v2/models/{model}[/versions/{version}]"
_TRACE = ("/v2/models/{model}/trace/setting", "/v2/trace/setting")
_LOGGING = ("/v2/logging",)
_REPOSITORY = "/v2/repository[/{repository}]"
_ROLLOUT = _REPOSITORY + "/models/{model}/rollout"
_LABEL = _REPOSITORY + "/models/{model}/labels/{label}"
_SYSTEM = "/v2/systemsharedmemory[/region/{region}]"
_CUDA = "/v2/cudasharedmemory[/region/{region}]"

HOME_PAGE = Endpoint("home_page", "metadata", "A page for people", paths=("/",), roles=ANY)
OPENAPI = Endpoint("openapi", "metadata", "This document", paths=("/openapi.json",), roles=ANY)
DOCS_PAGE = Endpoint(
    "docs_page", "metadata", "A page of conch's documentation", paths=("/docs/{page}",), roles=ANY
)
SERVER_METADATA = Operation(
    "server_metadata",
    "metadata",
    "Server metadata",
    "ServerMetadata",
    paths=("/v2",),
    roles=ANY,
    handler=handlers.server_metadata,
)
SERVER_LIVE = Operation(
    "server_live",
    "health",
    "Whether the server is live",
    "ServerLive",
    paths=("/v2/health/live",),
    roles=OPEN,
    handler=handlers.server_live,
)
SERVER_READY = Operation(
    "server_ready",
    "health",
    "Whether the server is ready",
    "ServerReady",
    paths=("/v2/health/ready",),
    roles=OPEN,
    handler=handlers.server_ready,
    runs_on=RunsOn.READINESS,
)
HEALTH_CHECK = Operation(
    "health_check",
    "health",
    "Status of the server in gRPC's health protocol",
    "grpc.health.v1.Health/Check",
    roles=OPEN,
    handler=handlers.health_check,
    runs_on=RunsOn.READINESS,
)
HEALTH_WATCH = Endpoint(
    "health_watch", "health", "Changes of the server's status", "grpc.health.v1.Health/Watch", roles=OPEN
)
ALL_STATISTICS = Operation(
    "all_statistics",
    "statistics",
    "Statistics of all models",
    paths=("/v2/models/stats",),
    roles=READS,
    handler=handlers.statistics,
    model_of=lambda request: request.name,
    shown=handlers.statistics_of,
    runs_on=RunsOn.STATISTICS,
)
MODEL_METADATA = Operation(
    "model_metadata",
    "metadata",
    "Model metadata",
    "ModelMetadata",
    paths=(_MODEL,),
    roles=ANY,
    handler=handlers.model_metadata,
    runs_on=RunsOn.DESCRIPTION,
    model_of=lambda request: request.name,
)
MODEL_READY = Operation(
    "model_ready",
    "health",
    "Whether the model is ready",
    "ModelReady",
    paths=(_MODEL + "/ready",),
    roles=ANY,
    handler=handlers.model_ready,
    model_of=lambda request: request.name,
    runs_on=RunsOn.READINESS,
)
MODEL_CONFIG = Operation(
    "model_config",
    "model-config",
    "Model configuration",
    "ModelConfig",
    paths=(_MODEL + "/config",),
    roles=ANY,
    handler=handlers.model_config,
    runs_on=RunsOn.DESCRIPTION,
    model_of=lambda request: request.name,
)
MODEL_STATISTICS = Operation(
    "model_statistics",
    "statistics",
    "Statistics of the model",
    "ModelStatistics",
    paths=(_MODEL + "/stats",),
    roles=READS,
    handler=handlers.statistics,
    model_of=lambda request: request.name,
    shown=handlers.statistics_of,
    runs_on=RunsOn.STATISTICS,
)
INFER = Endpoint(
    "infer", "inference", "Run the model", "ModelInfer", "POST", (_MODEL + "/infer",), roles=INFERS
)
STREAM_INFER = Endpoint(
    "stream_infer", "inference", "Run models over one stream", "ModelStreamInfer", roles=INFERS
)
GENERATE = Endpoint(
    "generate",
    "inference",
    "Run the model with flat JSON",
    http_method="POST",
    paths=(_MODEL + "/generate",),
    roles=INFERS,
)
GENERATE_STREAM = Endpoint(
    "generate_stream",
    "inference",
    "Run the model with flat JSON and stream what it responds",
    http_method="POST",
    paths=(_MODEL + "/generate_stream",),
    roles=INFERS,
)
TRACE_SETTINGS = Operation(
    "trace_settings",
    "trace",
    "Trace settings",
    paths=_TRACE,
    roles=READS,
    handler=handlers.trace_settings,
    model_of=lambda model: model,
)
UPDATE_TRACE_SETTINGS = Operation(
    "update_trace_settings",
    "trace",
    "Change trace settings",
    "TraceSetting",
    "POST",
    _TRACE,
    roles=CONTROLS,
    handler=handlers.update_trace_settings,
    model_of=lambda request: request.model or (EVERY_MODEL if request.changes else ""),
    changes=lambda request: bool(request.changes),
    mutates=True,
    check=handlers.check_traced,
)
LOG_SETTINGS = Operation(
    "log_settings", "logging", "Log settings", paths=_LOGGING, roles=READS, handler=handlers.log_settings
)
UPDATE_LOG_SETTINGS = Operation(
    "update_log_settings",
    "logging",
    "Change log settings",
    "LogSettings",
    "POST",
    _LOGGING,
    roles=CONTROLS,
    handler=handlers.update_log_settings,
    model_of=lambda changes: EVERY_MODEL if changes else "",
    changes=bool,
    mutates=True,
)
REPOSITORY_INDEX = Operation(
    "repository_index",
    "model-repository",
    "All models",
    "RepositoryIndex",
    "POST",
    (_REPOSITORY + "/index",),
    roles=READS,
    handler=handlers.repository_index,
    shown=handlers.entries_of,
    runs_on=RunsOn.REPOSITORY,
)
LOAD_MODEL = Operation(
    "load_model",
    "model-repository",
    "Load or reload a model",
    "RepositoryModelLoad",
    "POST",
    (_REPOSITORY + "/models/{model}/load",),
    roles=CONTROLS,
    handler=handlers.load_model,
    model_of=lambda request: request.name,
    runs_on=RunsOn.LOAD,
    mutates=True,
    check=handlers.check_changes,
)
UNLOAD_MODEL = Operation(
    "unload_model",
    "model-repository",
    "Unload a model",
    "RepositoryModelUnload",
    "POST",
    (_REPOSITORY + "/models/{model}/unload",),
    roles=CONTROLS,
    handler=handlers.unload_model,
    model_of=lambda request: request.name,
    runs_on=RunsOn.UNLOAD,
    mutates=True,
    check=handlers.check_changes,
)
SET_LABEL = Operation(
    "set_label",
    "model-repository",
    "Have a label name a version of the model",
    http_method="PUT",
    paths=(_LABEL,),
    roles=CONTROLS,
    handler=handlers.set_label,
    model_of=lambda request: request.name,
    runs_on=RunsOn.UNLOAD,
    mutates=True,
    check=handlers.check_changes,
)
REMOVE_LABEL = Operation(
    "remove_label",
    "model-repository",
    "Remove a label of the model",
    http_method="DELETE",
    paths=(_LABEL,),
    roles=CONTROLS,
    handler=handlers.set_label,
    model_of=lambda request: request.name,
    runs_on=RunsOn.UNLOAD,
    mutates=True,
    check=handlers.check_changes,
)
GET_ROLLOUT = Operation(
    "get_rollout",
    "model-repository",
    "Labels and rollout of the model",
    paths=(_ROLLOUT,),
    roles=READS,
    handler=handlers.rollout,
    model_of=lambda name: name,
    runs_on=RunsOn.UNLOAD,
)
START_ROLLOUT = Operation(
    "start_rollout",
    "model-repository",
    "Start a rollout of the model",
    http_method="POST",
    paths=(_ROLLOUT,),
    roles=CONTROLS,
    handler=handlers.start_rollout,
    model_of=lambda request: request.name,
    runs_on=RunsOn.REPOSITORY,
    mutates=True,
    check=handlers.check_rollout_changes,
)
UPDATE_ROLLOUT = Operation(
    "update_rollout",
    "model-repository",
    "Pause, resume, advance, promote, abort or roll back a rollout, or set its weight",
    http_method="POST",
    paths=(_ROLLOUT + "/{action}",),
    roles=CONTROLS,
    handler=handlers.update_rollout,
    model_of=lambda request: request.name,
    runs_on=RunsOn.UNLOAD,
    mutates=True,
    check=handlers.check_rollout_changes,
)
DELETE_ROLLOUT = Operation(
    "delete_rollout",
    "model-repository",
    "End a rollout of the model, and forget it",
    http_method="DELETE",
    paths=(_ROLLOUT,),
    roles=CONTROLS,
    handler=handlers.update_rollout,
    model_of=lambda request: request.name,
    runs_on=RunsOn.UNLOAD,
    mutates=True,
    check=handlers.check_rollout_changes,
)
SYSTEM_REGIONS = Operation(
    "system_regions",
    "shared-memory",
    "System regions",
    "SystemSharedMemoryStatus",
    paths=(_SYSTEM + "/status",),
    roles=INFERS,
    handler=handlers.system_regions,
)
REGISTER_SYSTEM = Operation(
    "register_system",
    "shared-memory",
    "Register a region",
    "SystemSharedMemoryRegister",
    "POST",
    (_SYSTEM + "/register",),
    roles=INFERS,
    handler=handlers.register_system,
    runs_on=RunsOn.MEMORY,
    mutates=True,
    check=handlers.check_registrations,
)
UNREGISTER_SYSTEM = Operation(
    "unregister_system",
    "shared-memory",
    "Unregister a region, or all of them",
    "SystemSharedMemoryUnregister",
    "POST",
    (_SYSTEM + "/unregister",),
    roles=INFERS,
    handler=handlers.unregister_system,
    runs_on=RunsOn.MEMORY,
    mutates=True,
)
CUDA_REGIONS = Operation(
    "cuda_regions",
    "shared-memory",
    "Cuda regions",
    "CudaSharedMemoryStatus",
    paths=(_CUDA + "/status",),
    roles=INFERS,
    handler=handlers.cuda_regions,
)
REGISTER_CUDA = Operation(
    "register_cuda",
    "shared-memory",
    "Register a region",
    "CudaSharedMemoryRegister",
    "POST",
    (_CUDA + "/register",),
    roles=INFERS,
    handler=handlers.register_cuda,
    runs_on=RunsOn.MEMORY,
    mutates=True,
    check=handlers.check_registrations,
)
UNREGISTER_CUDA = Operation(
    "unregister_cuda",
    "shared-memory",
    "Unregister a region, or all of them",
    "CudaSharedMemoryUnregister",
    "POST",
    (_CUDA + "/unregister",),
    roles=INFERS,
    handler=handlers.unregister_cuda,
    runs_on=RunsOn.MEMORY,
    mutates=True,
)

# In the order of the OpenAPI document. A literal path comes before a template that matches it.
ENDPOINTS: tuple[Endpoint, ...] = (
    HOME_PAGE,
    OPENAPI,
    DOCS_PAGE,
    SERVER_METADATA,
    SERVER_LIVE,
    SERVER_READY,
    HEALTH_CHECK,
    HEALTH_WATCH,
    ALL_STATISTICS,
    MODEL_METADATA,
    MODEL_READY,
    MODEL_CONFIG,
    MODEL_STATISTICS,
    INFER,
    STREAM_INFER,
    GENERATE,
    GENERATE_STREAM,
    TRACE_SETTINGS,
    UPDATE_TRACE_SETTINGS,
    LOG_SETTINGS,
    UPDATE_LOG_SETTINGS,
    REPOSITORY_INDEX,
    LOAD_MODEL,
    UNLOAD_MODEL,
    SET_LABEL,
    REMOVE_LABEL,
    GET_ROLLOUT,
    START_ROLLOUT,
    UPDATE_ROLLOUT,
    DELETE_ROLLOUT,
    SYSTEM_REGIONS,
    REGISTER_SYSTEM,
    UNREGISTER_SYSTEM,
    CUDA_REGIONS,
    REGISTER_CUDA,
    UNREGISTER_CUDA,
)

ACCESS_CATEGORIES = frozenset(endpoint.access for endpoint in ENDPOINTS)
"""The categories that flags can restrict."""

SERVICES = tuple(sorted({each.grpc_method.split("/")[1] for each in ENDPOINTS if each.rpc}))
"""The gRPC services of the table."""

ENDPOINT_BY_RPC = {each.grpc_method: each for each in ENDPOINTS if each.rpc}
"""The endpoint of each gRPC method."""

_SEGMENTS = {"version": "[0-9]+"}


def path_variants(template: str) -> list[str]:
    """Returns the paths of a template: without its optional part, then with it."""
    start, bracket, rest = template.partition("[")
    optional, _, end = rest.partition("]")
    return [start + end, start + optional + end] if bracket else [template]


def path_pattern(template: str) -> str:
    """Returns the regular expression of a template; groups are called after its fields."""
    escaped = template.replace(".", "[.]").replace("[/", "(?:/").replace("}]", "})?")
    return re.sub(r"{(\w+)}", lambda field: f"(?P<{field[1]}>{_SEGMENTS.get(field[1], '[^/]+')})", escaped)
