"""Handlers of the operations: each maps a plain request to a plain result.

The front ends build the requests and convert the results. Threads and locks: any thread; no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conch.core.cold_models import ColdModelError
from conch.core.errors import ConchError, InvalidArgumentError, NotFoundError, UnsupportedError
from conch.core.model_control import ArchiveControl, IndexEntry, LoadParameter
from conch.core.rollouts import RolloutControl, RolloutReport
from conch.core.servable import Servable
from conch.core.server_state import EXTENSIONS, ServerState
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.statistics_snapshot import VersionStatistics
from conch.memory.region import CudaRegion
from conch.memory.regions import Regions
from conch.memory.system_region import SystemRegion
from conch.observability.logging.log_settings import LogControl, Setting
from conch.observability.tracing.trace_settings import TraceSettings

SERVICE = "inference.GRPCInferenceService"
"""Name of the protocol's gRPC service."""

HEALTH_SERVICES = frozenset(("", SERVICE))
"""The services of gRPC's health protocol: empty for the server, and the protocol's own."""


def _allow() -> None:
    """Raises nothing."""


@dataclass(frozen=True, slots=True)
class Services:
    """The state that operations use besides the server's.

    Attributes:
        regions: Clients' shared memory.
        logs: Log settings.
        traces: Trace settings.
        check_changes: Raises if clients may not load, unload and label models.
        check_rollout_changes: Raises if clients may not start and change rollouts.
        rollouts: Rollouts between versions; None if the server has none.
        archives: Loads models from directories that a provider of routes names; None for none.
    """

    regions: Regions
    logs: LogControl
    traces: TraceSettings
    check_changes: Callable[[], None] = _allow
    check_rollout_changes: Callable[[], None] = _allow
    archives: ArchiveControl | None = None
    rollouts: RolloutControl | None = None


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Names a model and, if `version` is not empty, one version."""

    name: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A load; `may_upload` tells whether this client may send files."""

    name: str
    parameters: Mapping[str, LoadParameter]
    may_upload: bool


@dataclass(frozen=True, slots=True)
class UnloadRequest:
    """An unload."""

    name: str
    unload_dependents: bool


@dataclass(frozen=True, slots=True)
class LabelChange:
    """A label of a model and the version that it names; None to remove it."""

    name: str
    label: str
    version: int | None = None


@dataclass(frozen=True, slots=True)
class RolloutStart:
    """Starts a rollout: its declaration as JSON, empty for what is declared already."""

    name: str
    declaration: Mapping[str, Any]
    again: bool = False


@dataclass(frozen=True, slots=True)
class RolloutChange:
    """An action on a rollout; a weight in percent for that action."""

    name: str
    action: str
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class SystemRegistration:
    """A range of a POSIX shared-memory object; offset and size in bytes."""

    name: str
    key: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class CudaRegistration:
    """A block of GPU memory by its ``cudaIpcMemHandle_t``; size in bytes."""

    name: str
    raw_handle: bytes
    device_id: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class TraceChanges:
    """New values of trace settings, of one model or, with an empty name, of all."""

    model: str
    changes: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """Name, version and protocol extensions of the server."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Metadata of a model; the version numbers are those that are ready, or the requested one."""

    spec: ModelSpec
    versions: list[int]

    @property
    def platform(self) -> str:
        """The platform, or the backend of models that name none."""
        return self.spec.platform or self.spec.backend

    def shape(self, tensor: TensorSpec) -> Sequence[int]:
        """The tensor's shape; -1 for variable dimensions and the batch dimension."""
        return self.spec.full_dims(tensor)


class UnknownTracedModelError(NotFoundError):
    """Trace settings of a model that is not served; Triton's gRPC status differs from its HTTP status."""

    grpc_status = InvalidArgumentError.grpc_status


def check_changes(core: ServerState, services: Services, model: str) -> None:
    """Checks that clients may load, unload and label models."""
    services.check_changes()


def check_rollout_changes(core: ServerState, services: Services, model: str) -> None:
    """Checks that clients may start and change rollouts."""
    services.check_rollout_changes()


