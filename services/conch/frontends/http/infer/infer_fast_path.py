"""Fast path of infer requests, without ASGI; the careful path is `infer_asgi`. Used by: `http_server`."""

from __future__ import annotations

import re

from conch.frontends.http.fast_path import FastPath, FastPathConnection, ResponseSender
from conch.frontends.http.flow_control import RequestBody
from conch.frontends.http.infer.infer_call import InferCall
from conch.frontends.http.infer.infer_response import Reply
from conch.frontends.http.infer.infer_route import InferRoute

_INFER = re.compile(rb"/v2/models/([^/?#]+)(?:/versions/([0-9]+))?/infer(?:\?.*)?", re.DOTALL)


class InferFastPathCall(InferCall):
    """An infer request on the fast path."""

    __slots__ = ()

    @property
    def expects_continue(self) -> bool:
        """True if the client expects ``100 Continue``."""
        return self.headers.get(b"expect", b"").lower() == b"100-continue"

    def complete(self, body: RequestBody) -> None:
        """Executes the request."""
        self.body, self.size = body.body, body.size
        self._route.run(self)

    def refuse_size(self, size: int) -> None:
        """Refuses a body over the limit."""
        self.deliver(self._route.too_large(self, size))

    def refuse_chunks(self) -> None:
        """Refuses a body with too many chunks."""
        self.deliver(self._route.too_many_chunks(self))


def infer_fast_path(route: InferRoute) -> FastPath:
    """Returns the fast path of a route."""

    def fast_path(connection: FastPathConnection, sender: ResponseSender) -> InferFastPathCall | None:
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
