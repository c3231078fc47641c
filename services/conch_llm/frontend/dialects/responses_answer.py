"""Answers to OpenAI's Responses API, whole and as event streams; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conch.core.errors import ConchError
from conch_llm.deltas import Delta
from conch_llm.frontend.dialects.answer_blocks import Added, AnswerBlocks, Block, Kind, Opened, Step
from conch_llm.frontend.openai_answers import Usage, encoded
from conch_llm.frontend.openai_errors import error_object

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_TYPES = {
    Kind.REASONING: ("reasoning", "rs"),
    Kind.TEXT: ("message", "msg"),
    Kind.CALL: ("function_call", "fc"),
}
_GROWING = {
    Kind.REASONING: "response.reasoning_text",
    Kind.TEXT: "response.output_text",
    Kind.CALL: "response.function_call_arguments",
}

Finish = Callable[[dict[str, Any]], None]
"""Takes the finished response, before the client has it."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Members that a response has from its beginning.

    Attributes:
        key: Its id without the prefix.
        created: Seconds since 1970.
        model: The model, as the client names it.
        stored: True if the server keeps the response.
        echoed: Members that repeat the request.
    """

    key: str
    created: int
    model: str
    stored: bool
    echoed: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The response's id."""
        return f"resp_{self.key}"


class _Form:
    """The response at some point of its making."""

    def __init__(self, head: ResponseHead, blocks: AnswerBlocks) -> None:
        self._head = head
        self._blocks = blocks

    def response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        head, blocks = self._head, self._blocks
        reason = _INCOMPLETE.get(blocks.finish_reason or "") if status == "incomplete" else None
        open_yet = status == "in_progress"
        return {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": reason} if reason else None,
            "model": head.model,
            "output": [] if open_yet else [self.item(block) for block in blocks.blocks],
            "store": head.stored and status != "failed",
            "usage": None if open_yet else _usage(blocks),
            **head.echoed,
        }

    def finished(self) -> dict[str, Any]:
        return self.response("incomplete" if self._blocks.cut else "completed")

    def item_id(self, block: Block) -> str:
        return f"{_TYPES[block.kind][1]}_{self._head.key}{block.index:04x}"

    def item(self, block: Block, opening: bool = False) -> dict[str, Any]:
        """A block as an item of the output."""
        status = "in_progress" if opening else "completed" if block.complete else "incomplete"
        item: dict[str, Any] = {"id": self.item_id(block), "type": _TYPES[block.kind][0], "status": status}
        content = [] if opening else [part_of(block)]
        if block.kind is Kind.CALL:
            return {**item, "call_id": block.call_id, "name": block.name, "arguments": block.text}
        if block.kind is Kind.REASONING:
            return {**item, "summary": [], "content": content}
        return {**item, "role": "assistant", "content": content}


def part_of(block: Block, opening: bool = False) -> dict[str, Any]:
    """The one part of an item of text or reasoning."""
    text = "" if opening else block.text
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    logprobs = [] if opening else block.logprobs
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(blocks: AnswerBlocks) -> dict[str, Any] | None:
    """The tokens; None if the prompt's are not known."""
    usage = blocks.usage
    if usage.members() is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": blocks.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class WholeResponse:
    """Collects an answer that is sent as a whole.

    Args:
        head: The members of the response.
        finish: Takes the finished response.
    """

    def __init__(self, head: ResponseHead, finish: Finish) -> None:
        self._blocks = AnswerBlocks()
        self._form = _Form(head, self._blocks)
        self._finish = finish

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
        response = self._form.finished()
        self._finish(response)
        return encoded(response)


class StreamedResponse:
    """Encodes an answer as events.

    Args:
        head: The members of the response.
        finish: Takes the finished response.
    """

    def __init__(self, head: ResponseHead, finish: Finish) -> None:
        self._blocks = AnswerBlocks()
        self._form = _Form(head, self._blocks)
        self._finish = finish
        self._sent = 0

    @property
    def usage(self) -> Usage:
        """Tokens so far; the caller adds deltas on arrival."""
        return self._blocks.usage

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """The events of deltas."""
        pieces = self._begin()
        for delta in deltas:
            for step in self._blocks.read(delta):
                pieces += self._of_step(step)
        return b"".join(pieces)

    def end(self) -> bytes:
        """The events behind the last delta."""
        pieces = self._begin()
        for step in self._blocks.end():
            pieces += self._of_step(step)
        response = self._form.finished()
        self._finish(response)
        pieces.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(pieces)

    def failure(self, error: ConchError) -> bytes:
        """The events of an error in mid-stream."""
        found = error_object(error)["error"]
        shown = {"code": found["code"] or found["type"], "message": found["message"]}
        failed = self._form.response("failed", shown)
        return b"".join([*self._begin(), self._event("response.failed", response=failed)])

    def _begin(self) -> list[bytes]:
        if self._sent:
            return []
        response = self._form.response("in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def _of_step(self, step: Step) -> Sequence[bytes]:
        block, form = step.block, self._form
        place: dict[str, Any] = {"item_id": form.item_id(block), "output_index": block.index}
        if block.kind is not Kind.CALL:
            place["content_index"] = 0
        growing = _GROWING[block.kind]
        if isinstance(step, Added):
            if block.kind is Kind.TEXT:
                place["logprobs"] = step.logprobs
            return [self._event(f"{growing}.delta", **place, delta=step.piece)]
        if isinstance(step, Opened):
            item = form.item(block, opening=True)
            events = [self._event("response.output_item.added", output_index=block.index, item=item)]
            if block.kind is not Kind.CALL:
                part = part_of(block, opening=True)
                events.append(self._event("response.content_part.added", **place, part=part))
            return events
        if block.kind is Kind.CALL:
            events = [self._event(f"{growing}.done", **place, name=block.name, arguments=block.text)]
        else:
            logprobs = {"logprobs": block.logprobs} if block.kind is Kind.TEXT else {}
            events = [
                self._event(f"{growing}.done", **place, **logprobs, text=block.text),
                self._event("response.content_part.done", **place, part=part_of(block)),
            ]
        events.append(
            self._event("response.output_item.done", output_index=block.index, item=form.item(block))
        )
        return events

    def _event(self, name: str, /, **members: Any) -> bytes:
        event = {"type": name, "sequence_number": self._sent, **members}
        self._sent += 1
        return b"event: " + name.encode() + b"\ndata: " + encoded(event) + b"\n\n"
