"""Converts messages to the plain requests of operations, and their plain results to messages."""

from __future__ import annotations

from typing import Any

from conch.access.access_guard import AccessGuard
from conch.core.errors import InvalidArgumentError
from conch.core.model_control import IndexEntry, LoadParameter
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.statistics_snapshot import Duration, VersionStatistics
from conch.core.tensor import Buffer
from conch.door import operation_handlers as plain
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


def write_server_metadata(server: plain.ServerMetadata) -> pb.ServerMetadataResponse:
    """Converts the server's metadata."""
    return pb.ServerMetadataResponse(name=server.name, version=server.version, extensions=server.extensions)


def write_model_metadata(metadata: plain.ModelMetadata) -> pb.ModelMetadataResponse:
    """Converts a model's metadata."""

    def tensors(specs: tuple[TensorSpec, ...]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
        return [
            pb.ModelMetadataResponse.TensorMetadata(
                name=tensor.name, datatype=tensor.datatype, shape=metadata.shape(tensor)
            )
            for tensor in specs
        ]

    spec = metadata.spec
    return pb.ModelMetadataResponse(
        name=spec.name,
        versions=[str(version) for version in metadata.versions],
        platform=metadata.platform,
        inputs=tensors(spec.inputs),
        outputs=tensors(spec.outputs),
    )


def write_model_config(spec: ModelSpec) -> pb.ModelConfigResponse:
    """Converts a model's configuration."""
    return pb.ModelConfigResponse(config=model_config_pb2.ModelConfig.FromString(spec.config_message))


def write_statistics(models: list[VersionStatistics]) -> pb.ModelStatisticsResponse:
    """Converts the counters of model versions."""
    found = [statistics_message(model) for piece in in_pieces(models) for model in piece]
    return pb.ModelStatisticsResponse(model_stats=found)


def statistics_message(model: VersionStatistics) -> pb.ModelStatistics:
    """Converts the counters of one model version."""
    stats = model.snapshot
    return pb.ModelStatistics(
        name=model.name,
        version=str(model.version),
        last_inference=stats.last_inference_ms,
        inference_count=stats.inference_count,
        execution_count=stats.execution_count,
        inference_stats=pb.InferStatistics(
            success=_duration(stats.success),
            fail=_duration(stats.fail),
            queue=_duration(stats.queue),
            compute_input=_duration(stats.compute_input),
            compute_infer=_duration(stats.compute_infer),
            compute_output=_duration(stats.compute_output),
            cache_hit=_duration(stats.cache_hit),
            cache_miss=_duration(stats.cache_miss),
        ),
        batch_stats=[
            pb.InferBatchStatistics(
                batch_size=size,
                compute_input=_duration(row.compute_input),
                compute_infer=_duration(row.compute_infer),
                compute_output=_duration(row.compute_output),
            )
            for size, row in stats.batches.items()
        ],
        response_stats={
            str(index): pb.InferResponseStatistics(
                compute_infer=_duration(row.compute_infer),
                compute_output=_duration(row.compute_output),
                success=_duration(row.success),
                fail=_duration(row.fail),
                empty_response=_duration(row.empty_response),
                cancel=_duration(row.cancel),
            )
            for index, row in stats.responses.items()
        },
    )


def _duration(duration: Duration) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=duration.count, ns=duration.ns)


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
    response = pb.SystemSharedMemoryStatusResponse()
    for region in regions:
        status = response.regions[region.name]
        status.name, status.key = region.name, region.key
        status.offset, status.byte_size = region.offset, region.byte_size
    return response


def write_cuda_regions(regions: list[CudaRegion]) -> pb.CudaSharedMemoryStatusResponse:
    """Converts CUDA regions."""
    response = pb.CudaSharedMemoryStatusResponse()
    for region in regions:
        status = response.regions[region.name]
        status.name, status.device_id, status.byte_size = region.name, region.device_id, region.byte_size
    return response
