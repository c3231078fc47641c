"""The request to a text model: tensors and parameters from a prompt and the fields of a body. Pure.

Form A is vLLM's: an input `sampling_parameters` takes the fields as JSON. In form B each field has an input
of its own, under one of a few names, in the datatype and shape of the config. What has no input becomes a
request parameter, except for what may not be ignored silently: schemas, log probabilities and biases are
refused then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conch.core.request import Parameter
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import NUMPY_DTYPES, Tensor, brain_floats
from conch.frontends.http.generate.generate_request import shape_for
from conch_llm.calls.generation import FieldError, GenerationCall
from conch_llm.contract import ADAPTER, CHAT

SAMPLING = "sampling_parameters"
_INT32 = 2**31 - 1  # the largest token id
LOGPROBS = "logprobs"
_IMAGE = "image"
_RETURNS = ("return_num_input_tokens", "return_num_output_tokens", "return_finish_reason")
_RETURN_LOGPROBS = "return_logprobs"
_EXCLUDES = ("exclude_input_in_output", "sampling_param_exclude_input_from_output")
_STREAMS = ("stream", "streaming")
_GUIDE_TYPE = "guided_decoding_guide_type"
_GUIDE = "guided_decoding_guide"
_NAMES: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_new_tokens", "request_output_len"),
    "top_p": ("runtime_top_p",),
    "top_k": ("runtime_top_k",),
    "seed": ("random_seed",),
    "stop": ("stop_words",),
}
"""Further names of inputs, beside the field's own and ``sampling_param_`` before it."""
_SAMPLED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "bad_words",
    "allowed_token_ids",
)
_STRICT = ("logit_bias",)  # refused without an input
_GUIDES = {
    "json": "json_schema",
    "json_object": "json",
    "regex": "regex",
    "grammar": "ebnf_grammar",
    "structural_tag": "structural_tag",
}


@dataclass(slots=True)
class TextRequest:
    """Inputs and parameters for a text model."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)


def tensor_of(spec: ModelSpec, rule: TensorSpec, values: Any, param: str) -> Tensor:
    """Values as a tensor of an input, of one row if the model batches.

    Args:
        spec: The model.
        rule: The input.
        values: The values: a sequence, or an array of token ids.
        param: Name of the request's field, for errors.

    Raises:
        FieldError: They do not fit.
    """
    batches = spec.max_batch_size > 0 and not rule.is_shape
    shape = shape_for(len(values), rule.dims)
    if shape is None:
        dims = list(rule.dims)
        raise FieldError(
            f"`{param}` does not fit input '{rule.name}' of model '{spec.name}', which has dims {dims}", param
        )
    if batches:
        shape = (1, *shape)
    if rule.datatype == "BYTES":
        array = np.empty(len(values), object)
        array[:] = [_bytes(value) for value in values]
        return Tensor(rule.name, "BYTES", shape, None, array.reshape(shape))
    try:
        if rule.datatype == "BF16":
            return Tensor(rule.name, "BF16", shape, brain_floats(np.array(values, np.float32)))
        dtype = NUMPY_DTYPES[rule.datatype]
        if dtype.kind in "iu" and not (isinstance(values, np.ndarray) and _holds_ids(dtype)):
            values = [_whole(value) for value in values]
        array = np.asarray(values, dtype)
    except (ValueError, TypeError, OverflowError):
        raise FieldError(
            f"`{param}` does not fit input '{rule.name}' of model '{spec.name}', which is {rule.datatype}",
            param,
        ) from None
    return Tensor(rule.name, rule.datatype, shape, None, array.reshape(shape))


def _whole(value: Any) -> int:
    if int(value) != value:
        raise ValueError
    return int(value)


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else json.dumps(value).encode()


def text_request(
    spec: ModelSpec, prompt_input: str, call: GenerationCall, prompt: str | bytes | Sequence[int], choice: int
) -> TextRequest:
    """The request for one choice of one prompt.

    Args:
        spec: The model.
        prompt_input: The input for the prompt.
        call: The chat or completion.
        prompt: The prompt; a text also in UTF-8, which all choices share.
        choice: Index of the choice among those of the prompt.

    Raises:
        FieldError: The model can't take a field.
        InvalidArgumentError: Nothing fills a required input.
    """
    mapper = _Mapper(spec, call)
    mapper.prompt(prompt_input, prompt)
    if SAMPLING in mapper.rules:
        mapper.as_json(choice)
    else:
        mapper.one_by_one(choice)
    mapper.common()
    for rule in spec.inputs:
        if not rule.optional and rule.name not in mapper.made.inputs:
            raise FieldError(
                f"model '{spec.name}' has a required input '{rule.name}', which no field of the request "
                "fills: make it optional in the model's config",
                rule.name,
            )
    return mapper.made


def coded_prompt(spec: ModelSpec, prompt_input: str, prompt: Any) -> Any:
    """A prompt whose memory all its choices share: a text in UTF-8, or an array of the input's numbers."""
    if isinstance(prompt, str):
        return prompt.encode()
    (rule,) = [each for each in spec.inputs if each.name == prompt_input]
    dtype = NUMPY_DTYPES.get(rule.datatype)
    if isinstance(prompt, np.ndarray) and dtype is not None and _holds_ids(np.dtype(dtype)):
        prompt = prompt.astype(dtype)
        prompt.flags.writeable = False
    return prompt


