"""The invocations route as a provider; the route is imported when a port binds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from conch.frontends.http.route_provider import RestApi, RouteProvider

if TYPE_CHECKING:
    from conch.frontends.http.http_connection import Handler


@dataclass(frozen=True, slots=True)
class InvocationRoutes(RouteProvider):
    """Invocations behind REST.

    Attributes:
        most_unpacked_bytes: Limit of what a compressed body unpacks to.
    """

    title: ClassVar[str] = "frames"

    most_unpacked_bytes: int

    def bind(self, api: RestApi) -> Handler:
        """Returns the table of the route."""
        from conch_frames.invocations.invocation_routes import invocation_table

        return invocation_table(api, self.most_unpacked_bytes)
