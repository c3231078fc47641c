"""The contract of Triton's vLLM backend: prompts and parameters as tensors, texts as tensors."""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .answer import VllmAnswer, texts
from .engine_setup import Engine, adapter_of
from .sampling_parameters import sampling_parameters

_FLAGS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)


class Inputs:
    """The input tensors of a request, each of at most one element unless said otherwise."""

    def __init__(self, request: Any) -> None:
        self._tensors = {tensor.name(): tensor for tensor in request.inputs()}

    def raw(self, name: str) -> bytes | None:
        """An element of bytes; None without the input."""
        values = self.list(name)
        return values[0] if values else None

    def text(self, name: str) -> str | None:
        """A text; None without the input.

        Raises:
            ValueError: It is not UTF-8.
        """
        value = self.raw(name)
        try:
            return None if value is None else value.decode()
        except UnicodeDecodeError:
            raise ValueError(f"input '{name}' is not UTF-8") from None

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        tensor = self._tensors.get(name)
        return default if tensor is None else bool(tensor.as_numpy().reshape(-1)[0])

    def list(self, name: str) -> list[bytes]:
        """All elements of bytes."""
        tensor = self._tensors.get(name)
        return [] if tensor is None else tensor.as_numpy().reshape(-1).tolist()

    def object(self, name: str) -> dict[str, Any] | None:
        """A JSON object; None without the input.

        Raises:
            ValueError: It is none.
        """
        value = self.raw(name)
        if value is None:
            return None
        try:
            found = json.loads(value)
        except ValueError as error:
            raise ValueError(f"input '{name}' is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"input '{name}' must be a JSON object")
        return found


async def embed(engine: Engine, request_id: str, wanted: Mapping[str, Any], answer: VllmAnswer) -> None:
    """Responds with an embedding as a JSON list."""
    if "embed" not in engine.tasks:
        raise ValueError(f"Model {engine.name} does not support 'embed' request")
    from vllm.pooling_params import PoolingParams

    source = wanted.get("input")
    prompt = source if isinstance(source, str) else {"prompt_token_ids": source}
    dimensions = (wanted.get("pooling_params") or {}).get("dimensions")
    if isinstance(dimensions, list):
        dimensions = dimensions[0] if dimensions else None
    params = PoolingParams(dimensions=dimensions, task="embed")
    found = [each async for each in engine.client.encode(prompt, params, request_id)]
    if not found:
        raise RuntimeError("the engine gave no output")
    output = found[-1]
    vector = [float(value) for value in output.outputs.data.tolist()]
    counts = np.array([len(output.prompt_token_ids)], np.uint32), np.zeros(1, np.uint32)
    named = {"text_output": texts([json.dumps(vector)])}
    await answer.send({**named, "num_input_tokens": counts[0], "num_output_tokens": counts[1]}, final=True)


async def generate(
    engine: Engine, request_id: str, inputs: Inputs, more: Mapping[str, Any], answer: VllmAnswer
) -> None:
    """Responds with a text, or with its deltas if ``stream`` is true.

    Args:
        engine: The engine.
        request_id: Unique among the engine's requests.
        inputs: Inputs of the request.
        more: Parameters of the request, for sampling if there is no input for that.
        answer: The responses.
    """
    prompt = inputs.text("text_input")
    if prompt is None:
        raise ValueError("input 'text_input' is missing")
    stream = inputs.flag("stream", False)
    prepend = not inputs.flag("exclude_input_in_output", stream)
    if stream and prepend:
        raise ValueError("When streaming, `exclude_input_in_output` = False is not allowed.")
    given = inputs.object("sampling_parameters")
    parameters, adapter = sampling_parameters(
        more if given is None else given,
        engine.defaults,
        stream,
        strict=given is not None,
    )
    outputs = _Outputs(inputs, prompt if prepend else "", parameters.n or 1)
    images = inputs.list("image")
    whole: Any = {"prompt": prompt, "multi_modal_data": {"image": _images(images)}} if images else prompt
    async for output in engine.client.generate(
        whole, parameters, request_id, lora_request=adapter_of(engine, adapter)
    ):
        await answer.send(outputs.of(output), final=output.finished)


async def warm_up(engine: Engine) -> None:
    """Generates a token with its log probability, whose first computation compiles for seconds."""
    parameters, _ = sampling_parameters({"max_tokens": 1, "logprobs": 1}, engine.defaults, False, strict=True)
    async for _ in engine.client.generate("warm up", parameters, "warm-up"):
        pass


class _Outputs:
    """Makes output tensors of what the engine yields: one element for each of n choices."""

    def __init__(self, inputs: Inputs, prefix: str, choices: int) -> None:
        self._prefix = prefix
        self._choices = choices
        self._wanted = frozenset(name for name in _FLAGS if inputs.flag(name, False))

    def of(self, output: Any) -> dict[str, Any]:
        """Outputs by name; a choice that has nothing new has empty ones."""
        by_index = {each.index: each for each in output.outputs}
        every: Sequence[Any] = [by_index.get(index) for index in range(self._choices)]
        found: dict[str, Any] = {
            "text_output": texts([self._prefix + ("" if each is None else each.text) for each in every])
        }
        wanted = self._wanted
        if "return_finish_reason" in wanted:
            found["finish_reason"] = texts(
                [str(None if each is None else each.finish_reason) for each in every]
            )
        if "return_cumulative_logprob" in wanted:
            values = [None if each is None else each.cumulative_logprob for each in every]
            found["cumulative_logprob"] = np.array(values, np.float32)
        if "return_logprobs" in wanted:
            found["logprobs"] = texts([_logprobs(None if each is None else each.logprobs) for each in every])
        if "return_num_input_tokens" in wanted:
            found["num_input_tokens"] = np.array([len(output.prompt_token_ids or ())], np.uint32)
        if "return_num_output_tokens" in wanted:
            counts = [0 if each is None else len(each.token_ids) for each in every]
            found["num_output_tokens"] = np.array(counts, np.uint32)
        return found


def _logprobs(found: Any) -> str:
    """JSON: for each token an object of candidates by id."""
    if not found:
        return "null"
    return json.dumps(
        [
            {
                token: {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.decoded_token}
                for token, each in position.items()
            }
            for position in found
        ]
    )


def _images(encoded: Sequence[bytes]) -> list[Any]:
    from PIL import Image

    found = []
    for each in encoded:
        try:
            found.append(Image.open(io.BytesIO(base64.b64decode(each, validate=True))).convert("RGB"))
        except (binascii.Error, OSError, ValueError) as error:
            raise ValueError(f"input 'image' must be images in base64: {error}") from None
    return found


def error_code(error: Exception) -> int:
    """Triton's code of an error of a request."""
    client = isinstance(error, ValueError) or any(
        each.__name__ == "VLLMClientError" for each in type(error).__mro__
    )
    code: int = pb_utils.TritonError.INVALID_ARG if client else pb_utils.TritonError.INTERNAL
    return code