def _holds_ids(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iu" and np.iinfo(dtype).max >= _INT32


def logprobs_wanted(call: GenerationCall) -> int | None:
    """Number of alternatives of each token that a request asks for; None for no log probabilities."""
    given = call.fields.get("logprobs")
    if call.route == CHAT:
        return int(call.fields.get("top_logprobs") or 0) if given else None
    return None if given is None else int(given)


class _Mapper:
    def __init__(self, spec: ModelSpec, call: GenerationCall) -> None:
        self.made = TextRequest()
        self.rules = {rule.name: rule for rule in spec.inputs}
        self._spec = spec
        self._call = call
        fields = call.fields
        self._logprobs = logprobs_wanted(call)
        if self._logprobs is not None:
            if all(tensor.name != LOGPROBS for tensor in spec.outputs):
                raise FieldError(
                    f"`logprobs` can't be used: model '{spec.name}' has no output '{LOGPROBS}'", "logprobs"
                )
            if fields.get("echo"):
                raise FieldError(
                    f"`logprobs` can't be used with `echo`: model '{spec.name}' has none of the prompt",
                    "echo",
                )
        if fields.get("prompt_logprobs") is not None:
            raise FieldError(
                f"`prompt_logprobs` can't be used: model '{spec.name}' has none", "prompt_logprobs"
            )
        self._guide = _structured(fields)

    def prompt(self, name: str, prompt: str | bytes | Sequence[int]) -> None:
        rule = self.rules[name]
        if rule.datatype == "BYTES" and not isinstance(prompt, str | bytes):
            raise FieldError(f"`prompt` must be text: model '{self._spec.name}' takes no token ids", "prompt")
        self._set(rule, [prompt] if isinstance(prompt, str | bytes) else prompt, "prompt")

    def as_json(self, choice: int) -> None:
        fields = self._call.fields
        found = {name: fields[name] for name in (*_SAMPLED, *_STRICT) if name in fields}
        if self._call.max_tokens is not None:
            found["max_tokens"] = self._call.max_tokens
        if "seed" in fields:
            found["seed"] = fields["seed"] + choice
        if self._logprobs is not None:
            found["logprobs"] = (self._logprobs or 1) if self._call.route == CHAT else self._logprobs
        if self._guide is not None:
            _, kind, value = self._guide
            found["structured_outputs"] = json.dumps({kind: value})
        if self._call.adapter:
            found[ADAPTER] = self._call.adapter
        self._set(self.rules[SAMPLING], [json.dumps(found)], SAMPLING)

    def one_by_one(self, choice: int) -> None:
        fields, call = self._call.fields, self._call
        values = {name: fields[name] for name in _SAMPLED if name in fields}
        if call.max_tokens is not None:
            values["max_tokens"] = call.max_tokens
        if "seed" in fields:
            values["seed"] = fields["seed"] + choice
        if self._logprobs is not None:
            values["logprobs"] = self._logprobs
        for name, value in values.items():
            self._field(name, value)
        for name in _STRICT:
            if name in fields:
                self._need(name, name)
                self._field(name, fields[name])
        if self._guide is not None:
            self._guided(*self._guide)
        if call.adapter:
            if ADAPTER in self.rules:
                self._set(self.rules[ADAPTER], [call.adapter], "model")
            else:
                self.made.parameters[ADAPTER] = call.adapter

    def common(self) -> None:
        """Fills what both forms have."""
        streams = bool(self._call.fields.get("stream")) and self._spec.decoupled
        flags: dict[str, bool] = dict.fromkeys((*_RETURNS, *_EXCLUDES), True)
        flags |= dict.fromkeys(_STREAMS, streams)
        flags[_RETURN_LOGPROBS] = self._logprobs is not None
        for name, value in flags.items():
            rule = self.rules.get(name)
            if rule is not None and name not in self.made.inputs:
                self._set(rule, [value], name)
        images = _images(self._call.fields.get("messages", ()))
        if images:
            self._need(_IMAGE, "messages")
            self._set(self.rules[_IMAGE], images, "messages")

    def _guided(self, param: str, kind: str, value: Any) -> None:
        guide = _GUIDES.get(kind)
        if guide is None or _GUIDE_TYPE not in self.rules:
            raise self._lacking(param)
        self._set(self.rules[_GUIDE_TYPE], [guide], param)
        if kind != "json_object":
            self._need(_GUIDE, param)
            self._set(self.rules[_GUIDE], [value if isinstance(value, str) else json.dumps(value)], param)

    def _field(self, name: str, value: Any) -> None:
        for each in (name, *_NAMES.get(name, ()), f"sampling_param_{name}"):
            rule = self.rules.get(each)
            if rule is None or each in self.made.inputs:
                continue
            if name == "seed" and rule.datatype == "UINT64":
                value %= 1 << 64
            listed = isinstance(value, list) and not (
                rule.datatype == "BYTES" and name not in ("stop", "bad_words")
            )
            values = value if listed else [value]
            if name == "stop" and rule.optional and shape_for(len(values), rule.dims) is None:
                return  # the front end cuts at stop strings itself
            self._set(rule, values, name)
            return
        self.made.parameters[name] = json.dumps(value) if isinstance(value, list | dict) else value

    def _need(self, name: str, param: str) -> None:
        if name not in self.rules:
            raise self._lacking(param)

    def _lacking(self, param: str) -> FieldError:
        return FieldError(f"`{param}` can't be used: model '{self._spec.name}' has no input for it", param)

    def _set(self, rule: TensorSpec, values: Sequence[Any], param: str) -> None:
        self.made.inputs[rule.name] = tensor_of(self._spec, rule, values, param)


def _structured(fields: Mapping[str, Any]) -> tuple[str, str, Any] | None:
    """The field that constrains the answer, the kind as vLLM names it, and its value; None for none."""
    given = fields.get("structured_outputs")
    form = fields.get("response_format", {"type": "text"})
    if given is not None:
        if form["type"] != "text":
            raise FieldError(
                "`structured_outputs` can't be used with `response_format`", "structured_outputs"
            )
        kinds = {
            kind: value for kind, value in given.items() if kind in (*_GUIDES, "choice") and value is not None
        }
        if len(kinds) != 1:
            known = ", ".join((*_GUIDES, "choice"))
            raise FieldError(f"`structured_outputs` must have one of {known}", "structured_outputs")
        ((kind, value),) = kinds.items()
        return "structured_outputs", kind, value
    if form["type"] == "json_object":
        return "response_format", "json_object", True
    if form["type"] == "json_schema":
        return "response_format", "json", form["json_schema"]["schema"]
    return None


def _images(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The pictures of messages in base64."""
    found = []
    for index, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") != "image_url":
                if part.get("type") != "text":
                    raise FieldError(
                        f"only text and images are supported, but got {part.get('type')}", "messages"
                    )
                continue
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, dict) else image
            head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
            if not (comma and head.startswith("data:") and head.endswith(";base64")):
                raise FieldError(
                    f"messages[{index}].content: a picture must be a data: URL in base64",
                    f"messages[{index}].content",
                )
            found.append(data)
    return found
