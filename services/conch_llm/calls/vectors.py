"""Embeddings through tensors: one request for each input, so that the scheduler batches them. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import orjson

from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.request import InferenceResponse
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Tensor, decode_bytes, float_array
from conch_llm.calls.generation import EmbeddingCall, Embeddings, FieldError, TokenCounter, check_ids
from conch_llm.calls.text_request import tensor_of
from conch_llm.capability import EMBEDDING_REQUEST
from conch_llm.contract import ANSWER_OUTPUT

_COUNTS = "return_num_input_tokens"
_COUNT = "num_input_tokens"
_DIMENSIONS = "dimensions"

Vector = tuple[Any, int | None]
"""A vector, and the number of tokens of its text; None if the model does not count."""


def embedding_request(
    spec: ModelSpec, call: EmbeddingCall, given: str | Sequence[int], counter: TokenCounter | None
) -> dict[str, Tensor]:
    """The tensors for one input.

    Raises:
        FieldError: The model can't take it.
    """
    check_ids(spec.name, counter, given, "input")
    rules = {rule.name: rule for rule in spec.inputs}
    if EMBEDDING_REQUEST in rules:
        return _whole_request(spec, rules, call, given)
    (rule,) = [each for each in spec.inputs if not each.optional]
    if rule.datatype == "BYTES":
        if not isinstance(given, str):
            raise FieldError(f"`input` must be text: model '{spec.name}' takes no token ids", "input")
        values: Sequence[Any] = [given]
    elif isinstance(given, str):
        if counter is None:
            raise FieldError(
                f"`input` must be token ids: model '{spec.name}' takes no text and has no tokenizer", "input"
            )
        values = counter.encode(given)
        if counter.longest is not None and len(values) > counter.longest:
            raise FieldError(
                f"`input` has {len(values)} tokens, and model '{spec.name}' takes at most {counter.longest}",
                "input",
            )
    else:
        values = given
    inputs = {rule.name: tensor_of(spec, rule, values, "input")}
    if call.dimensions is not None:
        if _DIMENSIONS not in rules:
            raise FieldError(
                f"`dimensions` can't be used: the vectors of model '{spec.name}' have one size", "dimensions"
            )
        inputs[_DIMENSIONS] = tensor_of(spec, rules[_DIMENSIONS], [call.dimensions], "dimensions")
    return inputs


def _whole_request(
    spec: ModelSpec, rules: dict[str, TensorSpec], call: EmbeddingCall, given: str | Sequence[int]
) -> dict[str, Tensor]:
    """The form of vLLM."""
    asked: dict[str, Any] = {"input": given if isinstance(given, str) else [int(each) for each in given]}
    if call.dimensions is not None:
        asked["pooling_params"] = {"dimensions": [call.dimensions]}
    inputs = {EMBEDDING_REQUEST: tensor_of(spec, rules[EMBEDDING_REQUEST], [json.dumps(asked)], "input")}
    for rule in spec.inputs:
        if not rule.optional and rule.datatype == "BYTES" and rule.name not in inputs:
            inputs[rule.name] = tensor_of(spec, rule, [given if isinstance(given, str) else ""], "input")
    if _COUNTS in rules:
        inputs[_COUNTS] = tensor_of(spec, rules[_COUNTS], [True], "input")
    return inputs


def vector_of(spec: ModelSpec) -> Callable[[InferenceResponse], Vector]:
    """Reads the vector of a response."""
    whole = any(rule.name == EMBEDDING_REQUEST for rule in spec.inputs)

    def read(response: InferenceResponse) -> Vector:
        outputs = {tensor.name: tensor for tensor in response.outputs}
        if not whole:
            return _row(spec, response.outputs[0]), None
        try:
            vector = orjson.loads(decode_bytes(outputs[ANSWER_OUTPUT].data)[0])
        except (KeyError, IndexError, orjson.JSONDecodeError):
            vector = None
        if not isinstance(vector, list):
            raise InternalError(
                f"model '{spec.name}' answers '{EMBEDDING_REQUEST}' without a list of numbers"
            )
        count = outputs.get(_COUNT)
        tokens = None if count is None else count.numpy().ravel()
        return vector, int(tokens[0]) if tokens is not None and tokens.size else None

    return read


def _row(spec: ModelSpec, tensor: Tensor) -> Any:
    shape = tensor.shape
    if prod(shape[:-1]) != 1:
        raise InvalidArgumentError(
            f"output '{tensor.name}' of model '{spec.name}' has shape {list(shape)} for one text: it "
            "is no single vector. Pool the vectors of tokens in the model."
        )
    if tensor.datatype == "BF16":
        return float_array(tensor.data, (shape[-1],))
    return tensor.numpy().reshape(shape[-1])


def pooled(
    spec: ModelSpec, call: EmbeddingCall, found: Sequence[Vector | None], counter: TokenCounter | None
) -> Embeddings:
    """The vectors of all inputs in order.

    Raises:
        InternalError: One is missing.
    """
    vectors = [each for each in found if each is not None]
    if len(vectors) != len(found):
        raise InternalError(f"model '{spec.name}' has not answered each of {len(found)} inputs")
    counts = [count for _, count in vectors if count is not None]
    total = sum(counts) if len(counts) == len(found) else None
    return Embeddings(
        [vector for vector, _ in vectors], total if total is not None else _counted(call, counter)
    )


def _counted(call: EmbeddingCall, counter: TokenCounter | None) -> int | None:
    if counter is None:
        return None
    return sum(counter.count(each) if isinstance(each, str) else len(each) for each in call.inputs)
