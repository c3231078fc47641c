"""Reads the sampling parameters of a request; what the engine can't do is refused by name."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch_engines.language.field_checks import Range, number, switch, whole
from conch_engines.language.grammars import Grammar, read_grammar
from conch_llm.models.model_requests import ChatRequest, TextRequest


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of an answer.

    Attributes:
        values: Attributes of the engine's `GenerationConfig`.
        grammar: Constraint of the answer; None for none.
        logprobs: True if the answer has log probabilities of its tokens.
        top_logprobs: True if it has those of the most likely tokens, too.
        skip_special_tokens: True if special tokens are left out of the text.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    grammar: Grammar | None = None
    logprobs: bool = False
    top_logprobs: bool = False
    skip_special_tokens: bool = True


_FLOATS = {
    "temperature": Range(0, math.inf),
    "top_p": Range(0, 1, above=True),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, math.inf, above=True),
}
_REFUSED = (
    *("logit_bias", "prompt_logprobs", "bad_words", "allowed_token_ids", "suffix", "use_beam_search"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "truncate_prompt_tokens"),
    *("chat_template", "cache_salt", "continue_final_message", "tool_strict_level"),
)
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GREEDY = 1e-5  # temperatures below are greedy, as in vLLM
_MOST_SEED = 1 << 63


def read_sampling(request: TextRequest, own: Mapping[str, Any]) -> Sampling:
    """Reads a request.

    Args:
        request: The request.
        own: The model's own parameters, which hold where the request has none.

    Raises:
        InvalidArgumentError: A parameter is invalid or not supported.
    """
    _refuse_unsupported(request)
    asked = request.params
    # A sampling model without parameters of its own has OpenAI's: temperature 1.
    own = {name: own[name] for name in _DEFAULTS if own.get(name) is not None}
    params = {**own, **asked}
    values: dict[str, Any] = {}
    for name, limits in _FLOATS.items():
        if params.get(name) is not None:
            values[name] = number(name, params[name], limits)
    top_k = params.get("top_k")
    if top_k is not None and whole("top_k", top_k, -1) > 0:
        values["top_k"] = top_k
    if values.get("temperature", 1.0) < _GREEDY:
        for name in ("temperature", "top_p", "top_k", "min_p"):
            values.pop(name, None)
        values["do_sample"] = False
    else:
        values["do_sample"] = True
        seed = secrets.randbits(62) if request.seed is None else request.seed % _MOST_SEED
        values["rng_seed"] = seed
    values |= _ends(asked)
    logprobs, top_logprobs = _logprobs(request, values["do_sample"])
    if logprobs:
        values["logprobs"] = 1
    grammar = read_grammar(asked)
    if grammar is not None:
        values["ignore_eos"] = False  # behind the end of a grammar the engine goes on with any text
    skips = switch("skip_special_tokens", asked.get("skip_special_tokens"), True)
    return Sampling(values, grammar, logprobs, top_logprobs, skips)


def _refuse_unsupported(request: TextRequest) -> None:
    asked = request.params
    for name in _REFUSED:
        if asked.get(name) not in (None, False, [], {}, "", 0):
            raise InvalidArgumentError(f"{name}: the engine openvino_genai does not support it")
    if asked.get("best_of") not in (None, 1, request.raw.get("n")):
        raise InvalidArgumentError("best_of: the engine openvino_genai supports only n")
    if isinstance(request, ChatRequest) and request.raw.get("echo"):
        raise InvalidArgumentError("echo: is for completions, not for chats")
    if request.lora:
        raise InvalidArgumentError(f"lora_name: the model has no adapter {request.lora!r}")


def _ends(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Config values of the stop conditions, beside the length."""
    values: dict[str, Any] = {}
    if asked.get("min_tokens") is not None:
        values["min_new_tokens"] = whole("min_tokens", asked["min_tokens"], 0)
    values["ignore_eos"] = switch("ignore_eos", asked.get("ignore_eos"), False)
    if stops := asked.get("stop_token_ids"):
        if not isinstance(stops, list) or not all(type(each) is int and each >= 0 for each in stops):
            raise InvalidArgumentError(f"stop_token_ids: must be a list of tokens, not {stops!r}")
        if values["ignore_eos"]:
            raise InvalidArgumentError(
                "stop_token_ids: the engine openvino_genai does not stop at them with ignore_eos"
            )
        values["stop_token_ids"] = set(stops)
    return values


def _logprobs(request: TextRequest, samples: bool) -> tuple[bool, bool]:
    """Values of `Sampling.logprobs` and `Sampling.top_logprobs` for a request."""
    asked = request.params.get("logprobs")
    if asked is None or asked is False:
        return False, False
    name, top = ("top_logprobs", request.params.get("top_logprobs")) if asked is True else ("logprobs", asked)
    count = 0 if top is None else whole(name, top, 0)
    if count > 1:
        raise InvalidArgumentError(f"{name}: the engine openvino_genai supports at most 1, not {count}")
    if count and samples:
        raise InvalidArgumentError(
            f"{name}: the engine openvino_genai has the log probability of the chosen token only: use 0, or "
            f"temperature 0"
        )
    if request.raw.get("echo") is True:
        raise InvalidArgumentError(
            "echo: the engine openvino_genai has no log probabilities of prompts; leave out echo or logprobs"
        )
    return True, bool(count)
