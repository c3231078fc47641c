"""Anthropic's Messages API: a request as a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from conch_llm.frontend.dialects.conversation import Conversation, Part, image_part, text_part
from conch_llm.frontend.dialects.field_table import (
    Copied,
    FieldTable,
    Only,
    Read,
    Refused,
    check_only,
    checked_body,
    further_fields,
    list_of,
    members,
    refused,
    text_of,
)
from conch_llm.frontend.openai_answers import encoded
from conch_llm.frontend.openai_errors import RequestError
from conch_llm.frontend.request_fields import CHAT_FIELDS, wrong

_ITS_OWN = "the server has no tools of its own, only those that clients run"

_COUNTED: FieldTable = {
    "model": Read(),
    "messages": Read(),
    "cache_control": Read(),
    "context_management": Read(),
    "output_config": Read(),
    "system": Read(),
    "thinking": Read(),
    "tool_choice": Read(),
    "tools": Read(),
    "speed": Only(("standard",), "models have one speed"),
}
COUNT_FIELDS: Final[FieldTable] = {**_COUNTED, "chat_template_kwargs": Copied("chat_template_kwargs")}
"""Every field of the counting of tokens."""
FIELDS: Final[FieldTable] = {
    **further_fields(),
    **_COUNTED,
    "metadata": Read(),
    "max_tokens": Copied("max_completion_tokens"),
    "stop_sequences": Copied("stop"),
    "stream": Copied("stream"),
    "temperature": Copied("temperature"),
    "top_k": Copied("top_k"),
    "top_p": Copied("top_p"),
    "service_tier": Only(("auto", "standard_only"), "there are no tiers"),
    "container": Refused("the server runs no programs"),
    "diagnostics": Refused("engines do not tell why a prefix is not cached"),
    "inference_geo": Refused("models run where the server is"),
    "mcp_servers": Refused(_ITS_OWN),
    "stop": Refused("the field is `stop_sequences`"),
}
"""Every field of the API, and those that chats have beside it."""
NAMES: Final[Mapping[str, str]] = {
    "max_completion_tokens": "max_tokens",
    "messages": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "user": "metadata.user_id",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Fields of chats by the API's names, for errors."""

_CACHE = "cache_control"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TOOL = ("type", "name", "description", "input_schema", "strict", _CACHE, "eager_input_streaming")
_TOOL_LIMITS = {
    "defer_loading": Only((False,), "all tools are shown to the model"),
    "allowed_callers": Only((["direct"],), "the server runs no programs"),
}
_KEEPS_THINKING: Mapping[str, Any] = {"type": "clear_thinking_20251015", "keep": "all"}
_CALLED = {"caller": Only(({"type": "direct"},), "the server runs no programs")}
_FORMATS = Only(("json_schema",), "answers are free text without a format")
_ROLES = ("user", "assistant", "system")


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A request as a chat.

    Attributes:
        chat: The body of the chat.
        stops: Texts that end the answer.
        hides_thinking: True if the client wants no thinking in the answer.
    """

    chat: dict[str, Any]
    stops: Sequence[str]
    hides_thinking: bool


def messages_request(body: Mapping[str, Any]) -> MessagesRequest:
    """Translates a request.

    Raises:
        RequestError: A field is missing, wrong or can't be held; it names the field.
    """
    chat, given = checked_body("/v1/messages", body, FIELDS)
    if "max_tokens" not in given:
        raise RequestError("`max_tokens` is missing", "max_tokens")
    hides = _translate(given, chat)
    user = members("metadata", given.get("metadata", {}), ("user_id",)).get("user_id")
    if user is not None:
        chat["user"] = CHAT_FIELDS["user"]("metadata.user_id", user)
    return MessagesRequest(chat, chat.get("stop", ()), hides)


def count_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Translates a request for the number of tokens to the body of the chat that it would be.

    Raises:
        RequestError: A field is missing, wrong or can't be held; it names the field.
    """
    chat, given = checked_body("/v1/messages/count_tokens", body, COUNT_FIELDS)
    _translate(given, chat)
    return chat


