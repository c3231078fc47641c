"""OpenAI's routes as parts of the server: their metrics, and a port of their own."""

from __future__ import annotations

from collections.abc import Sequence

from conch.observability.metrics.sample_text import Family
from conch.parts.http_part import HttpPart
from conch.parts.server_part import PartContext, ServerPart
from conch_llm.frontend.llm_metrics import LlmMetrics
from conch_llm.llm_options import LlmOptions


class LlmMetricsPart(ServerPart):
    """Shows what is counted of OpenAI's routes on all ports.

    Args:
        metrics: The counts.
    """

    def __init__(self, metrics: LlmMetrics) -> None:
        self._metrics = metrics

    def start(self) -> None:
        """Starts nothing: the ports with the routes do."""

    def families(self) -> Sequence[tuple[Family, list[str]]]:
        """The counts."""
        return self._metrics.families()


def llm_parts(options: LlmOptions, context: PartContext) -> Sequence[ServerPart]:
    """The parts, for the entry-point group ``conch.parts``."""
    parts: list[ServerPart] = [LlmMetricsPart(options.metrics)]
    if options.port is not None:
        parts.append(HttpPart(options.port, context, "OpenAI HTTPService"))
    return parts
