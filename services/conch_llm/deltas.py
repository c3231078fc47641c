"""`Delta`: what a model adds to its answer in one step; and its form between worker and server.

A model that declares ``chat`` or ``complete`` sends lists of deltas as JSON, in which members with their
default value are left out. The deltas of one response belong to one step of the engine. Imports the standard
library only: a worker may have nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Delta:
    """Addition to one choice.

    Attributes:
        text: Text of the answer.
        index: Index of the choice.
        finish_reason: ``stop``, ``length``, ``tool_calls`` or ``content_filter``, in the choice's last delta.
        reasoning: Text of the model's reasoning.
        tool_calls: Deltas of tool calls as in OpenAI's stream: ``{"index", "id", "type", "function"}`` first,
            then ``{"index", "function": {"arguments"}}``.
        tokens: Number of tokens of this delta; 0 if the model does not count.
        logprobs: For chat a list of OpenAI's ``{"token", "logprob", "bytes", "top_logprobs"}``; for
            completions OpenAI's object of four lists.
        stop_reason: The stop string or the token that ended the choice.
        prompt_tokens: Number of tokens of the prompt, in one delta of the answer.
        cached_tokens: Number of those that were found in a prefix cache.
    """

    text: str = ""
    index: int = 0
    finish_reason: str | None = None
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    tokens: int = 0
    logprobs: Any = None
    stop_reason: str | int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


_DEFAULTS = {each.name: each.default for each in fields(Delta)}


def encode_deltas(deltas: Sequence[Delta]) -> bytes:
    """Encodes deltas as JSON."""
    found = [
        {name: value for name, default in _DEFAULTS.items() if (value := getattr(delta, name)) != default}
        for delta in deltas
    ]
    return json.dumps(found, separators=(",", ":")).encode()


def decode_deltas(text: bytes) -> list[Delta]:
    """Reads deltas.

    Raises:
        ValueError: The text is no list of deltas.
    """
    found = json.loads(text)
    if not isinstance(found, list):
        raise ValueError("deltas are a list")
    try:
        return [Delta(**each) for each in found]
    except TypeError as error:
        raise ValueError(f"a delta is malformed: {error}") from None
