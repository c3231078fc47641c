"""The page at ``/`` for people: links to the endpoints of the server and its models.

Used by: `api_routes`.
"""

from __future__ import annotations

from html import escape
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from conch.core.server_state import ServerState
from conch.frontends.http.http_routing import Endpoint
from conch.frontends.operations.operation_handlers import models_with_statistics

_SERVER = (
    ("/v2/health/live", "live"),
    ("/v2/health/ready", "ready"),
    ("/v2", "metadata"),
    ("/v2/models/stats", "statistics"),
    ("/openapi.json", "OpenAPI"),
)
_DOCS = (
    ("https://github.com/kserve/open-inference-protocol", "the protocol"),
    (
        "https://github.com/triton-inference-server/server/tree/main/docs/protocol",
        "its extensions",
    ),
)
_OF_MODELS = (("/ready", "ready"), ("", "metadata"), ("/config", "config"), ("/stats", "statistics"))


def home_endpoint(core: ServerState) -> Endpoint:
    """Returns the endpoint of the page."""

    async def home(request: Request) -> Response:
        core.check_running()
        models = [(model.spec.name, model.spec.version) for model in models_with_statistics(core, "", "")]
        return HTMLResponse(page(core.server_id, core.version, models))

    return home


def page(server: str, version: str, models: list[tuple[str, int]]) -> str:
    """Returns the page; `models` are names and versions."""
    title = f"{escape(server)} (conch {escape(version)})"
    lines = [_model(name, number) for name, number in models] or ["no model is loaded"]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head><body>\n'
        f"<h1>{title}</h1>\n"
        f"<h2>Server</h2>\n{_list([_link(*each) for each in _SERVER])}"
        f"<h2>Models</h2>\n{_list(lines)}"
        f"<h2>Documentation</h2>\n{_list([_link(*each) for each in _DOCS])}"
        f"</body></html>\n"
    )


def _model(name: str, version: int) -> str:
    path = f"/v2/models/{name}/versions/{version}"
    text = f"{escape(name)}, version {version}"
    if quote(path) != path:
        return text  # paths are not decoded, so no link leads there
    return ": ".join((text, ", ".join(_link(path + suffix, what) for suffix, what in _OF_MODELS)))


def _link(address: str, text: str) -> str:
    return f'<a href="{escape(address)}">{escape(text)}</a>'


def _list(lines: list[str]) -> str:
    return "<ul>\n" + "".join(f"<li>{line}</li>\n" for line in lines) + "</ul>\n"
