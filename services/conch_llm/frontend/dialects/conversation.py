"""Makes the messages of a chat of the items of other APIs, in which one turn may be several items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conch.frontends.yield_gil import yield_gil

_BETWEEN = 1024
Part = dict[str, Any]


def text_part(text: str) -> Part:
    """A part of text."""
    return {"type": "text", "text": text}


def image_part(url: str, **more: Any) -> Part:
    """A part with a picture."""
    return {"type": "image_url", "image_url": {"url": url, **more}}


class Conversation:
    """Messages of a chat, in order.

    Items of the assistant that follow each other are one message: reasoning, text and calls.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def say(self, role: str, parts: list[Part], **more: Any) -> None:
        """Adds a message of any role but the assistant's."""
        self._open = None
        self._append({"role": role, "content": parts, **more})

    def reply(self, parts: list[Part]) -> None:
        """Adds text of the assistant."""
        self._assistant()["content"] += parts

    def think(self, text: str) -> None:
        """Adds reasoning of the assistant."""
        self._assistant().setdefault("reasoning_content", []).append(text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Adds a call of the assistant."""
        made = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(made)

    def messages(self) -> list[dict[str, Any]]:
        """The messages; called once, at the end."""
        for number, message in enumerate(self._messages):
            message["content"] = _content(message)
            if "reasoning_content" in message:  # the name by which chat templates know it
                message["reasoning_content"] = "".join(message["reasoning_content"])
            if number % _BETWEEN == _BETWEEN - 1:
                yield_gil()
        return self._messages

    def _assistant(self) -> dict[str, Any]:
        if self._open is None:
            self._open = {"role": "assistant", "content": []}
            self._append(self._open)
        return self._open

    def _append(self, message: dict[str, Any]) -> None:
        self._messages.append(message)
        if len(self._messages) % _BETWEEN == 0:
            yield_gil()


def _content(message: Mapping[str, Any]) -> str | list[Part] | None:
    """One text as it is, since not all models know parts."""
    parts: list[Part] = message["content"]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts or (None if message["role"] == "assistant" else "")
