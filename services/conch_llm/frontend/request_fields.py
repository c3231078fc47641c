"""The fields of requests: a table of type, range and message for each route.

Unknown fields are ignored, as by OpenAI's other servers, and so are those of OpenAI that concern its own
service (``store``, ``metadata``, ``service_tier``). A field that is null is as one that is not there.

Every list and text that is worked on has a bound: docs/llm.md lists them. Long lists of token ids come as
arrays of numbers, see `large_bodies`.

Threads and locks: those of long bodies are checked on a thread of the parsing pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from conch.frontends.yield_gil import yield_gil
from conch_llm.contract import MOST_DETOKENIZED, MOST_TOKENIZED
from conch_llm.frontend.openai_errors import RequestError

Check = Callable[[str, Any], Any]
"""Takes the name and the value of a field; returns the value to use, or raises RequestError."""

MOST_CHOICES = 128
MOST_NAME_BYTES = 1024
_MOST_INPUTS = 2048
_MOST_STOPS = 4
_MOST_STOP = 1024
_MOST_MESSAGES = 4096
_MOST_TOOLS = 128
_MOST_WORDS = 128
_MOST_BIASES = 1024
_MOST_ALLOWED = 1 << 14
_MOST_TEXT = 1 << 22
_MOST_OBJECT = 1 << 16
_MOST_TOOLS_SIZE = 1 << 18
_BETWEEN = 1024  # checked before other threads run; a short body has less
_INT32 = 2**31 - 1
_UINT64 = 2**64 - 1


def wrong(name: str, wanted: str, value: Any) -> RequestError:
    """The error for a field of the wrong type or out of range."""
    return RequestError(f"`{name}` must be {wanted}, got {_shown(value)}", name)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f"'{value}'" if len(value) <= 40 else "a longer text"
    if isinstance(value, int | float):
        return str(value)
    return "a list" if isinstance(value, list | np.ndarray) else "an object"


def _size(value: Any, most: int) -> int:
    """Characters and values of an object, about as long as its JSON; counts no further than `most`."""
    size, left = 0, [value]
    while left and size <= most:
        each = left.pop()
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, dict):
            size += sum(map(len, each)) + len(each)
            left += each.values()
        elif isinstance(each, list):
            size += len(each)
            if size <= most:
                left += each
        size += 1
    return size


def _bounded(check: Check, most: int = _MOST_OBJECT) -> Check:
    """A check of an object whose size is limited, too."""

    def check_size(name: str, value: Any) -> Any:
        if _size(value, most) > most:
            raise RequestError(f"`{name}` must have at most {most} characters and values", name)
        return check(name, value)

    return check_size


def _short(most: int) -> Check:
    def check(name: str, value: Any) -> str:
        if len(_text(name, value)) > most:
            raise wrong(name, f"a text of at most {most} characters", value)
        return str(value)

    return check


def _model(name: str, value: Any) -> str:
    found = _some_text(name, value)
    if len(found) > MOST_NAME_BYTES or len(found.encode(errors="replace")) > MOST_NAME_BYTES:
        raise wrong(name, f"a name of at most {MOST_NAME_BYTES} bytes", value)
    return found


def _biases(name: str, value: Any) -> dict[str, Any]:
    if len(_object(name, value)) > _MOST_BIASES:
        raise wrong(name, f"an object of at most {_MOST_BIASES} tokens", value)
    return dict(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(name, "a text", value)
    return value


def _some_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise wrong(name, "a text that is not empty", value)
    return value


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    return value


def _whole(least: int, most: int) -> Check:
    limits = f"a whole number from {least} to {most}"
    if most == _INT32:
        limits = f"a whole number of at least {least}"

    def check(name: str, value: Any) -> int:
        if isinstance(value, np.int64) or (isinstance(value, float) and value.is_integer()):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise wrong(name, limits, value)
        return value

    return check


def _number(least: float, most: float, above: bool = False) -> Check:
    limits = f"a number from {least:g} to {most:g}" if math.isfinite(most) else f"a number above {least:g}"

    def check(name: str, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= value <= most or (above and value == least):
            raise wrong(name, limits, value)
        return float(value)

    return check


def _list_of(check: Check, what: str, most: int = 4096) -> Check:
    def check_list(name: str, value: Any) -> list[Any]:
        if not isinstance(value, list | np.ndarray) or len(value) > most:
            raise wrong(name, f"a list of at most {most} {what}", value)
        return [check(f"{name}[{index}]", each) for index, each in enumerate(value)]

    return check_list


def _stop(name: str, value: Any) -> list[str]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or len(given) > _MOST_STOPS:
        raise wrong(name, f"a text or a list of at most {_MOST_STOPS} texts", value)
    if not all(isinstance(each, str) and 0 < len(each) <= _MOST_STOP for each in given):
        limits = f"none of them empty or longer than {_MOST_STOP} characters"
        raise wrong(name, f"a text or a list of at most {_MOST_STOPS} texts, {limits}", value)
    return given


def _stream_options(name: str, value: Any) -> dict[str, Any]:
    for option in ("include_usage", "continuous_usage_stats"):
        if _object(name, value).get(option) is not None:
            _switch(f"{name}.{option}", value[option])
    return dict(value)


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise wrong(name, "a list with a message at least", value)
    _check_count(name, len(value))
    parts = 0
    for index, message in enumerate(value):
        if index % _BETWEEN == _BETWEEN - 1:
            yield_gil()
        at = f"{name}[{index}]"
        role = _object(at, message).get("role")
        if role not in _ROLES:
            raise wrong(f"{at}.role", f"one of {', '.join(_ROLES)}", role)
        calls = message.get("tool_calls")
        parts += sum(len(each) for each in (calls, message.get("content")) if isinstance(each, list))
        _check_count(name, parts)
        _content(at, message)
        if calls is not None:
            _list_of(_tool_call, "tool calls")(f"{at}.tool_calls", calls)
    return value


def _check_count(name: str, count: int) -> None:
    if count > _MOST_MESSAGES:
        most = (
            f"`{name}` must have at most {_MOST_MESSAGES} messages, and as many parts and tool calls in all"
        )
        raise RequestError(f"{most}, got {count}", name)


def _content(at: str, message: Mapping[str, Any]) -> None:
    content, name = message.get("content"), f"{at}.content"
    if content is None and message["role"] == "assistant":
        return
    if not isinstance(content, str | list):
        raise wrong(name, "a text or a list of parts", content)
    if isinstance(content, list):
        for index, part in enumerate(content):
            kind = _object(f"{name}[{index}]", part).get("type")
            _text(f"{name}[{index}].type", kind)
            if kind == "text":
                _text(f"{name}[{index}].text", part.get("text"))


def _tool_call(name: str, value: Any) -> Any:
    function = _object(f"{name}.function", _object(name, value).get("function"))
    _some_text(f"{name}.function.name", function.get("name"))
    return value


def _tool(name: str, value: Any) -> Any:
    kind = _object(name, value).get("type", "function")
    if kind != "function":
        raise wrong(f"{name}.type", "'function'", kind)
    function = _object(f"{name}.function", value.get("function"))
    _some_text(f"{name}.function.name", function.get("name"))
    if function.get("parameters") is not None:
        _object(f"{name}.function.parameters", function["parameters"])
    return value


def _tool_choice(name: str, value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    if not isinstance(value, dict):
        raise wrong(name, "'none', 'auto', 'required' or an object that names a function", value)
    function = _object(f"{name}.function", value.get("function"))
    _some_text(f"{name}.function.name", function.get("name"))
    return value


def _response_format(name: str, value: Any) -> Any:
    kind = _object(name, value).get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise wrong(f"{name}.type", "'text', 'json_object' or 'json_schema'", kind)
    if kind == "json_schema":
        schema = _object(f"{name}.json_schema", value.get("json_schema"))
        _object(f"{name}.json_schema.schema", schema.get("schema"))
    return value


def token_ids(value: Any) -> bool:
    """True if a value is a list of token ids, and not empty."""
    if isinstance(value, np.ndarray):
        return bool(value.min() >= 0 and value.max() <= _INT32)
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        return False
    return bool(min(value) >= 0 and max(value) <= _INT32)


def _prompt(name: str, value: Any) -> list[str | Sequence[int]]:
    """One prompt or several, each a text or token ids; always a list."""
    if isinstance(value, str):
        given: list[Any] = [value]
    elif token_ids(value):
        given = [value]
    else:
        given = value
    if not isinstance(given, list) or not given:
        if isinstance(given, list):
            raise RequestError(f"{name} must be non-empty", name)
        raise wrong(name, "a text, a list of texts, token ids or a list of lists of token ids", value)
    if len(given) > _MOST_INPUTS:
        raise wrong(name, f"a list of at most {_MOST_INPUTS} prompts", value)
    for index, each in enumerate(given):
        if not isinstance(each, str) and not token_ids(each):
            raise wrong(f"{name}[{index}]", "a text or a list of token ids", each)
        if isinstance(each, str) and not each:
            raise RequestError(f"{name} must be non-empty", name)
    return given


def _bounded_prompt(name: str, value: Any) -> list[str | Sequence[int]]:
    """Prompts, or inputs of embeddings: tokenizers take seconds for some megabytes."""
    found = _prompt(name, value)
    _check_length(name, value, found)
    return found


def _check_length(name: str, value: Any, inputs: Sequence[Sequence[object]]) -> None:
    if sum(map(len, inputs)) > _MOST_TEXT:
        raise wrong(name, f"texts of at most {_MOST_TEXT} characters in all", value)


def _documents(name: str, value: Any) -> list[str]:
    """One text or several; always a list. A document of a rerank request may be ``{"text": ...}``."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not given:
        raise wrong(name, "a text or a list of texts", value)
    if len(given) > _MOST_INPUTS:
        raise wrong(name, f"a list of at most {_MOST_INPUTS} texts", value)
    texts = [each.get("text") if isinstance(each, dict) else each for each in given]
    found = [_text(f"{name}[{index}]", each) for index, each in enumerate(texts)]
    _check_length(name, value, found)
    return found


