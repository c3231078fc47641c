"""Asks by LiteLLM, in its environment, in each API that it speaks to a server; prints what came of it."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def said(text: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def called(answer: Any) -> list[str]:
    """The first call of an answer, and the reason of its end."""
    (choice,) = answer.choices
    function = choice.message.tool_calls[0].function
    return [function.name, function.arguments, choice.finish_reason]


def main(url: str, model: str) -> None:
    """Asks for the Responses API as such, and for chats by way of it and of the Messages API."""
    openai: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none"}
    anthropic: dict[str, Any] = {"api_base": url, "api_key": "none", "max_tokens": 99}
    whole = litellm.responses(model=f"openai/{model}", input="hello you", **openai)
    stream = litellm.responses(model=f"openai/{model}", input="hello you", stream=True, **openai)
    told = {
        "responses": whole.output[0].content[0].text,
        "streamed": "".join(each.delta for each in stream if each.type == "response.output_text.delta"),
    }
    for name, prefix, options in (
        ("bridge", "openai/responses", openai),
        ("anthropic", "anthropic", anthropic),
    ):
        asked = {"model": f"{prefix}/{model}", **options}
        answer = litellm.completion(messages=said("hello you"), **asked)
        told[name] = [answer.choices[0].message.content, answer.usage.total_tokens]
        told[f"{name} tools"] = called(litellm.completion(messages=said(CALL), tools=TOOLS, **asked))
    sys.stdout.write(json.dumps(told) + "\n")


main(*sys.argv[1:])
