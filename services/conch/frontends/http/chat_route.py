"""The seam for chats with models that a part answers for pages of other parts.

`ServerPart.chat_route` returns one; the console is its user. The caller has an event loop of its own, and
checks the caller's roles before it passes a request on.

Threads and locks: event loop of the caller only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from conch.frontends.http.http_exchange import HttpExchange


class ChatModel(NamedTuple):
    """A model that can chat.

    Attributes:
        id: A name that requests give as `model`: the model's own, an alias, or an adapter.
        model: The model's own name, by which access is checked.
    """

    id: str
    model: str


class ChatRoute(ABC):
    """Answers OpenAI's chat requests."""

    @abstractmethod
    async def models(self) -> Sequence[ChatModel]:
        """The loaded models that can chat, by all their names."""

    @abstractmethod
    def figures(self, model: str) -> Mapping[str, float] | None:
        """Totals and gauges of a model that takes text, by its own name; None for any other model."""

    @abstractmethod
    async def answer(self, exchange: HttpExchange, model: str) -> None:
        """Answers a chat completion of one model, errors too.

        Args:
            exchange: The request, as ``POST /v1/chat/completions`` takes it; its caller may use the model. A
                disconnect cancels the request to the model.
            model: The model's own name. The body's `model` must be a name of it.
        """
