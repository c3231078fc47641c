"""What the server and its models are, and what they have done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from conch.core.durations import Duration
from conch.core.server_core import EXTENSIONS, ServerCore
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.stats import StatisticsSnapshot
from conch.frontends.answers import counted_models, platform, served_versions
from conch.frontends.http.replies import json_reply
from conch.frontends.http.routing import ApiRoute, route

_MODEL = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?"


def model_routes(core: ServerCore) -> list[ApiRoute]:
    """The table; the statistics of all models come before a model of that name."""

    async def server(request: Request) -> Response:
        core.check_running()
        return json_reply({"name": core.server_id, "version": core.version, "extensions": EXTENSIONS})

    async def metadata(request: Request, model: str, version: str) -> Response:
        return json_reply(metadata_object(*served_versions(core, model, version)))

    async def config(request: Request, model: str, version: str) -> Response:
        return json_reply(core.model(model, version).spec.config)

    async def statistics(request: Request, model: str = "", version: str = "") -> Response:
        models = counted_models(core, model, version)
        return json_reply(
            {"model_stats": [statistics_object(each.spec, each.statistics.snapshot()) for each in models]}
        )

    return [
        route("/v2/models/stats", ["GET"], "statistics", statistics),
        route("/v2", ["GET"], "metadata", server),
        route(_MODEL, ["GET"], "metadata", metadata),
        route(_MODEL + "/config", ["GET"], "model-config", config),
        route(_MODEL + "/stats", ["GET"], "statistics", statistics),
    ]


def metadata_object(spec: ModelSpec, versions: list[int]) -> dict[str, Any]:
    """A model's metadata; shapes carry the batch dimension as -1 where the model batches."""

    def tensors(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
        return [
            {"name": tensor.name, "datatype": tensor.datatype, "shape": spec.full_dims(tensor)}
            for tensor in specs
        ]

    return {
        "name": spec.name,
        "versions": [str(version) for version in versions],
        "platform": platform(spec),
        "inputs": tensors(spec.inputs),
        "outputs": tensors(spec.outputs),
    }


def statistics_object(spec: ModelSpec, stats: StatisticsSnapshot) -> dict[str, Any]:
    """The counters of one model version, as Triton's statistics extension lays them out."""
    return {
        "name": spec.name,
        "version": str(spec.version),
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
