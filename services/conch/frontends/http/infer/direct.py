"""The direct way of infer requests: from a connection to the route and back, without ASGI."""

from __future__ import annotations

import re

from conch.frontends.http.connection import Connection
from conch.frontends.http.gathered import Gathered
from conch.frontends.http.infer.call import InferCall
from conch.frontends.http.infer.reply import Reply
from conch.frontends.http.infer.route import InferRoute
from conch.frontends.http.shortcut import Answering, Direct

_INFER = re.compile(rb"/v2/models/([^/?#]+)(?:/versions/([0-9]+))?/infer(?:\?.*)?", re.DOTALL)


class DirectInfer(InferCall):
    """An infer request that is answered directly."""

    __slots__ = ()

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for leave to send the body."""
        return self.headers.get(b"expect", b"").lower() == b"100-continue"

    def complete(self, body: Gathered) -> None:
        """Takes the body."""
        self.body, self.size = body.body, body.size
        self._route.run(self)

    def refuse_size(self, size: int) -> None:
        """Answers that the body is too long."""
        self.deliver(self._route.too_large(self, size))

    def refuse_chunks(self) -> None:
        """Answers that the body comes in too many pieces."""
        self.deliver(self._route.too_many_chunks(self))


def direct_infer(route: InferRoute) -> Direct:
    """What takes infer requests from connections."""

    def direct(connection: Connection, answering: Answering) -> DirectInfer | None:
        found = _INFER.fullmatch(connection.url)
        if found is None:
            return None
        name, version = found.groups()

        def send(reply: Reply) -> None:
            answering.send(*reply)

        call = DirectInfer(
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

    return direct
