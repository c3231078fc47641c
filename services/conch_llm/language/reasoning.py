"""Splits a model's reasoning between ``<think>`` and ``</think>`` from its answer."""

from __future__ import annotations

from conch_llm.language.markers import MarkerSearch

START = "<think>"
END = "</think>"


def begins_reasoning(prompt: str) -> bool:
    """True if a prompt ends with the opening of the reasoning, so that the model's text begins inside it."""
    return prompt.rstrip().endswith(START)


class ReasoningSplitter:
    """Splits text that comes in pieces; white space at the start of either part is dropped.

    The reasoning can only stand at the start. Without ``</think>`` all of it is reasoning.

    Args:
        begun: True if the prompt ends inside the reasoning, see `begins_reasoning`.
    """

    __slots__ = ("_begun", "_end", "_space", "_state", "_trims")

    def __init__(self, begun: bool = False) -> None:
        self._state = "reasoning" if begun else "start"
        self._space: list[str] = []  # before the start marker
        self._begun = ""  # what may become the start marker
        self._end = MarkerSearch([END])
        self._trims = True

    def feed(self, text: str) -> tuple[str, str]:
        """Takes a piece; returns what it adds to the reasoning and to the answer."""
        if self._state == "start":
            text = self._read_start(text)
        if self._state == "reasoning":
            reasoning = self._trimmed(self._end.feed(text))
            if not self._end.found:
                return reasoning, ""
            self._state = "answer"
            self._trims = True
            return reasoning, self._trimmed(text[self._end.behind :])
        return "", self._trimmed(text) if self._state == "answer" else ""

    def end(self) -> tuple[str, str]:
        """Ends the text; returns the kept back texts of the reasoning and of the answer."""
        return self._trimmed(self._end.end()), self._taken()

    def _read_start(self, text: str) -> str:
        """Looks for the start marker; returns what lies behind, or all if there is none."""
        whole = self._begun + text
        begun = whole if self._begun else whole.lstrip()
        self._space.append(whole[: len(whole) - len(begun)])
        self._begun = begun
        if begun.startswith(START):
            self._state = "reasoning"
            self._taken()
            return begun[len(START) :]
        if not START.startswith(begun):
            # An answer without reasoning keeps its white space.
            self._state = "answer"
            self._trims = False
            return self._taken()
        return ""

    def _taken(self) -> str:
        """Takes the text that was held back at the start."""
        taken = "".join(self._space) + self._begun
        self._space.clear()
        self._begun = ""
        return taken

    def _trimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text
