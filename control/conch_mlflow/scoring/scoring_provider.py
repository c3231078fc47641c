"""MLflow's scoring routes as a provider; the routes are imported when a port binds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from conch.frontends.http.route_provider import RestApi, RouteProvider

if TYPE_CHECKING:
    from conch.frontends.http.http_connection import Handler


class ScoringRoutes(RouteProvider):
    """MLflow's scoring protocol behind REST, for models that have a signature of MLflow."""

    title: ClassVar[str] = "MLflow"

    def bind(self, api: RestApi) -> Handler:
        """Returns the table of the routes."""
        from conch_mlflow.scoring.scoring_routes import scoring_table

        return scoring_table(api)
