"""OpenAI's Responses API: a request as a chat, and what its answer repeats of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from conch_llm.frontend.dialects.conversation import Conversation, Part, image_part, text_part
from conch_llm.frontend.dialects.field_table import (
    Copied,
    FieldTable,
    Noted,
    Only,
    Read,
    Refused,
    check_only,
    checked_body,
    further_fields,
    list_of,
    members,
    metadata,
    refused,
    text_of,
)
from conch_llm.frontend.openai_errors import RequestError
from conch_llm.frontend.request_fields import CHAT_FIELDS, wrong

_SHORT = CHAT_FIELDS["user"]
_MOST_INSTRUCTIONS = 1 << 20  # repeated in events, which the event loop encodes
_ITS_OWN = "the server has function tools only"
_NO_STORE = "conversations and prompts are not kept by the server"

FIELDS: Final[FieldTable] = {
    **further_fields(),
    "model": Read(),
    "input": Read(),
    "instructions": Read(),
    "include": Read(),
    "previous_response_id": Read(),
    "reasoning": Read(),
    "store": Read(),
    "stream_options": Read(),
    "text": Read(),
    "tool_choice": Read(),
    "tools": Read(),
    "max_output_tokens": Copied("max_completion_tokens"),
    "parallel_tool_calls": Copied("parallel_tool_calls"),
    "stream": Copied("stream"),
    "temperature": Copied("temperature"),
    "top_logprobs": Copied("top_logprobs"),
    "top_p": Copied("top_p"),
    "user": Copied("user"),
    "metadata": Noted(metadata),
    "prompt_cache_key": Noted(_SHORT),
    "safety_identifier": Noted(_SHORT),
    "background": Only((False,), "answers are made while the client waits"),
    "prompt_cache_retention": Only(("in_memory",), "prefix caches are in memory"),
    "service_tier": Only(("auto", "default"), "there are no tiers"),
    "truncation": Only(("disabled",), "no item is dropped; a conversation that is too long is an error"),
    "access_programs": Refused("there are none"),
    "background_options": Refused("answers are made while the client waits"),
    "context_management": Refused("conversations are not compacted"),
    "conversation": Refused(_NO_STORE),
    "image": Refused("the server makes no pictures"),
    "max_tool_calls": Refused(_ITS_OWN),
    "moderation": Refused("nothing is moderated"),
    "prompt": Refused(_NO_STORE),
    "prompt_cache_options": Refused("engines have prefix caches of their own, or none"),
}
"""Every field of the API, and those that chats have beside it."""
NAMES: Final[Mapping[str, str]] = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
"""Fields of chats by the API's names, for errors."""

_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")
_TOOL = ("type", "name", "description", "parameters", "strict")
_TOOL_LIMITS = {
    "defer_loading": Only((False,), "all tools are shown to the model"),
    "async": Only((False,), "calls are answered in order"),
    "allowed_callers": Only((["direct"],), "the server runs no programs"),
}
_REASONING_LIMITS = {
    "context": Only(("auto",), "chat templates choose which reasoning a model sees"),
    "generate_summary": Only(("auto",), "the reasoning is given whole, not summarised"),
    "mode": Only(("standard",), "there are no modes"),
    "summary": Only(("auto",), "the reasoning is given whole, not summarised"),
}
_OBFUSCATION = Only((False,), "events are not padded")
_STATUS = ("type", "id", "status")
_MESSAGE = (*_STATUS, "role", "content", "phase")
_ROLES = ("user", "assistant", "system", "developer")
_SYSTEM = ("system", "developer")
_BREAKPOINT = "prompt_cache_breakpoint"


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request as a chat.

    Attributes:
        chat: The body of the chat.
        echoed: Members of the response that repeat the request.
        turns: The conversation without the instructions, which hold for one response only.
        stores: The request's ``store``; None if it has none.
    """

    chat: dict[str, Any]
    echoed: dict[str, Any]
    turns: list[dict[str, Any]]
    stores: bool | None


def responses_request(body: Mapping[str, Any], previous: Sequence[dict[str, Any]] = ()) -> ResponsesRequest:
    """Translates a request.

    Args:
        body: The body of the request.
        previous: Messages of the conversation that it goes on with.

    Raises:
        RequestError: A field is missing, wrong or can't be held; it names the field.
    """
    chat, given = checked_body("/v1/responses", body, FIELDS)
    if "input" not in given:
        raise RequestError("`input` is missing", "input")
    turns = [*previous, *_turns(given["input"])]
    instructions = given.get("instructions")
    if instructions is not None and len(text_of("instructions", instructions)) > _MOST_INSTRUCTIONS:
        raise wrong("instructions", f"a text of at most {_MOST_INSTRUCTIONS} characters", instructions)
    chat |= {"model": given.get("model"), "messages": _with_system(instructions, turns)}
    _read_tools(given, chat)
    _read_include(given, chat)
    reasoning = _read_reasoning(given, chat)
    text = _read_text(given, chat)
    stores = given.get("store")
    if stores is not None:
        CHAT_FIELDS["stream"]("store", stores)
    options = members("stream_options", given.get("stream_options", {}), ("include_obfuscation",))
    check_only("stream_options.include_obfuscation", options.get("include_obfuscation", False), _OBFUSCATION)
    echoed = {
        "instructions": instructions,
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": given.get("metadata", {}),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "previous_response_id": given.get("previous_response_id"),
        "reasoning": reasoning,
        "temperature": given.get("temperature"),
        "text": text,
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_logprobs": given.get("top_logprobs", 0),
        "top_p": given.get("top_p"),
        "truncation": "disabled",
        "background": False,
        "prompt_cache_key": given.get("prompt_cache_key"),
        "safety_identifier": given.get("safety_identifier"),
        "service_tier": "default",
        "user": given.get("user"),
    }
    return ResponsesRequest(chat, echoed, turns, stores)


def turns_of(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of items that the server has made."""
    conversation = Conversation()
    for item in items:
        _read_item("input", item, conversation)
    return conversation.messages()


