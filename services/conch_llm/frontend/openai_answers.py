"""Answers to chats and completions, whole and as event streams; pure.

A stream's chunk is a prefix made at the start, the text escaped by orjson, and a constant suffix; chunks with
more than text are encoded as a whole (`_Chunks.event`). Both have the same members in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from conch.core.errors import ConchError
from conch.frontends.yield_gil import yield_gil
from conch_llm.deltas import Delta
from conch_llm.frontend.openai_errors import error_object

_STEP_BYTES = 1 << 18  # encoded before other threads run
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerKind:
    """Differences of the two routes.

    Attributes:
        chat: True if it is a chat.
        id_prefix: Beginning of ids.
        whole: `object` of a whole answer.
        chunk: `object` of a chunk.
    """

    chat: bool
    id_prefix: str
    whole: str
    chunk: str


CHAT_ANSWER = AnswerKind(True, "chatcmpl-", "chat.completion", "chat.completion.chunk")
COMPLETION_ANSWER = AnswerKind(False, "cmpl-", "text_completion", "text_completion")


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The members that all parts of one answer have.

    Attributes:
        kind: The route's kind.
        id: Id without its prefix.
        created: Seconds since 1970.
        model: The model, as the client names it.
        choices: Number of choices.
        named_tool: True if the client has named the function to call; then calls end with ``stop``.
    """

    kind: AnswerKind
    id: str
    created: int
    model: str
    choices: int
    named_tool: bool = False

    def members(self, kind: str) -> dict[str, Any]:
        """The members, for `kind` as the object."""
        return {
            "id": self.kind.id_prefix + self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


class Usage:
    """Counts tokens; known once the model has counted the prompt.

    Attributes:
        completion_tokens: Tokens of all choices.
    """

    def __init__(self) -> None:
        self._prompt: int | None = None
        self._cached: int | None = None
        self.completion_tokens = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; 0 if they are not counted."""
        return self._prompt or 0

    @property
    def cached_tokens(self) -> int:
        """Tokens of prompts that were found in a prefix cache; 0 if they are not counted."""
        return self._cached or 0

    def add(self, delta: Delta) -> None:
        """Counts a delta."""
        self.completion_tokens += delta.tokens
        if delta.prompt_tokens is not None:
            self._prompt = (self._prompt or 0) + delta.prompt_tokens
        if delta.cached_tokens is not None:
            self._cached = (self._cached or 0) + delta.cached_tokens

    def members(self) -> dict[str, Any] | None:
        """The object `usage`; None if it is not known."""
        if self._prompt is None:
            return None
        found: dict[str, Any] = {
            "prompt_tokens": self._prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self._prompt + self.completion_tokens,
        }
        if self._cached is not None:
            found["prompt_tokens_details"] = {"cached_tokens": self._cached}
        return found


def encoded(value: Any) -> bytes:
    """JSON; a text with lone surrogates, which UTF-8 has no form for, is escaped."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def encoded_around(head: dict[str, Any], name: str, rows: Iterable[Any]) -> bytes:
    """JSON of an object with a long list as its last member, encoded row by row so that other threads run."""
    parts = [encoded(head)[:-1] + b"," + encoded(name) + b":["]
    size = 0
    for index, row in enumerate(rows):
        part = encoded(row)
        parts.append(b"," + part if index else part)
        size += len(part)
        if size > _STEP_BYTES:
            size = 0
            yield_gil()
    return b"".join((*parts, b"]}"))


def is_plain(delta: Delta) -> bool:
    """True if a delta has nothing but text to send."""
    return not (delta.finish_reason or delta.reasoning or delta.tool_calls or delta.logprobs is not None)


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Deltas with the texts of neighbours of one choice in one, for a client that reads slowly."""
    found: list[Delta] = []
    texts: dict[int, list[str]] = {}
    last: dict[int, int] = {}  # index of a choice to the place of its last delta, if that is plain
    for delta in deltas:
        place = last.get(delta.index)
        if place is not None and is_plain(delta):
            texts[place].append(delta.text)
            continue
        last.pop(delta.index, None)
        if is_plain(delta):
            last[delta.index] = len(found)
            texts[len(found)] = [delta.text]
        found.append(delta)
    for place, parts in texts.items():
        if len(parts) > 1:
            found[place] = replace(found[place], text="".join(parts))
    return found


class _Choice:
    """One choice of a whole answer."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.arguments: dict[int, list[str]] = {}
        self.logprobs: Any = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            self._add_call(call)
        if delta.logprobs is not None:
            self.logprobs = _extended(self.logprobs, delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
        if delta.stop_reason is not None:
            self.stop_reason = delta.stop_reason

    def _add_call(self, call: Any) -> None:
        index = call.get("index", len(self.calls))
        function = call.get("function", {})
        known = self.calls.setdefault(index, {"id": "", "type": "function", "function": {"name": ""}})
        known["id"] = call.get("id") or known["id"]
        known["function"]["name"] = function.get("name") or known["function"]["name"]
        self.arguments.setdefault(index, []).append(function.get("arguments") or "")

    def tool_calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": call["id"],
                "type": call["type"],
                "function": {**call["function"], "arguments": "".join(self.arguments[index])},
            }
            for index, call in sorted(self.calls.items())
        ]


