"""Converts plain results of operations to the JSON of REST, whose members are fields of gRPC's messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conch.core.spec import TensorSpec
from conch.core.statistics_snapshot import Duration, VersionStatistics
from conch.door.operation_handlers import ModelMetadata, ServerMetadata
from conch.memory.region import CudaRegion
from conch.memory.system_region import SystemRegion


def server_object(server: ServerMetadata) -> dict[str, Any]:
    """Converts the server's metadata."""
    return {"name": server.name, "version": server.version, "extensions": server.extensions}


def metadata_object(metadata: ModelMetadata) -> dict[str, Any]:
    """Converts a model's metadata."""

    def tensors(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
        return [
            {"name": tensor.name, "datatype": tensor.datatype, "shape": metadata.shape(tensor)}
            for tensor in specs
        ]

    spec = metadata.spec
    return {
        "name": spec.name,
        "versions": [str(version) for version in metadata.versions],
        "platform": metadata.platform,
        "inputs": tensors(spec.inputs),
        "outputs": tensors(spec.outputs),
    }


def statistics_object(model: VersionStatistics) -> dict[str, Any]:
    """Converts the counters of one model version, as in Triton's statistics extension."""
    stats = model.snapshot
    return {
        "name": model.name,
        "version": str(model.version),
        "last_inference": stats.last_inference_ms,
        "inference_count": stats.inference_count,
        "execution_count": stats.execution_count,
        "inference_stats": _durations(
            success=stats.success,
            fail=stats.fail,
            queue=stats.queue,
            compute_input=stats.compute_input,
            compute_infer=stats.compute_infer,
            compute_output=stats.compute_output,
            cache_hit=stats.cache_hit,
            cache_miss=stats.cache_miss,
        ),
        "response_stats": {
            str(index): _durations(
                compute_infer=row.compute_infer,
                compute_output=row.compute_output,
                success=row.success,
                fail=row.fail,
                empty_response=row.empty_response,
                cancel=row.cancel,
            )
            for index, row in stats.responses.items()
        },
        "batch_stats": [
            {
                "batch_size": size,
                **_durations(
                    compute_input=row.compute_input,
                    compute_infer=row.compute_infer,
                    compute_output=row.compute_output,
                ),
            }
            for size, row in stats.batches.items()
        ],
        "memory_usage": [],
    }


def _durations(**durations: Duration) -> Mapping[str, dict[str, int]]:
    return {name: {"count": each.count, "ns": each.ns} for name, each in durations.items()}


def system_region_object(region: SystemRegion) -> dict[str, Any]:
    """Converts a system region."""
    return {
        "name": region.name,
        "key": region.key,
        "offset": region.offset,
        "byte_size": region.byte_size,
    }


def cuda_region_object(region: CudaRegion) -> dict[str, Any]:
    """Converts a CUDA region."""
    return {"name": region.name, "device_id": region.device_id, "byte_size": region.byte_size}
