"""Makes text of tokens: all answers of a step in one call of the detokenizer.

The detokenizer is a model, and a call takes 70 µs however many texts it decodes. The text of a token depends
on those before it, so each answer decodes its last tokens with and without the new ones; the difference is
new text. Text that ends within a character waits for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CUT = "\ufffd"
_MOST_CUT = 4
"""Tokens that wait at most: a character has at most 4 bytes."""


class TextStream:
    """Tokens of one answer.

    Args:
        skip_special_tokens: True if special tokens have no text.
    """

    __slots__ = ("_ids", "_known", "ended", "skip_special_tokens", "text")

    def __init__(self, skip_special_tokens: bool = True) -> None:
        self.skip_special_tokens = skip_special_tokens
        self.text = ""
        self.ended = False
        self._ids: list[int] = []
        self._known = 0

    def add(self, ids: Sequence[int], ended: bool) -> None:
        """Adds new tokens; after the last ones nothing waits."""
        self._ids += ids
        self.ended = ended

    def pair(self) -> tuple[list[int], list[int]]:
        """Tokens with known text, and these with the new ones."""
        return self._ids[: self._known], self._ids

    def take(self, before: str, after: str) -> None:
        """Takes the texts of `pair`; sets the new `text`."""
        waiting = len(self._ids) - self._known
        # Some detokenizers write U+FFFD for a part of a character, others nothing.
        cut = after.endswith(_CUT) or len(after) == len(before)
        if cut and not self.ended and waiting < _MOST_CUT:
            self.text = ""
            return
        self.text = after[len(before) :]
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)


class TextDecoder:
    """Decodes tokens.

    Args:
        tokenizer: The engine's tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, streams: Sequence[TextStream], tokens: Sequence[int] = ()) -> list[str]:
        """Sets the new text of streams; returns the texts of further tokens, each by itself."""
        singles: list[str] = []
        for skips in (True, False):
            some = [stream for stream in streams if stream.skip_special_tokens is skips]
            lists = [ids for stream in some for ids in stream.pair()]
            if not skips:
                lists += ([token] for token in tokens)
            if not lists:
                continue
            texts = self._tokenizer.decode(lists, skips)
            for stream, before, after in zip(some, texts[::2], texts[1::2], strict=False):
                stream.take(before, after)
            if not skips:
                singles = texts[2 * len(some) :]
        return singles
