"""Gives each message of a worker to what sees to its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conch.workers.protocol import wire
from conch.workers.protocol.received_message import ReceivedMessage
from conch.workers.protocol.wire import Kind, WireError

Handler = Callable[[int, ReceivedMessage], None]
"""Sees to a message about a subject."""


class Dispatcher:
    """Sees to what a worker sends, in the order in which that comes.

    Args:
        handlers: What sees to messages, by their kinds.
    """

    def __init__(self, handlers: Mapping[Kind, Handler]) -> None:
        self._handlers = dict(handlers)
        self._greeted = False

    def handle(self, received: ReceivedMessage) -> None:
        """Sees to a message.

        Raises:
            WireError: It is not one that may come now.
        """
        kind = received.message.kind
        if not self._greeted:
            if kind is not Kind.HELLO:
                raise WireError("it does not begin with HELLO")
            wire.check_hello(received.message.fields, "worker")
            self._greeted = True
            return
        handler = self._handlers.get(kind)
        if handler is None:
            raise WireError(f"a message {kind.name} was not expected")
        handler(received.message.subject, received)


def json_fields(handle: Callable[[int, dict[str, Any]], None]) -> Handler:
    """Sees to messages whose fields are JSON."""

    def handler(subject: int, received: ReceivedMessage) -> None:
        handle(subject, wire.decode_json(received.message.fields))

    return handler