def _translate(given: Mapping[str, Any], chat: dict[str, Any]) -> bool:
    """Reads the fields of both routes; returns True if thinking is hidden."""
    if "messages" not in given:
        raise RequestError("`messages` is missing", "messages")
    _check_cache("cache_control", given)
    chat |= {"model": given.get("model"), "messages": _messages(given)}
    _read_context(given)
    _read_tools(given, chat)
    _read_output(given, chat)
    return _read_thinking(given, chat)


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    conversation = Conversation()
    if "system" in given:
        conversation.say("system", _texts("system", given["system"]))
    turns = list_of("messages", given["messages"])
    if not turns:
        raise wrong("messages", "a list with a message at least", turns)
    role = None
    for number, each in enumerate(turns):
        at = f"messages[{number}]"
        message = members(at, each, ("role", "content"))
        role = message.get("role")
        if role not in _ROLES:
            raise wrong(f"{at}.role", f"one of {', '.join(_ROLES)}", role)
        content = message.get("content")
        if isinstance(content, str):
            content = [text_part(content)]
        blocks = list_of(f"{at}.content", content)
        if role == "assistant":
            _read_answer(at, blocks, conversation)
        elif role == "system":
            conversation.say("system", _texts(f"{at}.content", blocks))
        else:
            _read_turn(at, blocks, conversation)
    if role == "assistant":
        last = f"messages[{len(turns) - 1}].role"
        raise refused(last, "an answer that is begun can't be continued; end with a user")
    return conversation.messages()


def _texts(at: str, given: Any) -> list[Part]:
    if isinstance(given, str):
        return [text_part(given)]
    return [_text(f"{at}[{number}]", block) for number, block in enumerate(list_of(at, given))]


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _text(at: str, block: Any) -> Part:
    found = members(at, block, ("type", "text", _CACHE), {"citations": Only(([],), "answers have none")})
    if found.get("type") != "text":
        raise refused(f"{at}.type", "only text can be here")
    return text_part(text_of(f"{at}.text", found.get("text")))


def _part(at: str, block: Any) -> Part:
    """A part of a user's message or of a result: text or a picture."""
    kind = _kind(block)
    if kind == "text":
        return _text(at, block)
    if kind != "image":
        if isinstance(block, dict):
            raise refused(f"{at}.type", f"blocks are text and pictures here, got {_named(kind)}")
        raise wrong(at, "an object", block)
    source = members(at, block, ("type", "source", _CACHE)).get("source")
    at = f"{at}.source"
    if _kind(source) == "url":
        return image_part(text_of(f"{at}.url", members(at, source, ("type", "url")).get("url")))
    if _kind(source) != "base64":
        raise refused(f"{at}.type", "pictures come in 'base64' or by a 'url'")
    found = members(at, source, ("type", "media_type", "data"))
    media, data = (text_of(f"{at}.{key}", found.get(key)) for key in ("media_type", "data"))
    return image_part(f"data:{media};base64,{data}")


def _named(kind: Any) -> str:
    return f"'{kind[:64]}'" if isinstance(kind, str) else "no text"


def _read_turn(at: str, blocks: list[Any], conversation: Conversation) -> None:
    """Reads a user's message: each result of a tool is a message of its own."""
    parts: list[Part] = []
    for number, block in enumerate(blocks):
        where = f"{at}.content[{number}]"
        if _kind(block) != "tool_result":
            parts.append(_part(where, block))
            continue
        if parts:
            conversation.say("user", parts)
            parts = []
        found = members(where, block, ("type", "tool_use_id", "content", "is_error", _CACHE))
        content = found.get("content", [])
        if isinstance(content, str):
            content = [text_part(content)]
        result = [
            _part(f"{where}.content[{place}]", each)
            for place, each in enumerate(list_of(f"{where}.content", content))
        ]
        if CHAT_FIELDS["stream"](f"{where}.is_error", found.get("is_error", False)):
            result.insert(0, text_part("Error:"))  # a chat has no other place for it
        conversation.say(
            "tool", result, tool_call_id=text_of(f"{where}.tool_use_id", found.get("tool_use_id"))
        )
    if parts or not blocks:
        conversation.say("user", parts)


