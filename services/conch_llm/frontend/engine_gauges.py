"""Gauges of models that take text, by which gateways choose a server.

Requests are counted from the server's queue, and from the gauges of the model's engine where it has them: an
engine takes requests from the queue before it runs them.

Threads and locks: any thread, no state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from conch.core.custom_metrics import FamilySnapshot
from conch.door.door import ServedModels
from conch.observability.metrics.metric_families import Family, sample
from conch_llm.capability import capability

_WAITING = Family(
    "conch_llm_waiting_requests",
    "gauge",
    "Requests that wait for their execution, in the server's queue and in the engine's",
)
_RUNNING = Family("conch_llm_running_requests", "gauge", "Requests that the model or its engine runs")
_KV_USAGE = Family("conch_llm_kv_cache_usage_ratio", "gauge", "Used share of the engine's KV cache, 0 to 1")

_ENGINE_WAITING = ("vllm:num_requests_waiting", "llama_cpp:num_requests_waiting")
_ENGINE_RUNNING = (
    "vllm:num_requests_running",
    "openvino_genai:num_requests_running",
    "llama_cpp:num_requests_running",
)
_ENGINE_KV_USAGE = ("vllm:kv_cache_usage_perc", "openvino_genai:kv_cache_usage_perc")


class EngineGauges:
    """Reads the gauges of all models that take text.

    Args:
        models: The models.
        defined: Reads the metrics that models define.
    """

    def __init__(self, models: ServedModels, defined: Callable[[], Sequence[FamilySnapshot]]) -> None:
        self._models = models
        self._defined = defined

    def families(self) -> Sequence[tuple[Family, list[str]]]:
        """The families and their samples: sums over the versions of a model, of KV caches the fullest."""
        found = zip((_WAITING, _RUNNING, _KV_USAGE), self._values(), strict=True)
        return [(family, _samples(family, values)) for family, values in found]

    def of_model(self, model: str) -> dict[str, float] | None:
        """The gauges of a model; None if it takes no text, or is not loaded."""
        waiting, running, usage = self._values()
        if model not in waiting:
            return None
        found = {"waiting": waiting[model], "running": running[model]}
        return {**found, "cache": usage[model]} if model in usage else found

    def _values(self) -> tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]:
        """Waiting requests, running ones, and used shares of KV caches, by model."""
        pending: dict[str, int] = defaultdict(int)
        running: dict[str, int] = defaultdict(int)
        for entry in self._models.entries.values():
            for model in entry.ready.values():
                if capability(model.spec).speaks:
                    pending[model.spec.name] += model.pending
                    running[model.spec.name] += model.statistics.gauges().running
        defined = {family.name: family for family in self._defined() if family.kind == "gauge"}
        waiting_inside = _by_model(defined, _ENGINE_WAITING, sum)
        running_inside = _by_model(defined, _ENGINE_RUNNING, sum)
        usage = _by_model(defined, _ENGINE_KV_USAGE, max)
        waiting = {name: count + waiting_inside.get(name, 0) for name, count in pending.items()}
        return waiting, {**running, **_known(running_inside, running)}, _known(usage, running)


def _by_model(
    defined: Mapping[str, FamilySnapshot], names: Sequence[str], join: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for name in names:
        for metric in defined[name].metrics if name in defined else ():
            if isinstance(metric.value, float) and "model" in metric.labels:
                values[metric.labels["model"]].append(metric.value)
    return {model: join(found) for model, found in values.items()}


def _known(found: Mapping[str, float], models: Mapping[str, int]) -> dict[str, float]:
    """Gauges of loaded models: a worker's gauges may outlive it for a while."""
    return {name: value for name, value in found.items() if name in models}


def _samples(family: Family, values: Mapping[str, float]) -> list[str]:
    return [sample(family.name, value, {"model": name}) for name, value in sorted(values.items())]
