"""Attributes of an answer in traces and the access log, named by OpenTelemetry's GenAI conventions.

Nothing of a prompt or an answer itself is among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from conch.core.clock import Clock
from conch.core.request import Fact, InferenceRequest
from conch_llm.calls.generation import Piece
from conch_llm.contract import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
from conch_llm.deltas import Delta

_OPERATIONS = {
    **dict.fromkeys((CHAT, RESPONSES, MESSAGES), "chat"),
    COMPLETIONS: "text_completion",
    EMBEDDINGS: "embeddings",
}
_ASKED = {
    "max_tokens": ("max_completion_tokens", "max_tokens", "max_output_tokens"),
    "temperature": ("temperature",),
    "top_p": ("top_p",),
}
_EVENT = b"data: "
_MOST_TAIL = 1 << 16
_MOST_BODY = 1 << 20

T_contra = TypeVar("T_contra", contravariant=True)


class AnswerFacts(Generic[T_contra]):
    """Reads the answer to one request as it comes, on threads of the model.

    Args:
        route: OpenAI's route.
        model: The name by which the client asked for the model.
        fields: The members of the request's body.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(self, route: str, model: str, fields: Mapping[str, Any], clock: Clock) -> None:
        self._clock = clock
        self._first_ns = 0
        self._usage: dict[str, int] = {}
        self._reasons: list[str] = []
        self._asked: dict[str, Fact] = {"gen_ai.request.model": model}
        if route in _OPERATIONS:
            self._asked["gen_ai.operation.name"] = _OPERATIONS[route]
        for name, members in _ASKED.items():
            value = next((fields[each] for each in members if fields.get(each) is not None), None)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._asked[f"gen_ai.request.{name}"] = value

    def add(self, content: T_contra | None) -> None:
        """Reads what one response says; None for nothing."""
        if content is not None:
            self._first_ns = self._first_ns or self._clock()
            self._read(content)

    def tell(self, request: InferenceRequest) -> None:
        """Gives the facts to the request's watch, at its last response."""
        watch = request.watch
        if watch is None:
            return
        found = {**self._asked, "gen_ai.response.model": request.model_name}
        self._complete()
        if self._first_ns:
            seconds = (self._first_ns - request.received_ns) / 1e9
            found["gen_ai.response.time_to_first_chunk"] = round(seconds, 6)
        for name, count in self._usage.items():
            found[f"gen_ai.usage.{name}"] = count
        if self._reasons:
            found["gen_ai.response.finish_reasons"] = tuple(self._reasons)
        watch.describe(found)

    def _read(self, content: T_contra) -> None:
        """Reads what one response says."""

    def _complete(self) -> None:
        """Reads what can only be read of the whole answer."""

    def _count(self, name: str, count: int | None) -> None:
        if count is not None:
            self._usage[name] = self._usage.get(name, 0) + count


class DeltaFacts(AnswerFacts[Sequence[Delta]]):
    """Facts of a model that answers by deltas, or by texts that become deltas."""

    def _read(self, content: Sequence[Delta]) -> None:
        for delta in content:
            self._count("input_tokens", delta.prompt_tokens)
            self._count("cache_read.input_tokens", delta.cached_tokens)
            self._count("output_tokens", delta.tokens)
            if delta.finish_reason is not None:
                self._reasons.append(delta.finish_reason)


class BodyFacts(AnswerFacts[Piece]):
    """Facts of a model that answers with the body of the HTTP response.

    The usage and the reasons are read of a whole body, or of the last events of a stream: those that have
    them, if the client asked for them.
    """

    def __init__(self, route: str, model: str, fields: Mapping[str, Any], clock: Clock) -> None:
        super().__init__(route, model, fields, clock)
        self._streams = bool(fields.get("stream"))
        self._tail = b""

    def _read(self, content: Piece) -> None:
        if self._streams:
            self._tail = (self._tail + content.body)[-_MOST_TAIL:]
        elif len(self._tail) <= _MOST_BODY:  # a longer one is not read: it is cut off, so no JSON
            self._tail += content.body

    def _complete(self) -> None:
        texts = [self._tail]
        if self._streams:
            lines = self._tail.split(b"\n")
            texts = [line.removeprefix(_EVENT) for line in lines[-12:] if line.startswith(_EVENT)]
        for text in texts:
            try:
                found = json.loads(text)
            except ValueError:
                continue
            if isinstance(found, dict):
                self._read_object(found)

    def _read_object(self, found: dict[str, Any]) -> None:
        for choice in found.get("choices") or ():
            reason = choice.get("finish_reason") if isinstance(choice, dict) else None
            if isinstance(reason, str):
                self._reasons.append(reason)
        usage = found.get("usage")
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        for name, value in (
            ("input_tokens", usage.get("prompt_tokens", usage.get("input_tokens"))),
            ("output_tokens", usage.get("completion_tokens", usage.get("output_tokens"))),
            ("cache_read.input_tokens", cached),
        ):
            if isinstance(value, int):
                self._usage[name] = value
