"""Core objects to protocol messages, for the RPCs about models and the server."""

from __future__ import annotations

from conch.core.durations import Duration
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.stats import StatisticsSnapshot
from conch.frontends.answers import platform
from conch.protocol import inference_pb2 as pb


def metadata_message(spec: ModelSpec, versions: list[int]) -> pb.ModelMetadataResponse:
    """A model's metadata; shapes carry the batch dimension as -1 where the model batches."""

    def tensors(specs: tuple[TensorSpec, ...]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
        return [
            pb.ModelMetadataResponse.TensorMetadata(
                name=tensor.name, datatype=tensor.datatype, shape=spec.full_dims(tensor)
            )
            for tensor in specs
        ]

    return pb.ModelMetadataResponse(
        name=spec.name,
        versions=[str(version) for version in versions],
        platform=platform(spec),
        inputs=tensors(spec.inputs),
        outputs=tensors(spec.outputs),
    )


def statistics_message(spec: ModelSpec, stats: StatisticsSnapshot) -> pb.ModelStatistics:
    """The counters of one model version in Triton's message."""
    return pb.ModelStatistics(
        name=spec.name,
        version=str(spec.version),
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
