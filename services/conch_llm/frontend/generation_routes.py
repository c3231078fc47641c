"""Chats and completions: from the request to its answer, whole or as an event stream.

The status is held back until the first delta or an error, so that a failure before the first token is a
status that clients try again by. A failure after it is an event.

Threads and locks: event loop only; chat templates are rendered on a thread of the pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conch.core.clock import wall_seconds
from conch.core.errors import ConchError, InternalError
from conch.frontends.http.json_body import JSON
from conch_llm.calls.generation import Generation, GenerationCall
from conch_llm.calls.model_calls import ModelCalls
from conch_llm.contract import CHAT, COMPLETIONS
from conch_llm.frontend.answer_times import AnswerTimes
from conch_llm.frontend.event_stream import DeltaParts, EventStream, OpenStreams
from conch_llm.frontend.llm_metrics import DISCONNECT
from conch_llm.frontend.model_names import NamedModel
from conch_llm.frontend.openai_answers import (
    CHAT_ANSWER,
    COMPLETION_ANSWER,
    AnswerHead,
    AnswerKind,
    StreamedAnswer,
    Usage,
    WholeAnswer,
    error_events,
)
from conch_llm.frontend.openai_call import OpenAiCall
from conch_llm.frontend.openai_errors import RequestError, error_object
from conch_llm.frontend.request_fields import chat_fields, completion_fields
from conch_llm.frontend.text_models import TextModels
from conch_llm.openai_settings import OpenAiSettings

log = logging.getLogger(__name__)

_COMPLETION_TOKENS = 16  # OpenAI's default


@dataclass(frozen=True, slots=True)
class _Work:
    """A checked request.

    Attributes:
        head: The members of its answer.
        call: The call of the model.
        text: True if the model gets a prompt, not the body.
    """

    head: AnswerHead
    call: GenerationCall
    text: bool


class GenerationRoutes:
    """Answers chats and completions.

    Args:
        calls: Calls models.
        texts: Prompts and parsers of models that get prompts.
        streams: Watches event streams for silence.
        settings: Settings by flags.
    """

    def __init__(
        self, calls: ModelCalls, texts: TextModels, streams: OpenStreams, settings: OpenAiSettings
    ) -> None:
        self._calls = calls
        self._texts = texts
        self._default_max_tokens = settings.default_max_tokens
        self._most_answers = settings.most_answers
        self._streams = streams

    async def chat(self, call: OpenAiCall, model: NamedModel, body: Mapping[str, Any]) -> None:
        """Answers a chat."""
        fields = await call.run_long(chat_fields, body)
        text = not model.capability.takes_body(CHAT)
        prompts: list[str | Sequence[int]] = []
        if text:
            self._check_takes(model, CHAT)
            fields = self._texts.checked_chat(model.servable, fields)
            prompts = [await self._texts.chat_prompt(model.servable, fields)]
        limit = fields.get("max_completion_tokens", fields.get("max_tokens", self._default_max_tokens))
        named = isinstance(fields.get("tool_choice"), dict)
        await self._answer(call, model, self._work(call, model, CHAT_ANSWER, fields, prompts, limit, named))

    async def completion(self, call: OpenAiCall, model: NamedModel, body: Mapping[str, Any]) -> None:
        """Answers a completion."""
        fields = await call.run_long(completion_fields, body, self._most_answers)
        text = not model.capability.takes_body(COMPLETIONS)
        if text:
            self._check_takes(model, COMPLETIONS)
            self._texts.check_completion(fields)
        default = self._default_max_tokens or _COMPLETION_TOKENS
        limit = fields.get("max_tokens", default)
        prompts = fields["prompt"]
        await self._answer(call, model, self._work(call, model, COMPLETION_ANSWER, fields, prompts, limit))

    def _check_takes(self, model: NamedModel, route: str) -> None:
        if not model.capability.takes_text(route):
            raise RequestError(f"The model `{model.name}` does not answer {route}", "model")

    def _work(
        self,
        call: OpenAiCall,
        model: NamedModel,
        kind: AnswerKind,
        fields: Mapping[str, Any],
        prompts: Sequence[str | Sequence[int]],
        max_tokens: int | None,
        named_tool: bool = False,
    ) -> _Work:
        route = CHAT if kind.chat else COMPLETIONS
        text = not model.capability.takes_body(route)
        n = fields.get("n", 1)
        head = AnswerHead(
            kind, call.request_id, int(wall_seconds()), model.name, n * max(len(prompts), 1), named_tool
        )
        sent = GenerationCall(
            route=route,
            fields=fields,
            body=call.body,
            prompts=prompts if text else (),
            choices=n,
            max_tokens=max_tokens,
            request_id=call.request_id,
            adapter=model.adapter,
        )
        return _Work(head, sent, text)

    async def _answer(self, call: OpenAiCall, model: NamedModel, work: _Work) -> None:
        times = AnswerTimes(call)
        generation = await self._generation(call, model, work)
        fields = work.call.fields
        try:
            if fields.get("stream"):
                options = fields.get("stream_options", {})
                answer = StreamedAnswer(
                    work.head,
                    bool(options.get("include_usage")),
                    bool(options.get("include_usage") and options.get("continuous_usage_stats")),
                )
                await self._stream(call, generation, answer, times)
            else:
                await _whole(call, generation, WholeAnswer(work.head), times)
        except asyncio.CancelledError:
            if call.exchange.lost:
                call.metrics.cancelled(call.model, DISCONNECT)
            raise
        finally:
            generation.close()

    async def _generation(self, call: OpenAiCall, model: NamedModel, work: _Work) -> Generation:
        if work.text:
            await self._texts.tokenizer(model.servable)  # counts tokens where the model does not
        if work.call.max_tokens == 0:
            return await self._calls.echo(model.servable, work.call, call.exchange)
        generation = await self._calls.generate(model.servable, work.call, call.exchange)
        return self._texts.read(model.servable, work.call, generation) if work.text else generation

    async def _stream(
        self, call: OpenAiCall, generation: Generation, answer: StreamedAnswer, times: AnswerTimes
    ) -> None:
        deltas = await generation.take()
        stream = EventStream(call.exchange, DeltaParts(generation, answer), self._streams)
        call.counted(200)
        stream.begin()
        try:
            while deltas is not None:
                times.add(deltas)
                for delta in deltas:
                    answer.usage.add(delta)
                deltas = await stream.send(deltas)
            await stream.end()
        except ConchError as error:
            await stream.fail(error_events(error_object(error)))
        except Exception as error:  # boundary: what models respond with
            log.error("the answer %s could not go on", call.request_id, exc_info=error)
            hidden = InternalError("the request could not be answered")
            await stream.fail(error_events(error_object(hidden)))
        finally:
            stream.close()
            _count(call, answer.usage)


async def _whole(call: OpenAiCall, generation: Generation, answer: WholeAnswer, times: AnswerTimes) -> None:
    first = True
    while (deltas := await generation.take()) is not None:
        if first:
            times.add(deltas)
            first = not deltas
        answer.add(deltas)
    _count(call, answer.usage)
    call.respond(200, [JSON], answer.body())


def _count(call: OpenAiCall, usage: Usage) -> None:
    call.metrics.tokens(call.model, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
