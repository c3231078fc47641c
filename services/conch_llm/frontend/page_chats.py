"""Chats of pages of other parts, as the console's, on their event loop.

Threads and locks: event loop only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conch.core.clock import monotonic_ns
from conch.door.door import Door
from conch.frontends.http.chat_route import ChatModel, ChatRoute
from conch.frontends.http.http_exchange import HttpExchange
from conch.frontends.http.http_pools import Pools, loaded
from conch_llm.contract import CHAT
from conch_llm.frontend.engine_gauges import EngineGauges
from conch_llm.frontend.inference_routes import InferenceRoutes
from conch_llm.frontend.llm_metrics import LlmMetrics
from conch_llm.frontend.model_names import ModelNames, NamedModel
from conch_llm.frontend.openai_call import OpenAiCall
from conch_llm.frontend.openai_errors import RequestError
from conch_llm.frontend.request_fields import MODEL, checked
from conch_llm.openai_settings import OpenAiSettings

_PROTOCOL = "http"
"""Protocol of the requests in access log and traces."""


class PageChats(ChatRoute):
    """Answers chats on one event loop.

    Args:
        door: The core.
        settings: Settings by flags; its keys and restrictions are for other ports.
        metrics: Counts the requests with those of OpenAI's routes.
        gauges: The gauges of models that take text.
        pools: Threads that parse large bodies and render templates.
        most_bytes: Largest body.
    """

    def __init__(
        self,
        door: Door,
        settings: OpenAiSettings,
        metrics: LlmMetrics,
        gauges: EngineGauges,
        pools: Pools,
        most_bytes: int,
    ) -> None:
        self._names = ModelNames(door.models, settings.lora_separator)
        self._admission = door.admission(_PROTOCOL)
        self._inference = InferenceRoutes(door, self._admission, monotonic_ns, pools, settings)
        self._metrics = metrics
        self._gauges = gauges
        self._pools = pools
        self._most_bytes = most_bytes

    async def models(self) -> Sequence[ChatModel]:
        """The models that can chat."""
        names = self._names.all()
        return sorted(
            [ChatModel(each.name, each.own_name) for each in names if await self._inference.chats(each)]
        )

    def figures(self, model: str) -> Mapping[str, float] | None:
        """Counts and gauges of a model, and the length of its context where the config has it."""
        gauges = self._gauges.of_model(model)
        if gauges is None:
            return None
        longest = next((each.longest for each in self._names.all() if each.own_name == model), None)
        known = {} if longest is None else {"longest": longest}
        return {**self._metrics.of_model(model), **gauges, **known}

    async def answer(self, exchange: HttpExchange, model: str) -> None:
        """Answers a chat completion."""
        call = OpenAiCall(exchange, CHAT, self._metrics, self._pools, self._most_bytes)
        await call.run(self._answer(call, model))

    async def _answer(self, call: OpenAiCall, model: str) -> None:
        self._inference.check_open()
        body = await call.read()
        name = checked(body, MODEL, ("model",))["model"]
        while self._names.find(model, lambda each: each == model) is None:
            await loaded(call.exchange, self._admission, model, "")
        await self._inference.answer(call, CHAT, self._find(name, model), body)

    def _find(self, name: str, model: str) -> NamedModel:
        """The model, by one of its names; raises for any other name."""
        for each in self._names.all():
            if each.name == name and each.own_name == model:
                return each
        raise RequestError(f"`{name}` is no name of the model `{model}`", "model")
