"""The profile route as a provider; the route is imported when a port binds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from conch.frontends.http.route_provider import RestApi, RouteProvider

if TYPE_CHECKING:
    from conch.frontends.http.http_connection import Handler


@dataclass(frozen=True, slots=True)
class ProfileRoutes(RouteProvider):
    """Profiles behind REST."""

    title: ClassVar[str] = "profiles"

    def bind(self, api: RestApi) -> Handler:
        """Returns the table of the route."""
        from conch_profiles.profile_routes import profile_table

        return profile_table(api)
