"""Answers to Anthropic's Messages API, whole and as event streams; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from conch.core.errors import ConchError
from conch_llm.deltas import Delta
from conch_llm.frontend.dialects.answer_blocks import Added, AnswerBlocks, Block, Kind, Opened, Step
from conch_llm.frontend.error_forms import ANTHROPIC_ERRORS
from conch_llm.frontend.openai_answers import Usage, encoded

_REASONS = {"length": "max_tokens", "content_filter": "refusal"}
_GROWING = {
    Kind.TEXT: ("text_delta", "text"),
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}
_INVALID = "INVALID_JSON"
"""The member that has arguments which are no object, as Anthropic's documentation wraps them."""


@dataclass(frozen=True, slots=True)
class MessageHead:
    """Members that a message has from its beginning.

    Attributes:
        id: Its id without the prefix.
        model: The model, as the client names it.
        stops: Texts that end the answer.
        hides_thinking: True to leave thinking out.
    """

    id: str
    model: str
    stops: Sequence[str] = ()
    hides_thinking: bool = False


class _Form:
    """The message at some point of its making."""

    def __init__(self, head: MessageHead, blocks: AnswerBlocks) -> None:
        self._head = head
        self._blocks = blocks

    def message(self, content: list[dict[str, Any]], ended: bool) -> dict[str, Any]:
        return {
            "id": f"msg_{self._head.id}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            **(self.end() if ended else {"stop_reason": None, "stop_sequence": None}),
            "usage": self.usage(),
        }

    def end(self) -> dict[str, Any]:
        """The reason of the end, and the text that was it."""
        blocks, stop = self._blocks, self._blocks.stop_reason
        if blocks.finish_reason in _REASONS:
            return {"stop_reason": _REASONS[blocks.finish_reason], "stop_sequence": None}
        if isinstance(stop, str) and stop in self._head.stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "tool_use" if blocks.called else "end_turn", "stop_sequence": None}

    def usage(self) -> dict[str, Any]:
        """The tokens; those of the prompt that were cached are counted apart."""
        usage = self._blocks.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _block(block: Block, opening: bool = False) -> dict[str, Any]:
    if block.kind is Kind.TEXT:
        return {"type": "text", "text": "" if opening else block.text}
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": "" if opening else block.text, "signature": ""}
    given = {} if opening else _input(block.text)
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}


def _input(arguments: str) -> dict[str, Any]:
    try:
        found = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {_INVALID: arguments}


class WholeMessage:
    """Collects an answer that is sent as a whole.

    Args:
        head: The members of the message.
    """

    def __init__(self, head: MessageHead) -> None:
        self._blocks = AnswerBlocks(head.hides_thinking)
        self._form = _Form(head, self._blocks)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return self._blocks.usage

    def add(self, deltas: Iterable[Delta]) -> None:
        """Adds deltas."""
        self._blocks.add(deltas)

    def body(self) -> bytes:
        """The answer as JSON."""
        self._blocks.end()
        return encoded(self._form.message(list(map(_block, self._blocks.blocks)), ended=True))


class StreamedMessage:
    """Encodes an answer as events.

    Args:
        head: The members of the message.
    """

    def __init__(self, head: MessageHead) -> None:
        self._blocks = AnswerBlocks(head.hides_thinking)
        self._form = _Form(head, self._blocks)
        self._begun = False

    @property
    def usage(self) -> Usage:
        """Tokens so far; the caller adds deltas on arrival."""
        return self._blocks.usage

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """The events of deltas."""
        pieces = self._begin()
        for delta in deltas:
            pieces += map(_step, self._blocks.read(delta))
        return b"".join(pieces)

    def end(self) -> bytes:
        """The events behind the last delta."""
        pieces = [*self._begin(), *map(_step, self._blocks.end())]
        pieces.append(_event("message_delta", delta=self._form.end(), usage=self._form.usage()))
        pieces.append(_event("message_stop"))
        return b"".join(pieces)

    def failure(self, error: ConchError) -> bytes:
        """The event of an error in mid-stream."""
        return ANTHROPIC_ERRORS.events(error)

    def _begin(self) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        return [_event("message_start", message=self._form.message([], ended=False))]


def _step(step: Step) -> bytes:
    block = step.block
    if isinstance(step, Opened):
        return _event("content_block_start", index=block.index, content_block=_block(block, opening=True))
    if not isinstance(step, Added):
        return _event("content_block_stop", index=block.index)
    kind, member = _GROWING[block.kind]
    return _event("content_block_delta", index=block.index, delta={"type": kind, member: step.piece})


def _event(name: str, /, **members: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encoded({"type": name, **members}) + b"\n\n"