def _one_of(*choices: str) -> Check:
    def check(name: str, value: Any) -> Any:
        if value not in choices:
            raise wrong(name, f"one of {', '.join(choices)}", value)
        return value

    return check


_ENDLESS = math.inf
_SAMPLING: Mapping[str, Check] = {
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "seed": _whole(-(2**63), _UINT64),
    "stop": _stop,
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "n": _whole(1, MOST_CHOICES),
    "user": _short(MOST_NAME_BYTES),
    "top_k": _whole(-1, _INT32),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0, _ENDLESS, above=True),
    "min_tokens": _whole(0, _INT32),
    "ignore_eos": _switch,
    "stop_token_ids": _list_of(_whole(0, _INT32), "token ids"),
    "logit_bias": _biases,
    "skip_special_tokens": _switch,
    "include_stop_str_in_output": _switch,
    "bad_words": _list_of(_short(_MOST_STOP), "texts", _MOST_WORDS),
    "allowed_token_ids": _list_of(_whole(0, _INT32), "token ids", _MOST_ALLOWED),
    "prompt_logprobs": _whole(0, 20),
    "echo": _switch,
    "response_format": _bounded(_response_format),
    "structured_outputs": _bounded(_object),
    "priority": _whole(-_INT32, _INT32),
    "cache_salt": _short(MOST_NAME_BYTES),
    "stream": _switch,
    "stream_options": _stream_options,
}
MODEL: Mapping[str, Check] = {"model": _model}
CHAT_FIELDS: Mapping[str, Check] = {
    **MODEL,
    "messages": _messages,
    **_SAMPLING,
    "max_completion_tokens": _whole(1, _INT32),
    "max_tokens": _whole(1, _INT32),
    "logprobs": _switch,
    "top_logprobs": _whole(0, 20),
    "tools": _bounded(_list_of(_tool, "tools", _MOST_TOOLS), _MOST_TOOLS_SIZE),
    "tool_choice": _tool_choice,
    "parallel_tool_calls": _switch,
    "reasoning_effort": _short(MOST_NAME_BYTES),
    "include_reasoning": _switch,
    "chat_template": _short(_MOST_OBJECT),
    "chat_template_kwargs": _bounded(_object),
    "documents": _bounded(_list_of(_object, "objects"), _MOST_TEXT),
}
COMPLETION_FIELDS: Mapping[str, Check] = {
    **MODEL,
    "prompt": _bounded_prompt,
    **_SAMPLING,
    "max_tokens": _whole(0, _INT32),
    "logprobs": _whole(0, 5),
    "suffix": _text,
    "best_of": _whole(1, MOST_CHOICES),
}
EMBEDDING_FIELDS: Mapping[str, Check] = {
    **MODEL,
    "input": _bounded_prompt,
    "dimensions": _whole(1, _INT32),
    "encoding_format": _one_of("float", "base64"),
    "user": _short(MOST_NAME_BYTES),
}
SCORE_FIELDS: Mapping[str, Check] = {**MODEL, "text_1": _short(_MOST_TEXT), "text_2": _documents}
RERANK_FIELDS: Mapping[str, Check] = {
    **MODEL,
    "query": _short(_MOST_TEXT),
    "documents": _documents,
    "top_n": _whole(0, _INT32),
    "return_documents": _switch,
}
TOKENIZE_FIELDS: Mapping[str, Check] = {
    **MODEL,
    "prompt": _short(MOST_TOKENIZED),
    "add_special_tokens": _switch,
    "return_token_strs": _switch,
}
TOKENIZE_CHAT_FIELDS: Mapping[str, Check] = {
    **MODEL,
    "messages": _messages,
    "tools": _bounded(_list_of(_tool, "tools", _MOST_TOOLS), _MOST_TOOLS_SIZE),
    "chat_template_kwargs": _bounded(_object),
    "add_special_tokens": _switch,
    "return_token_strs": _switch,
}
DETOKENIZE_FIELDS: Mapping[str, Check] = {
    **MODEL,
    "tokens": _list_of(_whole(0, _INT32), "token ids", MOST_DETOKENIZED),
}


