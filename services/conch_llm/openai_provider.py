"""OpenAI's routes as a provider for ports; the routes are imported when one is bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from conch.frontends.http.route_provider import RestApi, RouteProvider
from conch_llm.contract import PREFIXES
from conch_llm.frontend.dialects.response_store import ResponseStore
from conch_llm.frontend.llm_metrics import LlmMetrics
from conch_llm.openai_settings import OpenAiSettings

if TYPE_CHECKING:
    from conch.core.errors import ConchError
    from conch.frontends.http.http_connection import Handler
    from conch.frontends.http.http_exchange import Reply


class OpenAiRoutes(RouteProvider):
    """OpenAI's routes on one port: of its own as `HttpOptions.platform`, or behind REST as `further`.

    Args:
        settings: Settings by flags.
        metrics: Counts what the routes do, on all ports.
    """

    title: ClassVar[str] = "OpenAI"

    def __init__(self, settings: OpenAiSettings, metrics: LlmMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._store = ResponseStore(settings.store_bytes)

    def refusal(self, path: str, error: ConchError) -> Reply | None:
        """The error for the paths under OpenAI's prefixes, in the route's form."""
        from conch_llm.frontend.error_forms import errors_of

        if not path.startswith(PREFIXES):
            return None
        return errors_of(path.removeprefix("/openai")).reply(error, "")

    def bind(self, api: RestApi) -> Handler:
        """Returns the handler of the routes."""
        from conch_llm.frontend.openai_routes import OpenAiHandler

        return OpenAiHandler(self._settings, self._metrics, api, self._store)