def _turns(given: Any) -> list[dict[str, Any]]:
    conversation = Conversation()
    if isinstance(given, str):
        conversation.say("user", [text_part(given)])
    elif isinstance(given, list) and given:
        for number, item in enumerate(given):
            _read_item(f"input[{number}]", item, conversation)
    else:
        raise wrong("input", "a text or a list with an item at least", given)
    return conversation.messages()


def _with_system(instructions: str | None, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the instructions and those of the system at the start as one: templates know one."""
    texts = [] if instructions is None else [instructions]
    behind = 0
    for message in turns:
        if message["role"] != "system" or not isinstance(message["content"], str):
            break
        texts.append(message["content"])
        behind += 1
    if not texts:
        return turns
    return [{"role": "system", "content": "\n\n".join(texts)}, *turns[behind:]]


def _read_item(at: str, item: Any, conversation: Conversation) -> None:
    if not isinstance(item, dict):
        raise wrong(at, "an object", item)
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        _read_message(at, members(at, item, _MESSAGE), conversation)
    elif kind == "function_call":
        found = members(at, item, (*_STATUS, "call_id", "name", "arguments"))
        call_id, name, arguments = (
            text_of(f"{at}.{key}", found.get(key)) for key in ("call_id", "name", "arguments")
        )
        conversation.call(call_id, name, arguments)
    elif kind == "function_call_output":
        found = members(at, item, (*_STATUS, "call_id", "output", "name"))
        parts = _parts(f"{at}.output", found.get("output"))
        conversation.say("tool", parts, tool_call_id=text_of(f"{at}.call_id", found.get("call_id")))
    elif kind == "reasoning":
        _read_thought(
            at, members(at, item, (*_STATUS, "summary", "content", "encrypted_content")), conversation
        )
    else:
        raise refused(
            f"{at}.type",
            f"items are messages, reasoning, function calls and their outputs, got {_named(kind)}",
        )


def _named(kind: Any) -> str:
    return f"'{kind[:64]}'" if isinstance(kind, str) else "no text"


def _read_message(at: str, item: Mapping[str, Any], conversation: Conversation) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise wrong(f"{at}.role", f"one of {', '.join(_ROLES)}", role)
    parts = _parts(f"{at}.content", item.get("content"))
    if role == "assistant":
        conversation.reply(parts)
    else:  # few templates know developers
        conversation.say("system" if role in _SYSTEM else role, parts)


def _read_thought(at: str, item: Mapping[str, Any], conversation: Conversation) -> None:
    """Reads reasoning: its text, or else its summary."""
    if item.get("encrypted_content"):
        raise refused(f"{at}.encrypted_content", "the server can't read what another has encrypted")
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = list_of(f"{at}.{name}", item.get(name, []))
        for number, part in enumerate(parts):
            where = f"{at}.{name}[{number}]"
            found = members(where, part, ("type", "text"))
            if found.get("type") != kind:
                raise wrong(f"{where}.type", f"'{kind}'", found.get("type"))
            conversation.think(text_of(f"{where}.text", found.get("text")))
        if parts:
            return


def _parts(at: str, content: Any) -> list[Part]:
    if isinstance(content, str):
        return [text_part(content)]
    if not isinstance(content, list):
        raise wrong(at, "a text or a list of parts", content)
    return [_part(f"{at}[{number}]", part) for number, part in enumerate(content)]


def _part(at: str, part: Any) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text"):
        known = ("type", "text", "annotations", "logprobs", _BREAKPOINT)
        return text_part(text_of(f"{at}.text", members(at, part, known).get("text")))
    if kind == "refusal":
        return text_part(text_of(f"{at}.refusal", members(at, part, ("type", "refusal")).get("refusal")))
    if kind == "input_image":
        found = members(at, part, ("type", "image_url", "detail", _BREAKPOINT))
        more = {"detail": found["detail"]} if "detail" in found else {}
        return image_part(text_of(f"{at}.image_url", found.get("image_url")), **more)
    if isinstance(part, dict):
        raise refused(f"{at}.type", f"parts are text and pictures, got {_named(kind)}")
    raise wrong(at, "an object", part)


def _read_tools(given: Mapping[str, Any], chat: dict[str, Any]) -> None:
    tools = [
        _tool(f"tools[{number}]", each)
        for number, each in enumerate(list_of("tools", given.get("tools", [])))
    ]
    choice = given.get("tool_choice")
    if choice is not None:
        chat["tool_choice"] = _choice(choice, tools)
    if tools:
        chat["tools"] = tools


def _tool(at: str, tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(tool, dict) and kind != "function":
        raise refused(f"{at}.type", f"{_ITS_OWN}, got {_named(kind)}")
    found = members(at, tool, _TOOL, _TOOL_LIMITS)
    text_of(f"{at}.name", found.get("name"))
    function = {key: found[key] for key in _TOOL[1:] if key in found}
    return {"type": "function", "function": function}


def _choice(choice: Any, tools: list[dict[str, Any]]) -> Any:
    """The choice of the chat; of allowed tools the others are taken out of `tools`."""
    if not isinstance(choice, dict):
        return CHAT_FIELDS["tool_choice"]("tool_choice", choice)
    kind = choice.get("type")
    if kind == "function":
        name = text_of("tool_choice.name", members("tool_choice", choice, ("type", "name")).get("name"))
        return {"type": "function", "function": {"name": name}}
    if kind != "allowed_tools":
        raise refused("tool_choice.type", f"{_ITS_OWN}, got {_named(kind)}")
    found = members("tool_choice", choice, ("type", "mode", "tools"))
    mode = found.get("mode")
    if mode not in ("auto", "required"):
        raise wrong("tool_choice.mode", "'auto' or 'required'", mode)
    allowed = set()
    for number, each in enumerate(list_of("tool_choice.tools", found.get("tools"))):
        at = f"tool_choice.tools[{number}]"
        allowed.add(text_of(f"{at}.name", members(at, each, ("type", "name")).get("name")))
    unknown = sorted(allowed - {tool["function"]["name"] for tool in tools})
    if unknown:
        raise RequestError(f"Tool '{unknown[0]}' has not been passed in `tools`.", "tool_choice")
    tools[:] = [tool for tool in tools if tool["function"]["name"] in allowed]
    return mode


def _read_include(given: Mapping[str, Any], chat: dict[str, Any]) -> None:
    for number, each in enumerate(list_of("include", given.get("include", []))):
        if each not in _INCLUDES:
            raise refused(f"include[{number}]", f"of answers there are {' and '.join(_INCLUDES)}")
        if each == _LOGPROBS:
            chat["logprobs"] = True
    if chat.get("top_logprobs"):
        chat["logprobs"] = True
    elif "top_logprobs" in chat and not chat.get("logprobs"):
        del chat["top_logprobs"]  # 0 is the default of clients


def _read_reasoning(given: Mapping[str, Any], chat: dict[str, Any]) -> dict[str, Any]:
    found = members("reasoning", given.get("reasoning", {}), ("effort",), _REASONING_LIMITS)
    effort = found.get("effort")
    if effort is not None:
        chat["reasoning_effort"] = CHAT_FIELDS["reasoning_effort"]("reasoning.effort", effort)
        if effort == "none":
            chat["chat_template_kwargs"] = {"enable_thinking": False, **chat.get("chat_template_kwargs", {})}
    return {"effort": effort, "summary": None}


def _read_text(given: Mapping[str, Any], chat: dict[str, Any]) -> dict[str, Any]:
    limits = {"verbosity": Only(("medium",), "models have one way to write")}
    found = members("text", given.get("text", {}), ("format",), limits)
    form = found.get("format", {"type": "text"})
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_schema":
        known = ("type", "name", "description", "schema", "strict")
        schema = {key: each for key, each in members("text.format", form, known).items() if key != "type"}
        chat["response_format"] = {"type": kind, "json_schema": schema}
        if not isinstance(schema.get("schema"), dict):
            raise wrong("text.format.schema", "an object", schema.get("schema"))
    elif kind in ("text", "json_object"):
        members("text.format", form, ("type",))
        if kind != "text":
            chat["response_format"] = {"type": kind}
    else:
        raise wrong("text.format.type", "'text', 'json_object' or 'json_schema'", kind)
    return {"format": form, "verbosity": "medium"}