def _extended(known: Any, more: Any) -> Any:
    """Logprobs of a choice with those of a further delta: a list, or an object of lists."""
    if known is None:
        return more
    if isinstance(known, dict):
        # A list may be null.
        return {name: values and [*values, *(more.get(name) or ())] for name, values in known.items()}
    return [*known, *more]


class WholeAnswer:
    """Collects an answer that is sent as a whole.

    Args:
        head: The members that it begins with.
    """

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._choices = [_Choice() for _ in range(head.choices)]
        self.usage = Usage()

    def add(self, deltas: Iterable[Delta]) -> None:
        """Adds deltas."""
        for delta in deltas:
            self.usage.add(delta)
            self._choices[delta.index].add(delta)

    def body(self) -> bytes:
        """The answer as JSON."""
        head = self._head
        member = self._chat_choice if head.kind.chat else self._text_choice
        return encoded(
            {
                **head.members(head.kind.whole),
                "system_fingerprint": None,
                "choices": [member(index, choice) for index, choice in enumerate(self._choices)],
                "usage": self.usage.members(),
            }
        )

    def _chat_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        text, calls = "".join(choice.texts), choice.tool_calls()
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if choice.reasoning:
            message["reasoning"] = "".join(choice.reasoning)
        if calls:
            message["tool_calls"] = calls
        logprobs = None if choice.logprobs is None else {"content": choice.logprobs}
        return self._choice({"index": index, "message": message, "logprobs": logprobs}, choice)

    def _text_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        return self._choice({"index": index, "text": text, "logprobs": choice.logprobs}, choice)

    def _choice(self, members: dict[str, Any], choice: _Choice) -> dict[str, Any]:
        ended = choice.finish_reason or end_of(self._head, bool(choice.calls))
        members["finish_reason"] = ended
        if choice.stop_reason is not None:
            members["stop_reason"] = choice.stop_reason
        return members


def end_of(head: AnswerHead, called: bool) -> str:
    """The reason for the end of a choice whose model tells none."""
    return "tool_calls" if called and not head.named_tool else "stop"


