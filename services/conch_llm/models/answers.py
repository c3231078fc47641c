"""The answer to one request: takes what methods yield, ends choices, and sends responses.

Threads: choices are independent and each belongs to one thread or coroutine; all may send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from conch.backends.python.api import pb_utils
from conch.backends.python.api.pb_request import ReceivedRequest
from conch_llm.contract import ANSWER_OUTPUT
from conch_llm.deltas import Delta, encode_deltas

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Form(Protocol):
    """Makes the response of some deltas."""

    def response(self, deltas: Sequence[Delta]) -> pb_utils.InferenceResponse:
        """A response; the deltas of a choice are in order."""


class DeltaForm:
    """Deltas as JSON, for OpenAI's routes."""

    def response(self, deltas: Sequence[Delta]) -> pb_utils.InferenceResponse:
        """A response; the deltas of a choice are in order."""
        return text_response(encode_deltas(deltas))


class TensorForm:
    """Tensors with an element for each choice: text, why it has ended, and numbers of tokens if known.

    Args:
        count: Number of choices.
        outputs: Outputs that the client wants.
        before: Text before each choice.
    """

    def __init__(self, count: int, outputs: set[str], before: str = "") -> None:
        self._count = count
        self._outputs = outputs
        self._before = before

    def response(self, deltas: Sequence[Delta]) -> pb_utils.InferenceResponse:
        """A response; the deltas of a choice are in order."""
        texts = [self._before] * self._count
        reasons: list[str | None] = [None] * self._count
        tokens = [0] * self._count
        prompt_tokens = None
        for delta in deltas:
            texts[delta.index] += delta.text
            tokens[delta.index] += delta.tokens
            reasons[delta.index] = delta.finish_reason or reasons[delta.index]
            if delta.prompt_tokens is not None:
                prompt_tokens = delta.prompt_tokens
        outputs = [pb_utils.Tensor(ANSWER_OUTPUT, np.array([text.encode() for text in texts], object))]
        if any(reasons) and "finish_reason" in self._outputs:
            # `None` as in vLLM's contract.
            found = np.array([(reason or "None").encode() for reason in reasons], object)
            outputs.append(pb_utils.Tensor("finish_reason", found))
        if prompt_tokens is not None and "num_input_tokens" in self._outputs:
            outputs.append(pb_utils.Tensor("num_input_tokens", np.array([prompt_tokens], np.uint32)))
        if any(tokens) and "num_output_tokens" in self._outputs:
            outputs.append(pb_utils.Tensor("num_output_tokens", np.array(tokens, np.uint32)))
        return pb_utils.InferenceResponse(outputs)


