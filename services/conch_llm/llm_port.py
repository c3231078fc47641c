"""OpenAI's routes as parts of the server: their metrics, and a port of their own."""

from __future__ import annotations

from collections.abc import Sequence

from conch.observability.metrics.sample_text import Family
from conch.observability.metrics.server_metrics import CustomMetrics
from conch.parts.http_part import HttpPart
from conch.parts.server_part import PartContext, ServerPart
from conch_llm.frontend.engine_gauges import EngineGauges
from conch_llm.frontend.llm_metrics import LlmMetrics
from conch_llm.llm_options import LlmOptions


class LlmMetricsPart(ServerPart):
    """Shows what is counted of OpenAI's routes on all ports, and the gauges of models that take text.

    Args:
        metrics: The counts.
        gauges: The gauges.
    """

    def __init__(self, metrics: LlmMetrics, gauges: EngineGauges) -> None:
        self._metrics = metrics
        self._gauges = gauges

    def start(self) -> None:
        """Starts nothing: the ports with the routes do."""

    def families(self) -> Sequence[tuple[Family, list[str]]]:
        """The counts and the gauges."""
        return [*self._metrics.families(), *self._gauges.families()]


def llm_parts(options: LlmOptions, context: PartContext) -> Sequence[ServerPart]:
    """The parts, for the entry-point group ``conch.parts``."""
    gauges = EngineGauges(context.core.registry, CustomMetrics(context.families).snapshot)
    parts: list[ServerPart] = [LlmMetricsPart(options.metrics, gauges)]
    if options.port is not None:
        parts.append(HttpPart(options.port, context, "OpenAI HTTPService"))
    return parts