class StreamedAnswer:
    """Encodes an answer as events.

    Args:
        head: The members of each chunk.
        include_usage: True if a chunk with the usage comes last.
        continuous: True if each chunk has the usage up to there.

    Attributes:
        usage: Usage so far; the caller adds deltas on arrival, which may be before they are sent.
    """

    def __init__(self, head: AnswerHead, include_usage: bool = False, continuous: bool = False) -> None:
        self._head = head
        self._include_usage = include_usage
        self._continuous = continuous
        self.usage = Usage()
        self._members = head.members(head.kind.chunk)
        start = b"data: " + encoded(self._members)[:-1] + b',"choices":['
        before = b'{"index":%d,"delta":{"content":' if head.kind.chat else b'{"index":%d,"text":'
        self._prefixes = [start + before % index for index in range(head.choices)]
        after = b"}" if head.kind.chat else b',"logprobs":null'
        usage = b',"usage":null' if include_usage else b""
        self._suffix = after + b',"finish_reason":null}]' + usage + b"}\n\n"
        self._begun = [False] * head.choices
        self._called = [False] * head.choices
        self._ended = [False] * head.choices

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """The events of deltas; empty for deltas without anything to send."""
        pieces: list[bytes] = []
        for delta in deltas:
            index = delta.index
            if self._ended[index]:
                continue
            if not self._begun[index]:
                self._begin(index, pieces)
            if self._continuous or not is_plain(delta):
                self._event(delta, pieces)
            elif delta.text:
                pieces += (self._prefixes[index], encoded(delta.text), self._suffix)
        return b"".join(pieces)

    def end(self) -> bytes:
        """The events behind the last delta: reasons that the model has not told, usage, and the end."""
        pieces: list[bytes] = []
        for index, ended in enumerate(self._ended):
            if not ended:
                if not self._begun[index]:
                    self._begin(index, pieces)
                self._event(Delta(index=index, finish_reason=end_of(self._head, self._called[index])), pieces)
        usage = self.usage.members()
        if self._include_usage and usage is not None:
            pieces.append(_event({**self._members, "choices": [], "usage": usage}))
        pieces.append(DONE)
        return b"".join(pieces)

    def failure(self, error: ConchError) -> bytes:
        """A chunk with an error in mid-stream, and the end."""
        return error_events(error_object(error))

    def _begin(self, index: int, pieces: list[bytes]) -> None:
        self._begun[index] = True
        if self._head.kind.chat:
            delta = {"role": "assistant", "content": ""}
            pieces.append(self._chunk({"index": index, "delta": delta, "finish_reason": None}))

    def _event(self, delta: Delta, pieces: list[bytes]) -> None:
        """Encodes a delta with more than text, or with usage."""
        index = delta.index
        choice: dict[str, Any] = {"index": index}
        if self._head.kind.chat:
            choice["delta"] = added = _chat_delta(delta)
            if not added and delta.finish_reason is None and delta.logprobs is None:
                return
            if delta.logprobs is not None:
                choice["logprobs"] = {"content": delta.logprobs}
        else:
            choice |= {"text": delta.text, "logprobs": delta.logprobs}
        choice["finish_reason"] = delta.finish_reason
        if delta.stop_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        self._called[index] |= bool(delta.tool_calls)
        self._ended[index] = delta.finish_reason is not None
        pieces.append(self._chunk(choice))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk: dict[str, Any] = {**self._members, "choices": [choice]}
        if self._continuous:
            chunk["usage"] = self.usage.members()
        elif self._include_usage:
            chunk["usage"] = None
        return _event(chunk)


def _chat_delta(delta: Delta) -> dict[str, Any]:
    added: dict[str, Any] = {}
    if delta.reasoning:
        added["reasoning"] = delta.reasoning
    if delta.text:
        added["content"] = delta.text
    if delta.tool_calls:
        added["tool_calls"] = _by_index(delta.tool_calls)
    return added


def _by_index(calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Deltas of calls with one entry for each call, since some clients read no more of a chunk."""
    found: dict[int, Mapping[str, Any]] = {}
    for call in calls:
        index = call.get("index", -1 - len(found))
        known, function = found.get(index, {}), call.get("function", {})
        before = known.get("function", {})
        found[index] = {**known, **call}
        if known:
            arguments = (before.get("arguments") or "") + (function.get("arguments") or "")
            found[index] = {**found[index], "function": {**before, **function, "arguments": arguments}}
    return list(found.values())


def _event(members: dict[str, Any]) -> bytes:
    return b"data: " + encoded(members) + b"\n\n"


def error_events(members: dict[str, Any]) -> bytes:
    """The events of an error in mid-stream."""
    return _event(members) + DONE
