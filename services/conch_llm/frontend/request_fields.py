"""The fields of requests: a table of type, range and message for each route.

Unknown fields are ignored, as by OpenAI's other servers, and so are those of OpenAI that concern its own
service (``store``, ``metadata``, ``service_tier``). A field that is null is as one that is not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conch_llm.frontend.openai_errors import RequestError

Check = Callable[[str, Any], Any]
"""Takes the name and the value of a field; returns the value to use, or raises RequestError."""

MOST_CHOICES = 128
_MOST_PROMPTS = 2048
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
    return "a list" if isinstance(value, list) else "an object"


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
        if isinstance(value, float) and value.is_integer():
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
        if not isinstance(value, list) or len(value) > most:
            raise wrong(name, f"a list of at most {most} {what}", value)
        return [check(f"{name}[{index}]", each) for index, each in enumerate(value)]

    return check_list


def _stop(name: str, value: Any) -> list[str]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(each, str) and each for each in given):
        raise wrong(name, "a text or a list of texts, none of them empty", value)
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
    for index, message in enumerate(value):
        at = f"{name}[{index}]"
        role = _object(at, message).get("role")
        if role not in _ROLES:
            raise wrong(f"{at}.role", f"one of {', '.join(_ROLES)}", role)
        _content(at, message)
        calls = message.get("tool_calls")
        if calls is not None:
            _list_of(_tool_call, "tool calls")(f"{at}.tool_calls", calls)
    return value


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
    return isinstance(value, list) and bool(value) and all(_is_id(each) for each in value)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _INT32


def _prompt(name: str, value: Any) -> list[str | list[int]]:
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
    if len(given) > _MOST_PROMPTS:
        raise wrong(name, f"a list of at most {_MOST_PROMPTS} prompts", value)
    for index, each in enumerate(given):
        if not isinstance(each, str) and not token_ids(each):
            raise wrong(f"{name}[{index}]", "a text or a list of token ids", each)
        if each == "":
            raise RequestError(f"{name} must be non-empty", name)
    return given


def _documents(name: str, value: Any) -> list[str]:
    """One text or several; always a list. A document of a rerank request may be ``{"text": ...}``."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not given:
        raise wrong(name, "a text or a list of texts", value)
    texts = [each.get("text") if isinstance(each, dict) else each for each in given]
    return [_text(f"{name}[{index}]", each) for index, each in enumerate(texts)]


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
    "user": _text,
    "top_k": _whole(-1, _INT32),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0, _ENDLESS, above=True),
    "min_tokens": _whole(0, _INT32),
    "ignore_eos": _switch,
    "stop_token_ids": _list_of(_whole(0, _INT32), "token ids"),
    "logit_bias": _object,
    "skip_special_tokens": _switch,
    "include_stop_str_in_output": _switch,
    "bad_words": _list_of(_text, "texts"),
    "allowed_token_ids": _list_of(_whole(0, _INT32), "token ids", 1 << 20),
    "prompt_logprobs": _whole(0, 20),
    "echo": _switch,
    "response_format": _response_format,
    "structured_outputs": _object,
    "priority": _whole(-_INT32, _INT32),
    "cache_salt": _text,
    "stream": _switch,
    "stream_options": _stream_options,
}
MODEL: Mapping[str, Check] = {"model": _some_text}
CHAT_FIELDS: Mapping[str, Check] = {
    **MODEL,
    "messages": _messages,
    **_SAMPLING,
    "max_completion_tokens": _whole(1, _INT32),
    "max_tokens": _whole(1, _INT32),
    "logprobs": _switch,
    "top_logprobs": _whole(0, 20),
    "tools": _list_of(_tool, "tools"),
    "tool_choice": _tool_choice,
    "parallel_tool_calls": _switch,
    "reasoning_effort": _text,
    "include_reasoning": _switch,
    "chat_template": _text,
    "chat_template_kwargs": _object,
    "documents": _list_of(_object, "objects"),
}
COMPLETION_FIELDS: Mapping[str, Check] = {
    **MODEL,
    "prompt": _prompt,
    **_SAMPLING,
    "max_tokens": _whole(0, _INT32),
    "logprobs": _whole(0, 5),
    "suffix": _text,
    "best_of": _whole(1, MOST_CHOICES),
}
EMBEDDING_FIELDS: Mapping[str, Check] = {
    **MODEL,
    "input": _prompt,
    "dimensions": _whole(1, _INT32),
    "encoding_format": _one_of("float", "base64"),
    "user": _text,
}
SCORE_FIELDS: Mapping[str, Check] = {**MODEL, "text_1": _text, "text_2": _documents}
RERANK_FIELDS: Mapping[str, Check] = {
    **MODEL,
    "query": _text,
    "documents": _documents,
    "top_n": _whole(0, _INT32),
    "return_documents": _switch,
}
TOKENIZE_FIELDS: Mapping[str, Check] = {
    **MODEL,
    "prompt": _text,
    "add_special_tokens": _switch,
    "return_token_strs": _switch,
}
TOKENIZE_CHAT_FIELDS: Mapping[str, Check] = {
    **MODEL,
    "messages": _messages,
    "tools": _list_of(_tool, "tools"),
    "chat_template_kwargs": _object,
    "add_special_tokens": _switch,
    "return_token_strs": _switch,
}
DETOKENIZE_FIELDS: Mapping[str, Check] = {
    **MODEL,
    "tokens": _list_of(_whole(0, _INT32), "token ids", 1 << 20),
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


def completion_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a completion. Raises RequestError: one is wrong, or contradicts another."""
    fields = checked(body, COMPLETION_FIELDS, ("prompt",))
    _check_stream(fields)
    if fields.get("best_of", fields.get("n", 1)) != fields.get("n", 1):
        raise RequestError("`best_of` is not supported unless it is `n`", "best_of")
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
