"""Requests of a front end to `ModelCalls`, and their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.request import Parameter
from conch_llm.deltas import Delta


class FieldError(InvalidArgumentError):
    """A model can't take a field of the request.

    Args:
        message: The text.
        param: Name of the field.
    """

    error_code: ClassVar[str | None] = None

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class TokenCounter(Protocol):
    """The tokenizer of a model; any thread.

    Attributes:
        longest: Most tokens of an input for embeddings; None if unknown.
        beyond: The number after the greatest id of a token.
    """

    longest: int | None
    beyond: int

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with special tokens around it."""

    def count(self, text: str, add_special_tokens: bool = True) -> int:
        """The number of tokens of a text."""


def check_ids(model: str, counter: TokenCounter | None, given: str | Sequence[int], param: str) -> None:
    """Raises FieldError: a token id of a prompt is out of the model's vocabulary."""
    if counter is None or isinstance(given, str):
        return
    largest = int(np.max(given))
    if largest >= counter.beyond:
        raise FieldError(f"`{param}`: {largest} is no token of model '{model}'", param)


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A chat or a completion.

    Attributes:
        route: `contract.CHAT` or `contract.COMPLETIONS`.
        fields: The checked members of the body.
        body: The body as received.
        prompts: Prompts, or their token ids; empty for models that take the body.
        choices: Answers to each prompt.
        max_tokens: Most tokens of an answer; None to leave it to the model.
        request_id: The request's id.
        adapter: Name of the LoRA adapter; empty for none.
        tool_parser: Name of the parser of tool calls, if the model gets prompts; empty for none.
    """

    route: str
    fields: Mapping[str, Any]
    body: bytes
    prompts: Sequence[str | Sequence[int]]
    choices: int
    max_tokens: int | None
    request_id: str
    adapter: str = ""
    tool_parser: str = ""


class Generation(ABC):
    """An answer in the making; event loop only. The model waits while nothing is taken."""

    @abstractmethod
    async def take(self) -> Sequence[Delta] | None:
        """All deltas that have come since, at least one; None after the last.

        Raises:
            ConchError: The model has failed, possibly after some deltas.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancels what still runs; may be called again."""


class Piece(NamedTuple):
    """A piece of a body, and the parameters of its response."""

    body: bytes
    parameters: Mapping[str, Parameter]


class EchoedPrompts(Generation):
    """The answer to a completion of no tokens: its prompts.

    Args:
        call: The completion.
        prompt_tokens: Tokens of all prompts; None if they are not counted.

    Raises:
        FieldError: A prompt is no text, or log probabilities are wanted.
    """

    def __init__(self, call: GenerationCall, prompt_tokens: int | None) -> None:
        prompts = call.fields["prompt"]
        if not all(isinstance(each, str) for each in prompts):
            raise FieldError("`echo` needs prompts of text, not of tokens", "prompt")
        if call.fields.get("logprobs") is not None:
            raise FieldError(
                "`logprobs` can't be used with `echo`: the model has none of prompts", "logprobs"
            )
        texts = [prompt for prompt in prompts for _ in range(call.choices)]
        self._deltas: list[Delta] | None = [
            Delta(text, index, "length", prompt_tokens=None if index else prompt_tokens)
            for index, text in enumerate(texts)
        ]

    async def take(self) -> Sequence[Delta] | None:
        """All prompts, then None."""
        deltas, self._deltas = self._deltas, None
        return deltas

    def close(self) -> None:
        """Ends nothing: no call runs."""


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """A request for embeddings.

    Attributes:
        fields: The checked members of the body.
        body: The body as received.
        inputs: Texts, or their token ids.
        dimensions: Dimensions of the vectors; None for the model's own.
        request_id: The request's id.
    """

    fields: Mapping[str, Any]
    body: bytes
    inputs: Sequence[str | Sequence[int]]
    dimensions: int | None
    request_id: str


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors of a request's inputs.

    Attributes:
        vectors: A list or an array of floats for each input.
        prompt_tokens: Tokens of all inputs; None if unknown.
    """

    vectors: Sequence[Any]
    prompt_tokens: int | None


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of documents by a query.

    Attributes:
        scores: One for each document.
        prompt_tokens: Tokens of all texts; None if unknown.
    """

    scores: Sequence[float]
    prompt_tokens: int | None
