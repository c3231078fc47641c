"""The ASGI application: infer first, all other routes through the router. Used by `HttpFrontEnd`."""

from __future__ import annotations

import re

from starlette.types import Receive, Scope, Send

from conch.frontends.access_policy import Restrictions
from conch.frontends.http.http_responses import text_error
from conch.frontends.http.http_routing import OnRefused, Router, ignore_refused, refusal
from conch.frontends.http.infer.infer_asgi import answer
from conch.frontends.http.infer.infer_route import InferRoute
from conch.frontends.operations.operation_table import INFER, path_pattern

_INFER = re.compile(path_pattern(INFER.paths[0]).encode())


class HttpApp:
    """Dispatches requests to the infer route or the router; checks restrictions of inference."""

    def __init__(
        self,
        infer: InferRoute,
        router: Router,
        restrictions: Restrictions,
        refused: OnRefused = ignore_refused,
    ) -> None:
        self._infer = infer
        self._refused = refused
        self._router = router
        self._restrictions = restrictions if "inference" in restrictions else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        found = _INFER.fullmatch(scope["raw_path"])
        if found is None:
            await self._router(scope, receive, send)
            return
        if self._restrictions is not None:
            refused = refusal(scope, "inference", self._restrictions)
            if refused is not None:
                name, version = found.groups()
                self._refused(scope, name.decode(errors="replace"), (version or b"").decode())
                await refused(scope, receive, send)
                return
        if scope["method"] != "POST":
            await text_error("Method Not Allowed", 405)(scope, receive, send)
            return
        name, version = found.groups()
        await answer(self._infer, scope, receive, send, name, version)