def check_traced(core: ServerState, services: Services, model: str) -> None:
    """Checks that there is a model whose trace settings are to be changed."""
    check_traced_model(core, model)


def check_registrations(core: ServerState, services: Services, model: str) -> None:
    """Checks that clients may register regions."""
    services.regions.check_allowed()


def server_live(core: ServerState, services: Services, request: None) -> bool:
    """Returns whether the server is live."""
    return core.live


def server_ready(core: ServerState, services: Services, request: None) -> bool:
    """Returns whether the server is ready."""
    return core.ready


def server_metadata(core: ServerState, services: Services, request: None) -> ServerMetadata:
    """Returns the server's metadata; raises UnavailableError once the server is stopping."""
    core.check_running()
    return ServerMetadata(core.server_id, core.version, EXTENSIONS)


def health_check(core: ServerState, services: Services, service: str) -> bool:
    """Returns whether the server is ready; raises NotFoundError for a service not in `HEALTH_SERVICES`."""
    if service not in HEALTH_SERVICES:
        raise NotFoundError(f"unknown service '{service}'")
    return core.serving


def model_ready(core: ServerState, services: Services, request: ModelRequest) -> bool:
    """Returns whether a model is ready."""
    return core.model_ready(request.name, request.version)


def model_metadata(core: ServerState, services: Services, request: ModelRequest) -> ModelMetadata:
    """Returns a model's metadata: of all ready versions, or of the requested one."""
    try:
        spec = core.model(request.name, request.version).spec
    except ColdModelError as cold:
        spec, versions = _described(cold, request.version)
    else:
        versions = [] if request.version else sorted(core.registry.find(request.name)[1].ready)
    return ModelMetadata(spec, [spec.version] if request.version else versions)


def model_config(core: ServerState, services: Services, request: ModelRequest) -> ModelSpec:
    """Returns the spec with the model's configuration."""
    try:
        return core.model(request.name, request.version).spec
    except ColdModelError as cold:
        return _described(cold, request.version)[0]


def _described(cold: ColdModelError, version: str) -> tuple[ModelSpec, list[int]]:
    """Spec and versions of a model that is not in memory, from its files.

    Raises:
        ColdModelError: They do not tell, and the model is to be loaded.
    """
    specs = cold.describe()
    number = int(version) if version.isdecimal() else max(specs, default=0)
    if number not in specs:
        raise cold
    return specs[number], sorted(specs)


def statistics(core: ServerState, services: Services, request: ModelRequest) -> list[VersionStatistics]:
    """Returns the counters of ready model versions, and those kept of evicted ones, by name and version."""
    cold = core.registry.cold
    kept = [] if cold is None else cold.kept_statistics(request.name)
    number = core.registry.version_number(request.name, request.version)
    found = [each for each in kept if number in (-1, each.version)]
    if request.name and found:
        return found
    for model in models_with_statistics(core, request.name, request.version):
        spec = model.spec
        found.append(VersionStatistics(spec.name, spec.version, model.statistics.snapshot()))
    return sorted(found, key=lambda each: (each.name, each.version)) if kept else found


def repository_index(core: ServerState, services: Services, ready_only: bool) -> list[IndexEntry]:
    """Returns all models of the repositories."""
    return core.agent.index(ready_only)


def entries_of(entries: list[IndexEntry], sees: Callable[[str], bool]) -> list[IndexEntry]:
    """The entries of an index with models that a caller may see."""
    return [entry for entry in entries if sees(entry.name)]


def statistics_of(models: list[VersionStatistics], sees: Callable[[str], bool]) -> list[VersionStatistics]:
    """The counters of models that a caller may see."""
    return [each for each in models if sees(each.name)]


def load_model(core: ServerState, services: Services, request: LoadRequest) -> None:
    """Loads or reloads a model, and returns when it is ready."""
    core.agent.load(request.name, request.parameters, request.may_upload)


def unload_model(core: ServerState, services: Services, request: UnloadRequest) -> None:
    """Starts to unload a model."""
    core.agent.unload(request.name, request.unload_dependents)


