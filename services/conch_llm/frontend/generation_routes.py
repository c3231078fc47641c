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
from conch_llm.frontend.answer_maker import AnswerMaker, Collector, Encoder
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
)
from conch_llm.frontend.openai_call import OpenAiCall
from conch_llm.frontend.openai_errors import RequestError
from conch_llm.frontend.request_fields import chat_fields, completion_fields
from conch_llm.frontend.text_models import TextModels
from conch_llm.openai_settings import OpenAiSettings

log = logging.getLogger(__name__)

_COMPLETION_TOKENS = 16  # OpenAI's default


@dataclass(frozen=True, slots=True)
class _Work:
    """A checked request.

    Attributes:
        maker: Makes its answer.
        call: The call of the model.
        text: True if the model gets a prompt, not the body.
    """

    maker: AnswerMaker
    call: GenerationCall
    text: bool


class _OpenAiAnswer(AnswerMaker):
    """An answer of OpenAI's chats and completions."""

    def __init__(self, head: AnswerHead, fields: Mapping[str, Any]) -> None:
        self._head = head
        self._options = fields.get("stream_options", {})

    def whole(self) -> WholeAnswer:
        return WholeAnswer(self._head)

    def streamed(self) -> StreamedAnswer:
        include = bool(self._options.get("include_usage"))
        return StreamedAnswer(
            self._head, include, include and bool(self._options.get("continuous_usage_stats"))
        )


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
        named = isinstance(fields.get("tool_choice"), dict)
        head = _head(call, model, CHAT_ANSWER, fields.get("n", 1), named)
        await self.chat_as(call, model, fields, call.body, _OpenAiAnswer(head, fields))

    async def chat_as(
        self,
        call: OpenAiCall,
        model: NamedModel,
        fields: Mapping[str, Any],
        body: bytes,
        maker: AnswerMaker,
    ) -> None:
        """Answers a chat in the form of any route.

        Args:
            call: The request.
            model: The model.
            fields: The chat's checked fields.
            body: The chat's body, for models that take it.
            maker: Makes the answer.

        Raises:
            ConchError: The model can't take the request, or fails before it has answered.
        """
        prompts: list[str | Sequence[int]] = []
        parser = ""
        if not model.capability.takes_body(CHAT):
            self._check_takes(model, CHAT)
            fields, parser = await self._texts.checked_chat(model.servable, fields)
            prompts = [await self._texts.chat_prompt(model.servable, fields)]
        limit = fields.get("max_completion_tokens", fields.get("max_tokens", self._default_max_tokens))
        sent = _sent(call, model, CHAT, fields, body, prompts, limit, parser)
        await self._answer(call, model, _Work(maker, sent, bool(prompts)))

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
        head = _head(call, model, COMPLETION_ANSWER, fields.get("n", 1) * len(prompts))
        sent = _sent(call, model, COMPLETIONS, fields, call.body, prompts if text else (), limit)
        await self._answer(call, model, _Work(_OpenAiAnswer(head, fields), sent, text))

    def _check_takes(self, model: NamedModel, route: str) -> None:
        if not model.capability.takes_text(route):
            raise RequestError(f"The model `{model.name}` does not answer {route}", "model")

    async def _answer(self, call: OpenAiCall, model: NamedModel, work: _Work) -> None:
        times = AnswerTimes(call)
        generation = await self._generation(call, model, work)
        fields = work.call.fields
        try:
            if fields.get("stream"):
                await self._stream(call, generation, work.maker.streamed(), times)
            else:
                await _whole(call, generation, work.maker.whole(), times)
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
        self, call: OpenAiCall, generation: Generation, answer: Encoder, times: AnswerTimes
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
                times.count(answer.usage)
                deltas = await stream.send(deltas)
            await stream.end()
        except ConchError as error:
            failure = error
            await stream.fail(lambda: answer.failure(failure))
        except Exception as error:  # boundary: what models respond with
            log.error("the answer %s could not go on", call.request_id, exc_info=error)
            hidden = InternalError("the request could not be answered")
            await stream.fail(lambda: answer.failure(hidden))
        finally:
            stream.close()
            _count(call, answer.usage)


def _head(
    call: OpenAiCall, model: NamedModel, kind: AnswerKind, choices: int, named_tool: bool = False
) -> AnswerHead:
    return AnswerHead(kind, call.request_id, int(wall_seconds()), model.name, choices, named_tool)


def _sent(
    call: OpenAiCall,
    model: NamedModel,
    route: str,
    fields: Mapping[str, Any],
    body: bytes,
    prompts: Sequence[str | Sequence[int]],
    max_tokens: int | None,
    tool_parser: str = "",
) -> GenerationCall:
    return GenerationCall(
        route=route,
        fields=fields,
        body=body,
        prompts=prompts,
        choices=fields.get("n", 1),
        max_tokens=max_tokens,
        request_id=call.request_id,
        adapter=model.adapter,
        tool_parser=tool_parser,
    )


async def _whole(call: OpenAiCall, generation: Generation, answer: Collector, times: AnswerTimes) -> None:
    first = True
    while (deltas := await generation.take()) is not None:
        if first:
            times.add(deltas)
            first = not deltas
        answer.add(deltas)
        times.count(answer.usage)
    _count(call, answer.usage)
    call.respond(200, [JSON], answer.body())


def _count(call: OpenAiCall, usage: Usage) -> None:
    call.metrics.ended(call.model, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
