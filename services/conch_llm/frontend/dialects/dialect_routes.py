"""Answers the Responses API and the Messages API by chats.

Threads and locks: event loop only; long requests are translated on a thread of the pool.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from conch.core.clock import wall_seconds
from conch.core.errors import ConchError
from conch_llm.calls.model_calls import ModelCalls
from conch_llm.contract import CHAT, COUNT_TOKENS, MESSAGES, RESPONSES, TOKENIZE
from conch_llm.frontend.answer_maker import AnswerMaker
from conch_llm.frontend.dialects.field_table import renamed
from conch_llm.frontend.dialects.messages_answer import MessageHead, StreamedMessage, WholeMessage
from conch_llm.frontend.dialects.messages_request import NAMES as MESSAGES_NAMES
from conch_llm.frontend.dialects.messages_request import count_request, messages_request
from conch_llm.frontend.dialects.response_store import ResponseStore, StoredResponse
from conch_llm.frontend.dialects.responses_answer import (
    Finish,
    ResponseHead,
    StreamedResponse,
    WholeResponse,
)
from conch_llm.frontend.dialects.responses_request import NAMES as RESPONSES_NAMES
from conch_llm.frontend.dialects.responses_request import ResponsesRequest, responses_request, turns_of
from conch_llm.frontend.generation_routes import GenerationRoutes
from conch_llm.frontend.model_names import NamedModel
from conch_llm.frontend.openai_answers import encoded
from conch_llm.frontend.openai_call import OpenAiCall
from conch_llm.frontend.openai_errors import RequestError, UnknownResponseError
from conch_llm.frontend.request_fields import chat_fields
from conch_llm.frontend.text_models import TextModels
from conch_llm.frontend.token_routes import no_tokenizer

_NOT_KEPT = "the server keeps no responses: give it --openai-store-bytes"


@dataclass(frozen=True, slots=True)
class _Chat:
    """A translated request.

    Attributes:
        fields: The checked fields of the chat.
        body: Its body, for models that take it.
    """

    fields: Mapping[str, Any]
    body: bytes


class _ResponseMaker(AnswerMaker):
    """A response of OpenAI's Responses API."""

    def __init__(self, head: ResponseHead, finish: Finish) -> None:
        self._head = head
        self._finish = finish

    def whole(self) -> WholeResponse:
        return WholeResponse(self._head, self._finish)

    def streamed(self) -> StreamedResponse:
        return StreamedResponse(self._head, self._finish)


