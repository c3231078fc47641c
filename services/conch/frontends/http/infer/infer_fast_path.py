"""The fast_path way of infer requests: from a connection to the route and back, without ASGI."""

from __future__ import annotations

import re

from conch.frontends.http.fast_path import FastPath, ResponseSender
from conch.frontends.http.http_connection import Connection
from conch.frontends.http.infer.infer_call import InferCall
from conch.frontends.http.infer.infer_response import Reply
from conch.frontends.http.infer.infer_route import InferRoute
from conch.frontends.http.request_body import RequestBody

_INFER = re.compile(rb"/v2/models/([^/?#]+)(?:/versions/([0-9]+))?/infer(?:\?.*)?", re.DOTALL)


class InferFastPathCall(InferCall):
    """An infer request that is answered directly."""

    __slots__ = ()

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for leave to send the body."""
        return self.headers.get(b"expect", b"").lower() == b"100-continue"

    def complete(self, body: RequestBody) -> None:
        """Takes the body."""
        self.body, self.size = body.body, body.size
        self._route.run(self)

    def refuse_size(self, size: int) -> None:
        """Answers that the body is too long."""
        self.deliver(self._route.too_large(self, size))

    def refuse_chunks(self) -> None:
        """Answers that the body comes in too many pieces."""
        self.deliver(self._route.too_many_chunks(self))


def infer_fast_path(route: InferRoute) -> FastPath:
    """What takes infer requests from connections."""

    def fast_path(connection: Connection, sender: ResponseSender) -> InferFastPathCall | None:
        found = _INFER.fullmatch(connection.url)
        if found is None:
            return None
        name, version = found.groups()

        def send(reply: Reply) -> None:
            sender.send(*reply)

        call = InferFastPathCall(
            route,
            name.decode("ascii"),
            "" if version is None else version.decode(),
            {name.lower(): value for name, value in connection.raw_headers},
            connection.raw_headers,
            connection.peer,
            send,
        )
        refused = route.begin(call)
        if refused is not None:
            call.deliver(refused)
        return call

    return fast_path
