"""Log probabilities of tokens in the shapes of OpenAI's routes.

Tokens within a character come as one entry, whose bytes are those of all of them, and whose log probability
is the last one's: the engine has no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

LogprobsForm = Callable[[Sequence[Mapping[str, Any]]], Any]
"""Makes `Delta.logprobs` of entries of the engine."""


def chat_logprobs(top: int) -> LogprobsForm:
    """Entries of chats, with so many most likely tokens."""

    def form(entries: Sequence[Mapping[str, Any]]) -> Any:
        return [
            {**_entry(each), "top_logprobs": [_entry(other) for other in each["top_logprobs"][:top]]}
            for each in entries
        ]

    return form


def completion_logprobs(top: int) -> LogprobsForm:
    """The four lists of completions; offsets of one answer go on from piece to piece."""
    characters = 0

    def form(entries: Sequence[Mapping[str, Any]]) -> Any:
        nonlocal characters
        offsets = []
        for each in entries:
            offsets.append(characters)
            characters += sum(byte & 0xC0 != 0x80 for byte in each["bytes"])  # their first bytes
        return {
            "tokens": [_name(each) for each in entries],
            "token_logprobs": [each["logprob"] for each in entries],
            "top_logprobs": [
                {_name(other): other["logprob"] for other in (*each["top_logprobs"][:top], each)}
                for each in entries
            ],
            "text_offset": offsets,
        }

    return form


def _entry(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("token", "logprob", "bytes")}


def _name(found: Mapping[str, Any]) -> str:
    """The text of a token, or its bytes where these are no text."""
    data = bytes(found["bytes"])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
