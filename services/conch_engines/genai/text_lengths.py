"""Counts the tokens of texts, and refuses those beyond the model's context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conch.core.errors import InvalidArgumentError
from conch_engines.genai.genai_library import genai


class TextLengths:
    """Counts tokens.

    Args:
        path: The model's folder.
        longest: Most tokens; None if the model does not say.
        pairs: True if each text is a query with a document.
    """

    def __init__(self, path: Path, longest: int | None, pairs: bool = False) -> None:
        self._tokenizer = genai.Tokenizer(str(path), **({"add_second_input": True} if pairs else {}))
        self._longest = longest

    def count(self, *texts: str) -> int:
        """The tokens of a text or of a pair. Raises InvalidArgumentError: they are too many."""
        parts: Sequence[list[str]] = [[text] for text in texts]
        found = int(self._tokenizer.encode(*parts).attention_mask.data.sum())
        if self._longest is not None and found > self._longest:
            raise InvalidArgumentError(
                f"This model's maximum context length is {self._longest} tokens. However, your input "
                f"contains {found} tokens. Please shorten the input."
            )
        return found
