"""The routes of MLflow's server beside its invocations: ``/ping`` and ``/version``."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from conch.frontends.http.route_provider import RestApi, RouteProvider

if TYPE_CHECKING:
    from conch.frontends.http.http_connection import Handler


class HealthRoutes(RouteProvider):
    """Probes of MLflow's scoring protocol behind REST."""

    title: ClassVar[str] = "MLflow"

    def bind(self, api: RestApi) -> Handler:
        """Returns the table of the routes."""
        from conch_mlflow.scoring.health_routes import health_table

        return health_table(api)
