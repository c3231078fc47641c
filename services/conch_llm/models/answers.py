"""The answer to one request: takes what methods yield, ends choices, and sends responses.

Threads: each call of a method has choices of its own, and runs on one thread or the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from conch.backends.python.api.pb_request import ReceivedRequest
from conch.backends.python.api.pb_response import InferenceResponse
from conch.backends.python.api.pb_tensor import Tensor
from conch.core.errors import InvalidArgumentError
from conch_llm.contract import ANSWER_OUTPUT
from conch_llm.deltas import Delta, encode_deltas
from conch_llm.language.answer_reader import AnswerReader
from conch_llm.models.answer_parsers import Reading
from conch_llm.models.model_requests import TextRequest


class Form(Protocol):
    """Makes the response of some deltas."""

    def response(self, deltas: Sequence[Delta]) -> InferenceResponse:
        """A response; the deltas of a choice are in order."""


class DeltaForm:
    """Deltas as JSON, for OpenAI's routes."""

    def response(self, deltas: Sequence[Delta]) -> InferenceResponse:
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

    def response(self, deltas: Sequence[Delta]) -> InferenceResponse:
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
        outputs = [Tensor(ANSWER_OUTPUT, np.array([text.encode() for text in texts], object))]
        if any(reasons) and "finish_reason" in self._outputs:
            # `None` as in vLLM's contract.
            found = np.array([(reason or "None").encode() for reason in reasons], object)
            outputs.append(Tensor("finish_reason", found))
        if prompt_tokens is not None and "num_input_tokens" in self._outputs:
            outputs.append(Tensor("num_input_tokens", np.array([prompt_tokens], np.uint32)))
        if any(tokens) and "num_output_tokens" in self._outputs:
            outputs.append(Tensor("num_output_tokens", np.array(tokens, np.uint32)))
        return InferenceResponse(outputs)


def text_response(text: bytes) -> InferenceResponse:
    """A response with one text."""
    return InferenceResponse([Tensor(ANSWER_OUTPUT, np.array([text], object))])


class ModelAnswer:
    """The answer to one request.

    Args:
        request: The request.
        form: Makes responses.
        asked: The first of its prompts or its conversation; the others have the same options.
        prompts: Number of prompts.
        reading: Makes the readers of choices.

    Attributes:
        closed: True if no further item is taken.
    """

    def __init__(
        self, request: ReceivedRequest, form: Form, asked: TextRequest, prompts: int, reading: Reading
    ) -> None:
        self._request = request
        self.sender = request.get_response_sender()
        self._form = form
        self._stream = asked.stream
        self._n = asked.n
        self.choices = [Choice(index, asked, reading) for index in range(prompts * asked.n)]
        self._prompt_tokens: list[int | None] = [None] * prompts
        self._cached_tokens: list[int | None] = [None] * prompts
        self._kept: list[Delta] = []
        self.closed = False

    def call(self, first: int, count: int) -> MethodCall:
        """The part of the answer that one call of a method gives."""
        return MethodCall(self, first, count)

    def echo(self, prompt: int, text: str | Sequence[int]) -> Iterator[InferenceResponse]:
        """Puts a prompt before its choices.

        Raises:
            InvalidArgumentError: It is no text.
        """
        if not isinstance(text, str):
            raise InvalidArgumentError("echo: needs prompts of text, not of tokens")
        for index in range(prompt * self._n, (prompt + 1) * self._n):
            yield from self.respond([Delta(text, index)])

    def respond(self, deltas: Sequence[Delta]) -> Iterator[InferenceResponse]:
        """Responses of some deltas; those of an answer in one piece are kept."""
        if not self._stream:
            self._kept += deltas
        elif deltas:
            yield self._form.response(deltas)

    def end(self) -> Iterator[InferenceResponse]:
        """Ends choices that have not ended; none if the request is abandoned."""
        if self.abandoned():
            return
        last = [delta for choice in self.choices if not choice.ended for delta in choice.end()]
        if len(self._prompt_tokens) > 1 and None not in self._prompt_tokens:
            cached = None if None in self._cached_tokens else sum(filter(None, self._cached_tokens))
            counted = sum(filter(None, self._prompt_tokens))
            last.append(Delta(prompt_tokens=counted, cached_tokens=cached))
        last = [*self._kept, *last]
        if last:
            yield self._form.response(last)

    def abandoned(self) -> bool:
        """True if the client does not wait any more."""
        return self._request.is_cancelled()

    def counted(self, index: int, delta: Delta) -> Delta:
        """A delta with the tokens of its prompt, if this is the first that has them and the only prompt."""
        prompt = index // self._n
        known = self._prompt_tokens[prompt] is not None
        self._prompt_tokens[prompt] = delta.prompt_tokens
        self._cached_tokens[prompt] = delta.cached_tokens
        if known or len(self._prompt_tokens) > 1:
            return replace(delta, prompt_tokens=None, cached_tokens=None)
        return delta


