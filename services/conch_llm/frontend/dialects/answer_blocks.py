"""Reads the deltas of an answer as blocks in their order: reasoning, text, and one for each tool call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from conch.core.errors import InternalError
from conch_llm.deltas import Delta
from conch_llm.frontend.openai_answers import Usage

_CUT = ("length", "content_filter")


class Kind(Enum):
    """Kinds of blocks."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True)
class Block:
    """One block.

    Attributes:
        kind: Its kind.
        index: Its place in the answer.
        call_id: Id of the call.
        name: The function that is called.
        pieces: Its text, or the call's arguments, so far.
        logprobs: Log probabilities of a text's tokens, as in a chat.
        complete: False while it may grow, and if it was cut.
    """

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    complete: bool = False

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.pieces)


class Opened(NamedTuple):
    """A block begins."""

    block: Block


class Added(NamedTuple):
    """A block grows."""

    block: Block
    piece: str
    logprobs: Sequence[Any] = ()


class Closed(NamedTuple):
    """A block ends."""

    block: Block


Step = Opened | Added | Closed


class AnswerBlocks:
    """The blocks of an answer with one choice.

    Args:
        hides_reasoning: True to leave reasoning out.

    Attributes:
        blocks: The blocks so far.
        usage: Tokens so far; the caller adds deltas on arrival, which may be before they are read.
        reasoning_tokens: Tokens of the reasoning.
        finish_reason: Reason of the end; None before.
        stop_reason: The stop string or the token that ended the answer.
    """

    def __init__(self, hides_reasoning: bool = False) -> None:
        self._hides_reasoning = hides_reasoning
        self._thinks = False
        self._calls: dict[int, Block] = {}
        self._logprobs: list[Any] = []  # of tokens whose text is held back
        self._open: Block | None = None
        self.blocks: list[Block] = []
        self.usage = Usage()
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def called(self) -> bool:
        """True if the answer has a call."""
        return bool(self._calls)

    @property
    def cut(self) -> bool:
        """True if the answer has ended before its end."""
        return self.finish_reason in _CUT

    def add(self, deltas: Iterable[Delta]) -> None:
        """Counts and reads deltas of an answer that is sent as a whole."""
        for delta in deltas:
            self.usage.add(delta)
            self.read(delta)

    def read(self, delta: Delta) -> list[Step]:
        """The steps of a delta; none after the end.

        Raises:
            InternalError: The model adds to a call behind which something else has begun.
        """
        steps: list[Step] = []
        if self.finish_reason is not None:
            return steps
        if delta.reasoning:
            self._thinks = True
            if not self._hides_reasoning:
                self._add(steps, self._block(steps, Kind.REASONING), delta.reasoning)
        if self._thinks and not delta.text and not delta.tool_calls:
            self.reasoning_tokens += delta.tokens
        else:
            self._thinks = False
            self._logprobs += delta.logprobs or ()
        if delta.text:
            self._add_text(steps, delta.text)
        for call in delta.tool_calls:
            self._add_call(steps, call)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        return steps

    def end(self) -> list[Step]:
        """The steps of the end; an answer of nothing has an empty text, which clients look for."""
        self.finish_reason = self.finish_reason or "stop"
        steps: list[Step] = []
        if not self.blocks:
            self._block(steps, Kind.TEXT)
        if self._open is not None and self._open.kind is Kind.TEXT and self._logprobs:
            self._add_text(steps, "")
        self._close(steps, complete=not self.cut)
        return steps

    def _block(self, steps: list[Step], kind: Kind, call_id: str = "", name: str = "") -> Block:
        """The open block if it is of the kind, else a new one; each call is a new one."""
        if self._open is not None and self._open.kind is kind and kind is not Kind.CALL:
            return self._open
        self._close(steps, complete=True)
        self._open = block = Block(kind, len(self.blocks), call_id, name)
        self.blocks.append(block)
        steps.append(Opened(block))
        return block

    def _close(self, steps: list[Step], complete: bool) -> None:
        if self._open is not None:
            self._open.complete = complete
            steps.append(Closed(self._open))
            self._open = None

    def _add(self, steps: list[Step], block: Block, piece: str) -> None:
        block.pieces.append(piece)
        steps.append(Added(block, piece))

    def _add_text(self, steps: list[Step], piece: str) -> None:
        block = self._block(steps, Kind.TEXT)
        logprobs, self._logprobs = self._logprobs, []
        block.pieces.append(piece)
        block.logprobs += logprobs
        steps.append(Added(block, piece, logprobs))

    def _add_call(self, steps: list[Step], call: Mapping[str, Any]) -> None:
        function = call.get("function") or {}
        index = call.get("index", len(self._calls))
        block = self._calls.get(index)
        if block is None:
            name = function.get("name") or ""
            block = self._calls[index] = self._block(steps, Kind.CALL, call.get("id") or "", name)
        elif block is not self._open:
            raise InternalError("the model adds to a tool call that has ended")
        if function.get("arguments"):
            self._add(steps, block, function["arguments"])
