"""OpenAI's routes as parts of the server: metrics and chats of pages, and a port of their own."""

from __future__ import annotations

from collections.abc import Sequence

from conch.door.door import Door
from conch.frontends.http.chat_route import ChatRoute
from conch.frontends.http.http_pools import Pools
from conch.observability.metrics.metric_families import Family
from conch.observability.metrics.server_metrics import CustomMetrics
from conch.parts.http_part import HttpPart
from conch.parts.server_part import PartContext, ServerPart
from conch_llm.frontend.engine_gauges import EngineGauges
from conch_llm.llm_options import LlmOptions


class LlmPart(ServerPart):
    """Shows what is counted of OpenAI's routes on all ports, and the gauges of models that take text.

    It has chats for pages of other parts.

    Args:
        options: Its options, with the counts.
        door: The core.
        gauges: The gauges.
    """

    def __init__(self, options: LlmOptions, door: Door, gauges: EngineGauges) -> None:
        self._options = options
        self._door = door
        self._gauges = gauges

    def start(self) -> None:
        """Starts nothing: the ports with the routes do."""

    def families(self) -> Sequence[tuple[Family, list[str]]]:
        """The counts and the gauges."""
        return [*self._options.metrics.families(), *self._gauges.families()]

    def chat_route(self, pools: Pools, most_bytes: int) -> ChatRoute | None:
        """Chats with all models that OpenAI's routes serve."""
        from conch_llm.frontend.page_chats import PageChats

        options = self._options
        return PageChats(self._door, options.routes, options.metrics, self._gauges, pools, most_bytes)


def llm_parts(options: LlmOptions, context: PartContext) -> Sequence[ServerPart]:
    """The parts, for the entry-point group ``conch.parts``."""
    gauges = EngineGauges(context.door.models, CustomMetrics(context.observability.families).snapshot)
    parts: list[ServerPart] = [LlmPart(options, context.door, gauges)]
    if options.port is not None:
        parts.append(HttpPart(options.port, context, "OpenAI HTTPService"))
    return parts
