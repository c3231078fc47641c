"""A conversation with a model over `/v1/chat/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

_MOST_LINE = 1 << 24
_MOST_ERROR = 1 << 20


class ChatError(Exception):
    """The model does not answer, or refuses; the text is a sentence."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer.

    Attributes:
        text: Text of the answer.
        reasoning: Text of the reasoning before it.
    """

    text: str = ""
    reasoning: str = ""


@dataclass(slots=True)
class Figures:
    """Counts of the last answer.

    Attributes:
        tokens: Tokens of the answer.
        first_s: Time to the first piece, in seconds.
        seconds: Time to the end.
        finish: The reason of the end, such as ``length``; empty for an answer that was cancelled.
    """

    tokens: int = 0
    first_s: float = 0.0
    seconds: float = 0.0
    finish: str = ""


class Conversation:
    """The turns of a chat.

    Args:
        host: Host of the server.
        port: Its HTTP port.
        model: The model's name.
        sampling: Fields of each request, such as ``temperature``.

    Attributes:
        messages: The turns, as in a request.
        figures: Counts of the last answer.
    """

    def __init__(self, host: str, port: int, model: str, sampling: Mapping[str, Any]) -> None:
        self._host, self._port = host, port
        self._fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **sampling}
        self.messages: list[dict[str, str]] = []
        self.figures = Figures()

    @property
    def system(self) -> str:
        """The system prompt; empty for none."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else ""

    def begin(self, system: str) -> None:
        """Forgets all turns, and takes a system prompt, which may be empty."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, prompt: str) -> Generator[Piece, None, None]:
        """The answer to a prompt as it comes.

        Closing the iterator cancels the answer. What has come of it stays a turn, unless that is nothing.

        Raises:
            ChatError: The model refuses the prompt, or the answer breaks off.
        """
        asked = [*self.messages, {"role": "user", "content": prompt}]
        text: list[str] = []
        self.figures = Figures()
        began = time.monotonic()
        try:
            with closing(HTTPConnection(self._host, self._port)) as connection:
                for piece in self._pieces(connection, {**self._fields, "messages": asked}):
                    self.figures.first_s = self.figures.first_s or time.monotonic() - began
                    text.append(piece.text)
                    yield piece
        except (OSError, HTTPException) as error:
            raise ChatError(f"the server does not answer: {error}") from None
        finally:
            self.figures.seconds = time.monotonic() - began
            if any(text):
                self.messages = [*asked, {"role": "assistant", "content": "".join(text)}]

    def _pieces(self, connection: HTTPConnection, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ChatError(_reason(response))
        while line := response.readline(_MOST_LINE):
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            if not line.startswith(b"data: "):
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise ChatError(str(chunk["error"].get("message", "the answer broke off")))
            usage = chunk.get("usage")
            if usage:
                self.figures.tokens = usage["completion_tokens"]
            for choice in chunk.get("choices", ()):
                self.figures.finish = choice.get("finish_reason") or self.figures.finish
                delta = choice.get("delta") or {}
                piece = Piece(delta.get("content") or "", delta.get("reasoning") or "")
                if piece.text or piece.reasoning:
                    yield piece
        raise ChatError("the answer broke off")


def _reason(response: HTTPResponse) -> str:
    """The text of an error's body."""
    body = response.read(_MOST_ERROR)
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answers with HTTP status {response.status}"
