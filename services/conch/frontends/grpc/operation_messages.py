"""Converts messages to the plain requests of operations, and their plain results to messages."""

from __future__ import annotations

from typing import Any

from conch.access.access_guard import AccessGuard
from conch.core.errors import InvalidArgumentError
from conch.core.model_control import IndexEntry, LoadParameter
from conch.core.spec import ModelSpec
from conch.core.statistics_snapshot import VersionStatistics
from conch.core.tensor import Buffer
from conch.door import operation_handlers as plain
from conch.frontends import result_objects as results
from conch.frontends.grpc.rpc_calls import UnaryRpc
from conch.frontends.grpc.wire_format import check_fields
from conch.frontends.yield_gil import in_pieces
from conch.memory.region import CudaRegion
from conch.memory.system_region import SystemRegion
from conch.observability.logging.log_settings import Setting
from conch.protocol import health_pb2, model_config_pb2
from conch.protocol import inference_pb2 as pb

_LOAD_DEPTH = 3  # the request, the entries of its parameters, their values


def read_model(message: Any, call: UnaryRpc) -> plain.ModelRequest:
    """Reads a model's name and version."""
    return plain.ModelRequest(message.name, message.version)


def read_name(message: Any, call: UnaryRpc) -> str:
    """Reads a region's name."""
    name: str = message.name
    return name


def read_service(message: health_pb2.HealthCheckRequest, call: UnaryRpc) -> str:
    """Reads the service whose health is requested."""
    return message.service


def write_live(live: bool) -> pb.ServerLiveResponse:
    """Converts liveness."""
    return pb.ServerLiveResponse(live=live)


def write_health(serving: bool) -> health_pb2.HealthCheckResponse:
    """Converts readiness to a serving status."""
    states = health_pb2.HealthCheckResponse
    return states(status=states.SERVING if serving else states.NOT_SERVING)


def write_model_config(spec: ModelSpec) -> pb.ModelConfigResponse:
    """Converts a model's configuration."""
    return pb.ModelConfigResponse(config=model_config_pb2.ModelConfig.FromString(spec.config_message))


def write_statistics(models: list[VersionStatistics]) -> pb.ModelStatisticsResponse:
    """Converts the counters of model versions."""
    return pb.ModelStatisticsResponse(
        model_stats=[
            pb.ModelStatistics(**results.statistics_object(model))
            for piece in in_pieces(models)
            for model in piece
        ]
    )


def read_index(message: pb.RepositoryIndexRequest, call: UnaryRpc) -> bool:
    """Reads whether only ready models are listed."""
    plain.refuse_repository_name(message.repository_name)
    return message.ready


def write_index(entries: list[IndexEntry]) -> pb.RepositoryIndexResponse:
    """Converts the repository index."""
    return pb.RepositoryIndexResponse(
        models=[
            pb.RepositoryIndexResponse.ModelIndex(
                name=entry.name, version=entry.version, state=entry.state, reason=entry.reason
            )
            for piece in in_pieces(entries)
            for entry in piece
        ]
    )


class LoadMessage:
    """Parses load requests; counts fields first, as protobuf holds the GIL while it parses."""

    @staticmethod
    def FromString(message: Buffer) -> pb.RepositoryModelLoadRequest:
        """Parses a request; raises ConchError if it has too many fields."""
        check_fields(message, depth=_LOAD_DEPTH)
        return pb.RepositoryModelLoadRequest.FromString(bytes(message))


class LoadReader:
    """Reads load requests; the guard decides which clients may send files."""

    def __init__(self, guard: AccessGuard) -> None:
        self._guard = guard

    def __call__(self, message: pb.RepositoryModelLoadRequest, call: UnaryRpc) -> plain.LoadRequest:
        """Reads the parameters of a load.

        Raises:
            ConchError: One is unknown or of the wrong type; the texts are Triton's.
        """
        may_upload = self._guard.may_upload(call.client, (key for key, _ in call.metadata))
        plain.refuse_repository_name(message.repository_name)
        parameters: dict[str, LoadParameter] = {}
        for key, value in message.parameters.items():
            wanted = _load_parameter_kind(key)
            if value.WhichOneof("parameter_choice") != wanted:
                raise InvalidArgumentError(
                    f"invalid value type for load parameter '{key}', expected {wanted}."
                )
            parameters[key] = getattr(value, wanted)
        return plain.LoadRequest(message.model_name, parameters, may_upload)


