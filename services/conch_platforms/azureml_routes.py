"""Azure ML: further paths for probes and inference, besides all of REST."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import quote

from conch.core.errors import ConchError
from conch.door import operation_table as table
from conch.door.door import Door
from conch.frontends.http.http_connection import Handler
from conch.frontends.http.http_exchange import HttpExchange
from conch.frontends.http.json_body import error_reply
from conch.frontends.http.route_provider import Answering, RestApi, RouteProvider
from conch_platforms.default_models import check_loaded, only_model


@dataclass(frozen=True, slots=True)
class AzureMlPlatform(RouteProvider):
    """Further paths on the REST port; empty for none.

    Attributes:
        scoring_route: Path of inference with the default model.
        liveness_route: Path of the liveness probe.
        readiness_route: Path of the readiness probe.
        default_model: Model of the scoring route; empty for the only one.
    """

    scoring_route: str = ""
    liveness_route: str = ""
    readiness_route: str = ""
    default_model: str = ""
    title: ClassVar[str] = "HTTP"

    def check(self, door: Door) -> None:
        """Checks that a default model that is named is loaded."""
        if self.default_model:
            check_loaded(door, self.default_model)

    def bind(self, api: RestApi) -> Handler:
        """Returns REST's handler with the further paths."""
        probes = {
            self.liveness_route: table.SERVER_LIVE.paths[0],
            self.readiness_route: table.SERVER_READY.paths[0],
        }
        probes.pop("", None)

        def answer(exchange: HttpExchange) -> Answering:
            path = exchange.path
            if path in probes:
                return api.alias(exchange, probes[path])
            if path == self.scoring_route:
                try:
                    model = self.default_model or only_model(api.door)
                    path = f"/v2/models/{quote(model, safe='')}/infer"
                except ConchError as error:
                    exchange.respond(*error_reply(error))
                    return None
            return api.alias(exchange, path)

        return answer