def set_label(core: ServerState, services: Services, request: LabelChange) -> None:
    """Sets or removes a label of a model."""
    core.agent.set_label(request.name, request.label, request.version)


def rollout(core: ServerState, services: Services, name: str) -> RolloutReport:
    """Returns a model's labels and rollout."""
    return _rollouts(services).rollout(name)


def start_rollout(core: ServerState, services: Services, request: RolloutStart) -> RolloutReport:
    """Starts a rollout, whose candidate loads then."""
    return _rollouts(services).start_rollout(request.name, request.declaration, request.again)


def update_rollout(core: ServerState, services: Services, request: RolloutChange) -> RolloutReport:
    """Changes a rollout."""
    return _rollouts(services).update_rollout(request.name, request.action, request.weight)


def _rollouts(services: Services) -> RolloutControl:
    if services.rollouts is None:
        raise UnsupportedError("this server has no rollouts")
    return services.rollouts


def trace_settings(core: ServerState, services: Services, model: str) -> dict[str, tuple[str, ...]]:
    """Returns the trace settings of a model, or the global ones for an empty name."""
    check_traced_model(core, model)
    return services.traces.settings(model)


def update_trace_settings(
    core: ServerState, services: Services, request: TraceChanges
) -> dict[str, tuple[str, ...]]:
    """Changes trace settings; returns those in effect then."""
    check_traced_model(core, request.model)
    return services.traces.update(request.changes, request.model)


def log_settings(core: ServerState, services: Services, request: None) -> dict[str, Setting]:
    """Returns the log settings."""
    return services.logs.settings()


def update_log_settings(
    core: ServerState, services: Services, changes: Mapping[str, Setting | None]
) -> dict[str, Setting]:
    """Changes log settings; returns those in effect then."""
    return services.logs.update(changes)


def system_regions(core: ServerState, services: Services, name: str) -> list[SystemRegion]:
    """Returns the region of a name, or all of them."""
    return services.regions.system_regions(name)


def register_system(core: ServerState, services: Services, request: SystemRegistration) -> None:
    """Registers a range of a POSIX shared-memory object."""
    services.regions.register_system(request.name, request.key, request.offset, request.byte_size)


def unregister_system(core: ServerState, services: Services, name: str) -> None:
    """Unregisters the region of a name, or all of them."""
    services.regions.unregister_system(name)


def cuda_regions(core: ServerState, services: Services, name: str) -> list[CudaRegion]:
    """Returns the region of a name, or all of them."""
    return services.regions.cuda_regions(name)


def register_cuda(core: ServerState, services: Services, request: CudaRegistration) -> None:
    """Registers a block of GPU memory."""
    services.regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)


def unregister_cuda(core: ServerState, services: Services, name: str) -> None:
    """Unregisters the region of a name, or all of them."""
    services.regions.unregister_cuda(name)


def models_with_statistics(core: ServerState, name: str, version: str) -> list[Servable]:
    """Returns ready model versions by name and version; all of them without a name.

    Raises:
        InvalidArgumentError: There is no such model or version; the texts are Triton's.
        UnavailableError: The start failed.
    """
    core.check_started()
    registry = core.registry
    entries = registry.entries
    number = registry.version_number(name, version)
    names = registry.identifiers(name) if name else sorted(entries)
    if name and not names:
        raise InvalidArgumentError(f"requested model '{name}' is not available")
    models = [
        entries[each].ready[ready]
        for each in names
        for ready in sorted(entries[each].ready)
        if number in (-1, ready)
    ]
    if name and not models:
        raise InvalidArgumentError(f"requested model version is not available for model '{name}'")
    return models


def check_traced_model(core: ServerState, name: str) -> None:
    """Raises UnknownTracedModelError unless the model is served or the name is empty."""
    if name:
        try:
            core.model(name)
        except ColdModelError:
            return
        except ConchError:
            raise UnknownTracedModelError(f"Request for unknown model : {name}") from None


def refuse_repository_name(name: str) -> None:
    """Raises UnsupportedError for a request that names a repository."""
    if name:
        raise UnsupportedError("'repository_name' specification is not supported")