class MethodCall:
    """The part of an answer that one call of a method gives: one choice, or all of a prompt.

    Attributes:
        over: True if the call needs no further item.
    """

    def __init__(self, answer: ModelAnswer, first: int, count: int) -> None:
        self._answer = answer
        self._first = first
        self._choices = answer.choices[first : first + count]
        self.over = False

    def take(self, item: object) -> Iterator[InferenceResponse]:
        """Takes an item that the method yields, and gives what is to be sent.

        Raises:
            TypeError: The item is neither `str` nor `Delta`.
            ValueError: Its index is none of a choice.
        """
        answer = self._answer
        if answer.closed or answer.abandoned():
            self.over = True
            return
        if isinstance(item, str):
            item = Delta(item)
        elif not isinstance(item, Delta):
            raise TypeError(f"a model must yield str or conch_llm.Delta, not {type(item).__name__}")
        if not 0 <= item.index < len(self._choices):
            raise ValueError(
                f"a Delta has index {item.index}, but {len(self._choices)} choices were asked for"
            )
        choice = self._choices[item.index]
        if item.index != choice.index:
            item = replace(item, index=choice.index)
        if item.prompt_tokens is not None or item.cached_tokens is not None:
            item = answer.counted(choice.index, item)
        if not choice.ended:
            yield from answer.respond(choice.take(item))
        self.over = all(each.ended for each in self._choices)

    def send(self, item: object) -> None:
        """Takes an item and sends its responses; blocks while the client has too much to read."""
        for response in self.take(item):
            self._answer.sender.send(response)


class Choice:
    """One choice: ends with a stop string, at most tokens, or as the model says.

    Attributes:
        index: Its index.
    """

    def __init__(self, index: int, asked: TextRequest, reading: Reading) -> None:
        self.index = index
        self._asked = asked
        self._reading = reading
        self._reader: AnswerReader | None = None
        self._max_tokens = asked.max_tokens
        self._tokens = 0
        self._calls = False

    @property
    def ended(self) -> bool:
        """True if the choice's last delta has been made."""
        return self._reader is not None and self._reader.ended

    def take(self, delta: Delta) -> Sequence[Delta]:
        """Takes a delta of the model; returns the deltas to send."""
        self._tokens += delta.tokens
        self._calls = self._calls or bool(delta.tool_calls)
        if self._max_tokens is not None and self._tokens >= self._max_tokens and not delta.finish_reason:
            delta = replace(delta, finish_reason="length")
        if not delta.text and delta == Delta(index=self.index):
            return ()
        return self._opened().read(delta)

    def end(self) -> Sequence[Delta]:
        """The last delta of a choice whose model has ended."""
        return self._opened().end("tool_calls" if self._calls else "stop")

    def _opened(self) -> AnswerReader:
        # Made at the first delta: how it begins depends on the prompt.
        if self._reader is None:
            self._reader = self._reading.reader(self._asked, self.index)
        return self._reader