def _read_answer(at: str, blocks: list[Any], conversation: Conversation) -> None:
    """Reads a message of the assistant."""
    if not blocks:
        conversation.reply([])
    for number, block in enumerate(blocks):
        where = f"{at}.content[{number}]"
        kind = _kind(block)
        if kind == "tool_use":
            found = members(where, block, ("type", "id", "name", "input", _CACHE), _CALLED)
            call_id, name = (text_of(f"{where}.{key}", found.get(key)) for key in ("id", "name"))
            arguments = found.get("input", {})
            if not isinstance(arguments, dict):
                raise wrong(f"{where}.input", "an object", arguments)
            conversation.call(call_id, name, encoded(arguments).decode())
        elif kind == "thinking":
            found = members(where, block, ("type", "thinking", "signature"))
            conversation.think(text_of(f"{where}.thinking", found.get("thinking")))
        else:
            conversation.reply([_text(where, block)])


def _read_tools(given: Mapping[str, Any], chat: dict[str, Any]) -> None:
    tools = list_of("tools", given.get("tools", []))
    if tools:
        chat["tools"] = [_tool(f"tools[{number}]", each) for number, each in enumerate(tools)]
    if "tool_choice" not in given:
        return
    choice = members("tool_choice", given["tool_choice"], ("type", "name", "disable_parallel_tool_use"))
    kind = choice.get("type")
    if kind == "tool":
        chosen = text_of("tool_choice.name", choice.get("name"))
        chat["tool_choice"] = {"type": "function", "function": {"name": chosen}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[kind]
    else:
        raise wrong("tool_choice.type", "'auto', 'any', 'tool' or 'none'", kind)
    single = choice.get("disable_parallel_tool_use", False)
    if CHAT_FIELDS["parallel_tool_calls"]("tool_choice.disable_parallel_tool_use", single):
        chat["parallel_tool_calls"] = False


def _tool(at: str, tool: Any) -> dict[str, Any]:
    if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
        raise refused(f"{at}.type", f"{_ITS_OWN}, got {_named(tool['type'])}")
    found = members(at, tool, _TOOL, _TOOL_LIMITS)
    text_of(f"{at}.name", found.get("name"))
    schema = found.get("input_schema")
    if not isinstance(schema, dict):
        raise wrong(f"{at}.input_schema", "an object", schema)
    _check_cache(f"{at}.{_CACHE}", found)
    function = {key: found[key] for key in ("name", "description", "strict") if key in found}
    return {"type": "function", "function": {**function, "parameters": schema}}


def _check_cache(at: str, given: Mapping[str, Any]) -> None:
    """Prefix caches need no marks: those of clients are checked and change nothing."""
    if _CACHE in given:
        members(at, given[_CACHE], ("type", "ttl", "scope"))


def _read_context(given: Mapping[str, Any]) -> None:
    """Lets pass what clients ask for when nothing is to be cut out of a conversation."""
    found = members("context_management", given.get("context_management", {}), ("edits",))
    for number, edit in enumerate(list_of("context_management.edits", found.get("edits", []))):
        if edit != _KEEPS_THINKING:
            raise refused(f"context_management.edits[{number}]", "nothing is cut out of a conversation")


def _read_output(given: Mapping[str, Any], chat: dict[str, Any]) -> None:
    found = members("output_config", given.get("output_config", {}), ("effort", "format"))
    if "effort" in found:
        chat["reasoning_effort"] = CHAT_FIELDS["reasoning_effort"]("output_config.effort", found["effort"])
    if "format" not in found:
        return
    form = members("output_config.format", found["format"], ("type", "schema"))
    check_only("output_config.format.type", form.get("type"), _FORMATS)
    schema = form.get("schema")
    if not isinstance(schema, dict):
        raise wrong("output_config.format.schema", "an object", schema)
    chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _read_thinking(given: Mapping[str, Any], chat: dict[str, Any]) -> bool:
    """Switches the thinking of models whose template has a switch; returns True if it is hidden."""
    if "thinking" not in given:
        return False
    found = members("thinking", given["thinking"], ("type", "budget_tokens", "display"))
    kind, display = found.get("type"), found.get("display", "summarized")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise wrong("thinking.type", "'enabled', 'adaptive' or 'disabled'", kind)
    if display not in ("summarized", "omitted"):
        raise wrong("thinking.display", "'summarized' or 'omitted'", display)
    if "budget_tokens" in found:
        CHAT_FIELDS["max_tokens"]("thinking.budget_tokens", found["budget_tokens"])
    thinks = kind != "disabled"
    chat["chat_template_kwargs"] = {"enable_thinking": thinks, **chat.get("chat_template_kwargs", {})}
    return not thinks or display == "omitted"