def text_response(text: bytes) -> pb_utils.InferenceResponse:
    """A response with one text."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(ANSWER_OUTPUT, np.array([text], object))])


class Answer:
    """The answer to one request.

    Args:
        request: The request.
        form: Makes responses.
        stream: Whether each delta is a response; else there is one response.
        prompts: Number of prompts.
        n: Choices of each prompt.
        stop: Strings that end a choice.
        max_tokens: Most tokens of a choice.
    """

    def __init__(
        self,
        request: ReceivedRequest,
        form: Form,
        stream: bool,
        prompts: int,
        n: int,
        stop: Sequence[str],
        max_tokens: int | None,
    ) -> None:
        self._request = request
        self._sender = request.get_response_sender()
        self._form = form
        self._stream = stream
        self._n = n
        self._choices = [Choice(index, stop, max_tokens) for index in range(prompts * n)]
        self._prompt_tokens: list[int | None] = [None] * prompts
        self._cached_tokens: list[int | None] = [None] * prompts
        self._kept: list[Delta] = []
        self.over = False

    def add_text(self, index: int, text: str) -> None:
        """Adds text before what the model yields."""
        self._put(Delta(text, index))

    def take(self, first: int, count: int, item: object) -> bool:
        """Takes an item that a method yields for some choices; False if no more are wanted.

        Raises:
            TypeError: The item is neither `str` nor `Delta`.
            ValueError: Its index is none of a choice.
        """
        self.over = self.over or self._request.is_cancelled()
        if self.over:
            return False
        if isinstance(item, str):
            index, item = first, Delta(item, first)
        elif isinstance(item, Delta):
            index = first + item.index
            if not 0 <= item.index < count:
                raise ValueError(f"a Delta has index {item.index}, but {count} choices were asked for")
            if item.prompt_tokens is not None or item.cached_tokens is not None:
                item = self._counted(index // self._n, item)
            if first:
                item = replace(item, index=index)
        else:
            raise TypeError(f"a model must yield str or conch_llm.Delta, not {type(item).__name__}")
        choice = self._choices[index]
        if not choice.ended:
            for delta in choice.take(item):
                self._put(delta)
        return any(not each.ended for each in self._choices[first : first + count])

    def waits(self) -> bool:
        """True if a response would now wait for the client."""
        return self._sender.waits()

    def end(self) -> None:
        """Ends choices that have not ended, and sends the last response, unless the request is abandoned."""
        if self.over:
            return
        last = [delta for choice in self._choices if not choice.ended for delta in choice.end()]
        if len(self._prompt_tokens) > 1 and None not in self._prompt_tokens:
            cached = None if None in self._cached_tokens else sum(filter(None, self._cached_tokens))
            counted = sum(filter(None, self._prompt_tokens))
            last.append(Delta(prompt_tokens=counted, cached_tokens=cached))
        if not self._stream:
            last = [*self._kept, *last]
        if last:
            self._sender.send(self._form.response(last), _FINAL)
        else:
            self._sender.send(flags=_FINAL)

    def _put(self, delta: Delta) -> None:
        if self._stream:
            self._sender.send(self._form.response([delta]))
        else:
            self._kept.append(delta)

    def _counted(self, prompt: int, delta: Delta) -> Delta:
        """A delta with the tokens of its prompt, if this is the first that has them and the only prompt."""
        known = self._prompt_tokens[prompt] is not None
        self._prompt_tokens[prompt] = delta.prompt_tokens
        self._cached_tokens[prompt] = delta.cached_tokens
        if known or len(self._prompt_tokens) > 1:
            return replace(delta, prompt_tokens=None, cached_tokens=None)
        return delta


class Choice:
    """One choice: ends with a stop string, at most tokens, or as the model says.

    Attributes:
        ended: Whether its last delta has been made.
    """

    def __init__(self, index: int, stop: Sequence[str], max_tokens: int | None) -> None:
        self._index = index
        self._cutter = StopCutter(stop) if stop else None
        self._max_tokens = max_tokens
        self._tokens = 0
        self._calls = False
        self.ended = False

    def take(self, delta: Delta) -> Sequence[Delta]:
        """What is sent of a delta."""
        self._tokens += delta.tokens
        self._calls = self._calls or bool(delta.tool_calls)
        reason = delta.finish_reason
        if reason is None and self._max_tokens is not None and self._tokens >= self._max_tokens:
            reason = "length"
        if self._cutter is not None:
            text, match = self._cutter.add(delta.text)
            if match is not None:
                self.ended = True
                return [replace(delta, text=text, finish_reason="stop", stop_reason=match)]
            if reason is not None:
                text += self._cutter.rest()
            if text != delta.text:
                delta = replace(delta, text=text)
        if reason is not None:
            self.ended = True
            return [delta if delta.finish_reason else replace(delta, finish_reason=reason)]
        return [delta] if delta.text or delta != Delta(index=self._index) else ()

    def end(self) -> Sequence[Delta]:
        """The last delta of a choice whose model has ended."""
        self.ended = True
        text = "" if self._cutter is None else self._cutter.rest()
        reason = "tool_calls" if self._calls else "stop"
        return [Delta(text, self._index, reason)]


class StopCutter:
    """Finds stop strings in a text that comes in pieces.

    Args:
        stop: The strings.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to send, and the stop string that ends it, if one does."""
        text = self._held + text
        found = [(place, each) for each in self._stop if (place := text.find(each)) >= 0]
        if found:
            place, match = min(found)
            return text[:place], match
        kept = max(self._overlap(text, each) for each in self._stop)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], None

    def rest(self) -> str:
        """Text that was held back."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of a text that begins the string."""
        for size in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:size]):
                return size
        return 0
