"""Settings of logs and traces, read and changed while the server runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from conch.core.errors import ConchError, NotFoundError, UnavailableError, UnsupportedError
from conch.core.server_core import ServerCore
from conch.frontends.http.bodies import members, read_settings
from conch.frontends.http.jsontext.access import boolean, elements, text, unsigned
from conch.frontends.http.jsontext.bulk import BulkArray
from conch.frontends.http.pools import Pools
from conch.frontends.http.replies import json_reply
from conch.frontends.http.routing import ApiRoute, route
from conch.observability.options import FORMATS
from conch.observability.settings import LogControl, Setting
from conch.observability.trace import TraceSettings

_SWITCHES = ("log_info", "log_warning", "log_error")
_TRACE_NUMBERS = ("trace_rate", "trace_count", "log_frequency")
_TRACES = ("trace_level", *_TRACE_NUMBERS, "trace_file", "trace_mode")


def settings_routes(
    core: ServerCore, logs: LogControl, traces: TraceSettings, pools: Pools, most_bytes: int
) -> list[ApiRoute]:
    """The table."""

    async def logging(request: Request) -> Response:
        if request.method == "GET":
            return json_reply(logs.settings())
        return json_reply(logs.update(log_changes(await read_settings(request, pools, most_bytes))))

    async def trace(request: Request, model: str = "") -> Response:
        if model:
            _check_known(core, model)
        if request.method == "GET":
            return json_reply(trace_object(traces.settings(model)))
        changes = trace_changes(await read_settings(request, pools, most_bytes))
        return json_reply(trace_object(traces.update(changes, model)))

    both = ["GET", "POST"]
    return [
        route("/v2/logging", both, "logging", logging),
        route("/v2/trace/setting", both, "trace", trace),
        route("/v2/models/(?P<model>[^/]+)/trace/setting", both, "trace", trace),
    ]


def _check_known(core: ServerCore, model: str) -> None:
    try:
        core.model(model)
    except ConchError:
        raise NotFoundError(f"Request for unknown model : {model}") from None


def _given(body: Any) -> dict[str, Any]:
    """The members of a body, of which there may be none at all."""
    return {} if body is None or isinstance(body, list | BulkArray) else members(body)


def log_changes(body: Any) -> dict[str, Setting]:
    """The log settings that a body changes; null changes nothing, and nor does a name that is none of them.

    Raises:
        ConchError: A value has the wrong type, or can't be set; the texts are Triton's.
    """
    given = {name: value for name, value in _given(body).items() if value is not None}
    changes: dict[str, Setting] = {}
    if "log_file" in given:
        raise UnsupportedError("log file location can not be updated through network protocol")
    for name in _SWITCHES:
        if name in given:
            changes[name] = boolean(given[name])
    if "log_verbose_level" in given:
        changes["log_verbose_level"] = unsigned(given["log_verbose_level"])
    if "log_format" in given:
        form = text(given["log_format"])
        if form not in FORMATS:
            raise UnavailableError(f"invalid argument for --log_format, got: {form}")
        changes["log_format"] = form
    return changes


def trace_changes(body: Any) -> dict[str, Sequence[str]]:
    """The trace settings that a body changes, with the values of each; none for one that is null.

    Raises:
        InternalError: A value has the wrong type.
    """
    given = _given(body)
    changes: dict[str, Sequence[str]] = {}
    if "trace_file" in given:
        changes["trace_file"] = ()
    if "trace_level" in given:
        levels = given["trace_level"]
        changes["trace_level"] = () if levels is None else [text(level) for level in elements(levels)]
    for name in _TRACE_NUMBERS:
        if name in given:
            changes[name] = () if given[name] is None else (text(given[name]),)
    return changes


def trace_object(settings: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Trace settings in JSON, in Triton's order: only levels are a list."""
    return {
        name: list(settings[name]) if name == "trace_level" else "".join(settings[name]) for name in _TRACES
    }
