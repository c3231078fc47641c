"""Reader of a text model's deltas: finds stop strings, reasoning and tool calls for an answer's deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conch_llm.deltas import Delta
from conch_llm.language.reasoning import ReasoningSplitter
from conch_llm.language.stop_strings import StopStrings
from conch_llm.language.tool_calls import ToolCallParser


class AnswerReader:
    """Reads the deltas of one choice.

    Stop strings are looked for in all of the text, reasoning included; tool calls in the answer behind it.

    Args:
        tool_parser: See `tool_calls`; None leaves calls in the text.
        reasoning: Splits the reasoning; None leaves it in the text.
        stop: Stop strings, if the model does not know them.
        include_stop: True if the text ends with the stop string.
        index: The choice of the delta that `end` adds.
        hides_reasoning: True if reasoning is left out.
    """

    def __init__(
        self,
        *,
        tool_parser: ToolCallParser | None = None,
        reasoning: ReasoningSplitter | None = None,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        index: int = 0,
        hides_reasoning: bool = False,
    ) -> None:
        self._tools = tool_parser
        self._reasoning = reasoning
        self._stop = StopStrings(stop, include_stop) if stop else None
        self._index = index
        self._ended = False
        self._hides = hides_reasoning
        self._passes = not (tool_parser or reasoning or stop or hides_reasoning)

    @property
    def ended(self) -> bool:
        """True if the answer has its finish reason: after a stop string the caller cancels the request."""
        return self._ended

    def read(self, delta: Delta) -> Sequence[Delta]:
        """Takes a delta of the model; returns what it adds to the answer, nothing after its end."""
        if self._ended:
            return ()
        self._index = delta.index
        self._ended = delta.finish_reason is not None
        if self._passes:
            return (delta,)
        read = self._changed(delta)
        return () if read == Delta(index=delta.index) else (read,)

    def end(self, finish_reason: str = "stop", stop_reason: str | int | None = None) -> Sequence[Delta]:
        """Ends an answer whose model gave no finish reason; adds nothing if it has one."""
        return self.read(Delta(index=self._index, finish_reason=finish_reason, stop_reason=stop_reason))

    def _changed(self, delta: Delta) -> Delta:
        finish, stop_reason = delta.finish_reason, delta.stop_reason
        text = delta.text
        if self._stop:
            text = self._stop.feed(text)
            if self._stop.matched:
                self._ended = True
                finish, stop_reason = "stop", self._stop.matched
            elif finish is not None:
                text += self._stop.end()
        reasoning = delta.reasoning
        if self._reasoning:
            thought, text = self._reasoning.feed(text)
            reasoning += thought
            if finish is not None:
                thought, more = self._reasoning.end()
                reasoning += thought
                text += more
        calls = list(delta.tool_calls)
        if self._tools:
            text, found = self._tools.feed(text)
            calls += found
            if finish is not None:
                more, found = self._tools.end()
                text += more
                calls += found
                if finish == "stop" and self._tools.called:
                    finish = self._tools.finish_reason
        return replace(
            delta,
            text=text,
            reasoning="" if self._hides else reasoning,
            tool_calls=calls or (),
            finish_reason=finish,
            stop_reason=stop_reason,
        )
