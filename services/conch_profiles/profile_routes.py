"""The route ``/v2/models/M/profile``: the profile of a version's inputs.

Threads and locks: event loop, but for `_Profiles._found`.
"""

from __future__ import annotations

from typing import Final

from conch.access.principals import READS
from conch.core.errors import NotFoundError
from conch.door.operation_table import Endpoint, path_pattern
from conch.frontends.http.http_exchange import HttpExchange, Reply
from conch.frontends.http.http_routing import RouteTable, route
from conch.frontends.http.json_body import json_reply, parsed
from conch.frontends.http.route_provider import RestApi
from conch_profiles.profiled_model import profile_of

PROFILE = Endpoint(
    "input_profile",
    "statistics",
    "Profile of the model's inputs, compared with its training set",
    paths=("/v2/models/{model}[/versions/{version}]/profile",),
    roles=READS,
)
ENDPOINTS: Final = (PROFILE,)
"""The calls, as entries like those of the table of operations."""


def profile_table(api: RestApi) -> RouteTable:
    """The table of the route; paths that it does not have go on to the next provider."""
    pattern = path_pattern(PROFILE.paths[0])
    routes = [route(pattern, [PROFILE.http_method], PROFILE.access, _Profiles(api).profile)]
    labels = api.door.models.labels
    return RouteTable(
        routes, api.guard, api.refusals, api.cors, api.unmatched, labels=labels, endpoints=ENDPOINTS
    )


class _Profiles:
    def __init__(self, api: RestApi) -> None:
        self._api = api

    async def profile(self, exchange: HttpExchange, model: str, version: str) -> Reply:
        """Answers with a profile."""
        self._api.door.check_running()
        return await parsed(exchange, self._api.pools, self._found, model, version)

    def _found(self, model: str, version: str) -> Reply:
        """Makes the answer; any thread. Raises NotFoundError: the version has no profile."""
        door = self._api.door
        spec = door.describe(model, version)
        entry = door.models.entries.get(spec.identifier)
        profile = None if entry is None else profile_of(entry.ready.get(spec.version))
        if profile is None:
            raise NotFoundError(
                f"the inputs of model '{model}' version {spec.version} are not profiled: start the server "
                f"with --profile-inputs, or set the model's parameter CONCH_PROFILE to true"
            )
        return json_reply({"model": model, "version": str(spec.version), **profile.as_object()})
