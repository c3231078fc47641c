"""Inference by OpenAI's routes: what answers each, by what the model of the request can do.

Threads and locks: event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from conch.core.admission import Admission
from conch.core.clock import Clock
from conch.core.errors import ConchError
from conch.door.door import Door
from conch.frontends.http.http_exchange import EVENT_STREAM
from conch.frontends.http.http_pools import Pools
from conch_llm.calls.model_calls import ModelCalls, NativeAnswer
from conch_llm.contract import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
)
from conch_llm.frontend.answer_times import AnswerTimes
from conch_llm.frontend.dialects.dialect_routes import DialectRoutes
from conch_llm.frontend.dialects.response_store import ResponseStore
from conch_llm.frontend.event_stream import EventStream, NativeParts, OpenStreams
from conch_llm.frontend.generation_routes import GenerationRoutes
from conch_llm.frontend.llm_metrics import DISCONNECT
from conch_llm.frontend.model_names import NamedModel
from conch_llm.frontend.openai_call import OpenAiCall
from conch_llm.frontend.text_models import TextModels
from conch_llm.frontend.token_routes import TokenRoutes
from conch_llm.frontend.vector_routes import VectorRoutes
from conch_llm.openai_settings import OpenAiSettings

_FINISHED = (TOKENIZE, DETOKENIZE)
"""Routes whose answer a model that takes the body makes itself."""

ModelWork = Callable[[OpenAiCall, NamedModel, Mapping[str, Any]], Awaitable[None]]


class InferenceRoutes:
    """Answers requests to models on one event loop.

    Args:
        door: The core.
        admission: Admission of the port.
        clock: Monotonic time in nanoseconds.
        pools: Threads of the port.
        settings: Settings by flags.
        store: Keeps responses; None keeps none.
    """

    def __init__(
        self,
        door: Door,
        admission: Admission,
        clock: Clock,
        pools: Pools,
        settings: OpenAiSettings,
        store: ResponseStore | None = None,
    ) -> None:
        self._door = door
        self._admission = admission
        self._texts = texts = TextModels(door.models, pools, settings.texts)
        self._calls = ModelCalls(door, admission, clock, texts.counter, texts.run)
        self._streams = OpenStreams()
        generation = GenerationRoutes(self._calls, texts, self._streams, settings)
        vectors = VectorRoutes(self._calls, texts)
        tokens = TokenRoutes(texts)
        self.dialects = dialects = DialectRoutes(generation, self._calls, texts, store or ResponseStore(0))
        self._works: Mapping[str, ModelWork] = {
            CHAT: generation.chat,
            COMPLETIONS: generation.completion,
            EMBEDDINGS: vectors.embeddings,
            RESPONSES: dialects.responses,
            MESSAGES: dialects.messages,
            COUNT_TOKENS: dialects.count_tokens,
            SCORE: vectors.score,
            RERANK: vectors.rerank,
            TOKENIZE: tokens.tokenize,
            DETOKENIZE: tokens.detokenize,
        }

    async def entry(self, model: NamedModel) -> dict[str, Any]:
        """Entry of a model in the list of models."""
        entry = model.entry()
        if "chat" in entry["capabilities"] and not await self.chats(model):
            entry["capabilities"].remove("chat")
        return entry

    async def chats(self, model: NamedModel) -> bool:
        """True if a model can chat; one that takes text can only if it has a template."""
        can = model.capability
        if can.takes_body(CHAT):
            return True
        return can.takes_text(CHAT) and await self._texts.has_template(model.servable)

    def check_open(self) -> None:
        """Raises UnavailableError: the port, or the server, takes no requests to models."""
        self._admission.check_open()
        self._door.check_running()

    async def answer(self, call: OpenAiCall, route: str, model: NamedModel, body: Mapping[str, Any]) -> None:
        """Answers a request whose caller may use the model. Raises ConchError: it is wrong, or fails."""
        call.model = model.own_name
        # A disconnect ends whatever the handler waits for.
        task = asyncio.current_task()
        assert task is not None, "handlers are tasks"
        call.exchange.on_disconnect = task.cancel
        if model.capability.takes_body(route) and (model.capability.native or route in _FINISHED):
            await self._native(call, model, route, body)
        else:
            await self._works[route](call, model, body)

    async def _native(
        self, call: OpenAiCall, model: NamedModel, route: str, fields: Mapping[str, Any]
    ) -> None:
        """Sends on what a model answers to the body."""
        exchange = call.exchange
        times = AnswerTimes(call)
        try:
            answer = await self._calls.native(
                model.servable, route, call.body, call.request_id, exchange, fields
            )
            try:
                await self._send_on(call, answer, times)
            finally:
                answer.close()
        except asyncio.CancelledError:
            if exchange.lost:
                call.metrics.cancelled(call.model, DISCONNECT)
            raise

    async def _send_on(self, call: OpenAiCall, answer: NativeAnswer, times: AnswerTimes) -> None:
        kind = answer.content_type
        headers = [(b"content-type", kind.encode())]
        if not kind.startswith("text/event-stream"):
            call.respond(answer.status, headers, await _whole(answer))
            return
        headers += EVENT_STREAM[1:]
        parts = NativeParts(answer)
        pieces = await parts.take()
        stream = EventStream(call.exchange, parts, self._streams)
        call.counted(answer.status)
        stream.begin(answer.status, headers)
        try:
            while pieces is not None:
                times.add(pieces)
                pieces = await stream.send(pieces)
            await stream.end()
        except ConchError as error:
            failure = error
            await stream.fail(lambda: call.errors.events(failure))
        finally:
            stream.close()


async def _whole(answer: NativeAnswer) -> bytes:
    pieces = []
    while (piece := await answer.take()) is not None:
        pieces.append(piece)
    return b"".join(pieces)
