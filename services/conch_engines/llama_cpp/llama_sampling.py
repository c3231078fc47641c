"""Reads the sampling parameters of a request; what the engine can't do is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch_engines.language.field_checks import Range, number, switch, whole
from conch_engines.language.grammars import Grammar, read_grammar
from conch_llm.language.tool_calls import SPECIAL_TOKENS
from conch_llm.models.model_requests import ChatRequest, TextRequest


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of an answer.

    Attributes:
        values: Members of the engine's request.
        grammar: Constraint of the answer; None for none.
        logprobs: Most likely tokens beside each token of the answer; None without log probabilities.
        lora: Name of the LoRA adapter; empty for none.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    grammar: Grammar | None = None
    logprobs: int | None = None
    lora: str = ""


_FLOATS = {
    "temperature": Range(0, math.inf),
    "top_p": Range(0, 1),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, math.inf, above=True),
}
_NAMES = {"repetition_penalty": "repeat_penalty"}
"""Parameters that the engine has by another name."""
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
REFUSED = (
    # vLLM's
    *("prompt_logprobs", "bad_words", "allowed_token_ids", "stop_token_ids", "min_tokens", "suffix"),
    *(
        "use_beam_search",
        "length_penalty",
        "tool_strict_level",
        "truncate_prompt_tokens",
        "chat_template",
        "cache_salt",
    ),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "continue_final_message"),
    *("logits_processors", "return_token_ids", "return_tokens_as_token_ids"),
    # llama.cpp's
    *("mirostat", "typical_p", "tfs_z", "xtc_probability", "dry_multiplier", "dynatemp_range", "samplers"),
    *("n_keep", "id_slot", "cache_prompt", "grammar", "json_schema", "n_probs", "n_predict", "lora"),
    *("reasoning_format", "thinking_forced_open", "t_max_predict_ms", "repeat_penalty", "repeat_last_n"),
)
"""Parameters that change an answer in vLLM or llama.cpp, and that the backend does not take."""
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MOST_LOGPROBS = 20
_TOKEN = re.compile(r"[0-9]{1,9}")
_MOST_SEED = 0xFFFFFFFF
"""The engine takes it as none."""


def read_sampling(request: TextRequest, own: Mapping[str, Any], vocabulary: int, longest: int) -> Sampling:
    """Reads a request.

    Args:
        request: The request.
        own: The model's own parameters, which hold where the request has none.
        vocabulary: Number of the model's tokens.
        longest: Most tokens of a request.

    Raises:
        InvalidArgumentError: A parameter is invalid or not supported.
    """
    asked = request.params
    for name in REFUSED:
        if asked.get(name) not in (None, False, [], {}, "", 0):
            raise InvalidArgumentError(f"{name}: the engine llama_cpp does not support it")
    if asked.get("best_of") not in (None, 1, request.raw.get("n")):
        raise InvalidArgumentError("best_of: the engine llama_cpp supports only n")
    if isinstance(request, ChatRequest) and request.raw.get("echo"):
        raise InvalidArgumentError("echo: is for completions, not for chats")
    if not switch("skip_special_tokens", asked.get("skip_special_tokens"), True):
        raise InvalidArgumentError("skip_special_tokens: the engine llama_cpp leaves them out of the text")
    params = {**{name: own[name] for name in _DEFAULTS if own.get(name) is not None}, **asked}
    values: dict[str, Any] = {}
    for name, limits in _FLOATS.items():
        if params.get(name) is not None:
            values[_NAMES.get(name, name)] = number(name, params[name], limits)
    if any(params.get(name) is not None for name in _PENALTIES):
        values["repeat_last_n"] = longest  # the engine's own are 64 tokens
    if params.get("top_k") is not None:
        values["top_k"] = max(whole("top_k", params["top_k"], -1), 0)
    if request.seed is not None:
        values["seed"] = request.seed % _MOST_SEED
    grammar = read_grammar(asked)
    # Behind the end of a grammar only the token that ends an answer fits: without it the engine fails.
    values["ignore_eos"] = switch("ignore_eos", asked.get("ignore_eos"), False) and grammar is None
    if asked.get("logit_bias"):
        values["logit_bias"] = _biases(asked["logit_bias"], vocabulary)
    if isinstance(request, ChatRequest) and request.tools and asked.get("tool_choice") != "none":
        values["preserved_tokens"] = SPECIAL_TOKENS  # of which the engine leaves others out of the text
    logprobs = _logprobs(request)
    if logprobs is not None:
        values["n_probs"] = max(logprobs, 1)  # without any the engine has none of the chosen token
    return Sampling(values, grammar, logprobs, request.lora)


def _biases(found: Any, vocabulary: int) -> list[list[float]]:
    if not isinstance(found, Mapping):
        raise InvalidArgumentError("logit_bias: must be an object of tokens and numbers")
    biases: list[list[float]] = []
    for key, value in found.items():
        token = int(key) if _TOKEN.fullmatch(str(key)) else -1
        if not 0 <= token < vocabulary:
            raise InvalidArgumentError(f"logit_bias: {key!r} is no token of the model")
        biases.append([token, number(f"logit_bias[{key}]", value, Range(-100, 100))])
    return biases


def _logprobs(request: TextRequest) -> int | None:
    """The value of `Sampling.logprobs` for a request."""
    asked = request.params.get("logprobs")
    if asked is None or asked is False:
        return None
    name, top = ("top_logprobs", request.params.get("top_logprobs")) if asked is True else ("logprobs", asked)
    count = 0 if top is None else whole(name, top, 0)
    if count > _MOST_LOGPROBS:
        raise InvalidArgumentError(f"{name}: must be at most {_MOST_LOGPROBS}, not {count}")
    if request.raw.get("echo") is True:
        raise InvalidArgumentError(
            "echo: the engine llama_cpp has no log probabilities of prompts; leave out echo or logprobs"
        )
    return count