class _MessageMaker(AnswerMaker):
    """A message of Anthropic's Messages API."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head

    def whole(self) -> WholeMessage:
        return WholeMessage(self._head)

    def streamed(self) -> StreamedMessage:
        return StreamedMessage(self._head)


class DialectRoutes:
    """Answers both APIs on one event loop.

    Args:
        generation: Answers chats.
        calls: Calls models.
        texts: Tokenizers and templates.
        store: Keeps responses.
    """

    def __init__(
        self, generation: GenerationRoutes, calls: ModelCalls, texts: TextModels, store: ResponseStore
    ) -> None:
        self._generation = generation
        self._calls = calls
        self._texts = texts
        self._store = store

    async def responses(self, call: OpenAiCall, model: NamedModel, body: Mapping[str, Any]) -> None:
        """Answers /v1/responses."""
        takes_body = _takes_body(model, RESPONSES)
        previous = self._previous(call, body)
        with _names(RESPONSES_NAMES):
            asked, kept, chat = await call.run_long(
                _response_chat,
                *(body, previous, takes_body, self._store.keeps),
                more_bytes=0 if previous is None else previous.size,
            )
            if asked.stores and not self._store.keeps:
                raise RequestError(f"`store` can't be true: {_NOT_KEPT}", "store")
            stored = self._store.keeps and asked.stores is not False
            # The client's request id would let it write over the responses of others.
            head = ResponseHead(uuid4().hex, int(wall_seconds()), model.name, stored, asked.echoed)
            owner = _owner(call)

            def finish(response: dict[str, Any]) -> None:
                if stored:
                    answered = encoded(turns_of(response["output"]))
                    made = StoredResponse(owner, kept, answered, encoded(response))
                    response["store"] = self._store.put(head.id, made)

            maker = _ResponseMaker(head, finish)
            await self._generation.chat_as(call, model, chat.fields, chat.body or call.body, maker)

    async def messages(self, call: OpenAiCall, model: NamedModel, body: Mapping[str, Any]) -> None:
        """Answers /v1/messages."""
        takes_body = _takes_body(model, MESSAGES)
        with _names(MESSAGES_NAMES):
            head, chat = await call.run_long(_message_chat, body, takes_body, call.request_id, model.name)
            maker = _MessageMaker(head)
            await self._generation.chat_as(call, model, chat.fields, chat.body or call.body, maker)

    async def count_tokens(self, call: OpenAiCall, model: NamedModel, body: Mapping[str, Any]) -> None:
        """Answers /v1/messages/count_tokens."""
        _takes_body(model, COUNT_TOKENS)
        with _names(MESSAGES_NAMES):
            takes_body = model.capability.takes_body(TOKENIZE)
            chat = await call.run_long(_counted_chat, body, takes_body)
            call.reply({"input_tokens": await self._count(call, model, chat)})

    def stored(self, call: OpenAiCall, response_id: str) -> bytes:
        """A response that is kept, as JSON. Raises UnknownResponseError: it is not."""
        found = self._store.get(response_id, _owner(call))
        if found is None:
            raise _unknown(response_id)
        return found.response

    def remove(self, call: OpenAiCall, response_id: str) -> None:
        """Drops a response that is kept. Raises UnknownResponseError: it is not."""
        if not self._store.remove(response_id, _owner(call)):
            raise _unknown(response_id)

    def _previous(self, call: OpenAiCall, body: Mapping[str, Any]) -> StoredResponse | None:
        """The response that a request goes on with. Raises RequestError: it is not kept."""
        name = "previous_response_id"
        wanted = body.get(name)
        if wanted is None:
            return None
        if not self._store.keeps:
            raise RequestError(f"`{name}` can't be used: {_NOT_KEPT}", name)
        found = self._store.get(wanted, _owner(call)) if isinstance(wanted, str) else None
        if found is None:
            shown = wanted[:128] if isinstance(wanted, str) else "no text"
            raise RequestError(
                f"Previous response with id '{shown}' not found.", name, "previous_response_not_found"
            )
        return found

    async def _count(self, call: OpenAiCall, model: NamedModel, chat: _Chat) -> int:
        if chat.body:
            return await self._calls.count(model.servable, chat.body, call.request_id, call.exchange)
        tokenizer = await self._texts.tokenizer(model.servable)
        if tokenizer is None:
            raise no_tokenizer(model)
        prompt = await self._texts.chat_prompt(model.servable, chat.fields)
        return await self._texts.run(lambda: tokenizer.count(prompt, False))


def _takes_body(model: NamedModel, route: str) -> bool:
    """True if a model takes the body of a chat, not a prompt. Raises RequestError: it does not chat."""
    can = model.capability
    if not can.takes_body(CHAT) and not can.takes_text(CHAT):
        raise RequestError(f"The model `{model.name}` does not answer {route}", "model")
    return can.takes_body(CHAT)


def _owner(call: OpenAiCall) -> str:
    grant = call.exchange.access
    return "" if grant is None else grant.principal.name


def _unknown(response_id: str) -> UnknownResponseError:
    return UnknownResponseError(f"Response with id '{response_id[:128]}' not found.")


@contextmanager
def _names(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the fields of errors to those of the API."""
    try:
        yield
    except ConchError as error:
        raise renamed(error, names) from None


def _chat_of(chat: Mapping[str, Any], takes_body: bool) -> _Chat:
    return _Chat(chat_fields(chat), encoded(chat) if takes_body else b"")


def _response_chat(
    body: Mapping[str, Any], previous: StoredResponse | None, takes_body: bool, keeps: bool
) -> tuple[ResponsesRequest, bytes, _Chat]:
    before = [] if previous is None else [*json.loads(previous.asked), *json.loads(previous.answered)]
    asked = responses_request(body, before)
    return asked, encoded(asked.turns) if keeps else b"", _chat_of(asked.chat, takes_body)


def _message_chat(
    body: Mapping[str, Any], takes_body: bool, request_id: str, name: str
) -> tuple[MessageHead, _Chat]:
    asked = messages_request(body)
    return MessageHead(request_id, name, asked.stops, asked.hides_thinking), _chat_of(asked.chat, takes_body)


def _counted_chat(body: Mapping[str, Any], takes_body: bool) -> _Chat:
    chat = count_request(body)
    chat_fields(chat)
    for number, message in enumerate(chat["messages"]):
        content = message["content"]
        if isinstance(content, list) and any(part["type"] != "text" for part in content):
            raise RequestError(f"messages[{number}]: the tokens of pictures can't be counted", "messages")
    if chat.get("tool_choice") == "none":
        chat.pop("tools", None)
    counted = ("model", "messages", "tools", "chat_template_kwargs", "reasoning_effort")
    fields = {name: chat[name] for name in counted if name in chat}
    return _Chat(fields, encoded(fields) if takes_body else b"")