def checked(
    body: Mapping[str, Any], table: Mapping[str, Check], required: Sequence[str] = ()
) -> dict[str, Any]:
    """The known fields of a body that are there and not null, with the values to use.

    Raises:
        RequestError: One is missing, of the wrong type or out of range; it names the field.
    """
    found = {}
    for name, check in table.items():
        value = body.get(name)
        if value is not None:
            found[name] = check(name, value)
    for name in required:
        if name not in found:
            raise RequestError(f"`{name}` is missing", name)
    return found


def chat_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a chat. Raises RequestError: one is wrong, or contradicts another."""
    fields = checked(body, CHAT_FIELDS, ("messages",))
    _check_stream(fields)
    if fields.get("top_logprobs") is not None and not fields.get("logprobs"):
        raise RequestError("`top_logprobs` can only be used when `logprobs` is True", "top_logprobs")
    _check_tools(fields)
    return fields


def completion_fields(body: Mapping[str, Any], most_answers: int = MOST_CHOICES) -> dict[str, Any]:
    """The fields of a completion.

    Raises:
        RequestError: One is wrong, or contradicts another, or there are too many prompts and choices.
    """
    fields = checked(body, COMPLETION_FIELDS, ("prompt",))
    _check_stream(fields)
    if fields.get("best_of", fields.get("n", 1)) != fields.get("n", 1):
        raise RequestError("`best_of` is not supported unless it is `n`", "best_of")
    answers = len(fields["prompt"]) * fields.get("n", 1)
    if answers > most_answers:
        raise RequestError(
            f"`prompt` and `n` ask for {answers} answers, and --openai-max-answers allows {most_answers}",
            "prompt",
        )
    if fields.get("max_tokens") == 0 and not fields.get("echo"):
        raise RequestError("`max_tokens` must be at least 1 unless `echo` is true, got 0", "max_tokens")
    return fields


def _check_stream(fields: Mapping[str, Any]) -> None:
    if "stream_options" in fields and not fields.get("stream"):
        raise RequestError("`stream_options` can only be used when `stream` is True", "stream_options")


def _check_tools(fields: Mapping[str, Any]) -> None:
    choice, tools = fields.get("tool_choice"), fields.get("tools", ())
    if choice is None or choice in ("none", "auto"):
        return
    if choice == "required":
        if not tools:
            raise RequestError('"required" tool choice requires `tools` to be provided', "tool_choice")
        return
    name = choice["function"]["name"]
    if all(tool["function"]["name"] != name for tool in tools):
        raise RequestError(f"Tool '{name}' has not been passed in `tools`.", "tool_choice")