def _load_parameter_kind(key: str) -> str:
    if key == "config":
        return "string_param"
    if key.startswith("file:"):
        return "bytes_param"
    raise InvalidArgumentError(f"unrecognized load parameter '{key}'.")


def read_unload(message: pb.RepositoryModelUnloadRequest, call: UnaryRpc) -> plain.UnloadRequest:
    """Reads an unload; for the errors see `LoadReader`."""
    plain.refuse_repository_name(message.repository_name)
    dependents = False
    for key, value in message.parameters.items():
        if key != "unload_dependents":
            raise InvalidArgumentError(f"unrecognized unload parameter '{key}'.")
        if value.WhichOneof("parameter_choice") != "bool_param":
            raise InvalidArgumentError(f"invalid value type for '{key}' parameter, expected bool_param.")
        dependents = value.bool_param
    return plain.UnloadRequest(message.model_name, dependents)


def read_log_changes(message: pb.LogSettingsRequest, call: UnaryRpc) -> dict[str, Setting | None]:
    """Reads new values of log settings; None for an empty value."""

    def setting(value: pb.LogSettingsRequest.SettingValue) -> Setting | None:
        member = value.WhichOneof("parameter_choice")
        given: Setting | None = None if member is None else getattr(value, member)
        return given

    return {name: setting(value) for name, value in message.settings.items()}


def write_log_settings(settings: dict[str, Setting]) -> pb.LogSettingsResponse:
    """Converts log settings."""
    kind = pb.LogSettingsResponse.SettingValue

    def message(value: Setting) -> pb.LogSettingsResponse.SettingValue:
        if isinstance(value, bool):
            return kind(bool_param=value)
        return kind(uint32_param=value) if isinstance(value, int) else kind(string_param=value)

    return pb.LogSettingsResponse(settings={name: message(value) for name, value in settings.items()})


def read_trace_changes(message: pb.TraceSettingRequest, call: UnaryRpc) -> plain.TraceChanges:
    """Reads new values of trace settings."""
    changes = {key: tuple(setting.value) for key, setting in message.settings.items()}
    return plain.TraceChanges(message.model_name, changes)


def write_trace_settings(settings: dict[str, tuple[str, ...]]) -> pb.TraceSettingResponse:
    """Converts trace settings."""
    kind = pb.TraceSettingResponse.SettingValue
    return pb.TraceSettingResponse(settings={key: kind(value=value) for key, value in settings.items()})


def read_system_registration(
    message: pb.SystemSharedMemoryRegisterRequest, call: UnaryRpc
) -> plain.SystemRegistration:
    """Reads a system region to register."""
    return plain.SystemRegistration(message.name, message.key, message.offset, message.byte_size)


def read_cuda_registration(
    message: pb.CudaSharedMemoryRegisterRequest, call: UnaryRpc
) -> plain.CudaRegistration:
    """Reads a CUDA region to register."""
    return plain.CudaRegistration(message.name, message.raw_handle, message.device_id, message.byte_size)


def write_system_regions(regions: list[SystemRegion]) -> pb.SystemSharedMemoryStatusResponse:
    """Converts system regions."""
    found: dict[str, Any] = {region.name: results.system_region_object(region) for region in regions}
    return pb.SystemSharedMemoryStatusResponse(regions=found)


def write_cuda_regions(regions: list[CudaRegion]) -> pb.CudaSharedMemoryStatusResponse:
    """Converts CUDA regions."""
    found: dict[str, Any] = {region.name: results.cuda_region_object(region) for region in regions}
    return pb.CudaSharedMemoryStatusResponse(regions=found)
