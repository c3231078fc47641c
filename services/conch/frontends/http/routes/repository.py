"""The model repository: index, load, unload."""

from __future__ import annotations

import binascii
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.server_core import IndexEntry, LoadParameter, ServerCore
from conch.frontends.answers import refuse_repository_name
from conch.frontends.http.bodies import member, members, parsed, read_body, read_settings
from conch.frontends.http.jsontext.access import boolean, text
from conch.frontends.http.jsontext.load import load
from conch.frontends.http.pools import Pools, run_on
from conch.frontends.http.replies import empty_reply, json_reply
from conch.frontends.http.routing import ApiRoute, route
from conch.frontends.uploads import UploadRule, is_loopback

_CATEGORY = "model-repository"
_REPOSITORY = "/v2/repository(?:/(?P<repository>[^/]+))?"


def repository_routes(
    core: ServerCore, pools: Pools, most_bytes: int, uploads: UploadRule, check_changes: Callable[[], None]
) -> list[ApiRoute]:
    """The table.

    Args:
        core: Has the agent.
        pools: Where requests wait.
        most_bytes: The largest body of a load.
        uploads: Which clients may load models of files that they bring.
        check_changes: Raises if clients may not load and unload models.
    """

    async def index(request: Request, repository: str) -> Response:
        ready_only = index_wanted(await read_settings(request, pools, most_bytes))
        entries = await run_on(pools.index, core.agent.index, ready_only)
        return json_reply([entry_object(entry) for entry in entries])

    async def load_model(request: Request, repository: str, model: str) -> Response:
        refuse_repository_name(repository)
        check_changes()
        client = request.client
        local = client is not None and is_loopback(client.host)
        may_upload = uploads.allows(local, request.headers)
        body = await read_body(request, most_bytes)
        parameters = await parsed(request, pools, _parameters, body) if body else {}
        await run_on(pools.loads, core.agent.load, model, parameters, may_upload)
        return empty_reply()

    async def unload_model(request: Request, repository: str, model: str) -> Response:
        refuse_repository_name(repository)
        check_changes()
        parameters = member(await read_settings(request, pools, most_bytes), "parameters")
        dependents = member({} if parameters is None else members(parameters), "unload_dependents")
        with_dependents = dependents is not None and boolean(dependents)
        await run_on(pools.unloads, core.agent.unload, model, with_dependents)
        return empty_reply()

    return [
        route(_REPOSITORY + "/index", ["POST"], _CATEGORY, index),
        route(_REPOSITORY + "/models/(?P<model>[^/]+)/load", ["POST"], _CATEGORY, load_model),
        route(_REPOSITORY + "/models/(?P<model>[^/]+)/unload", ["POST"], _CATEGORY, unload_model),
    ]


def entry_object(entry: IndexEntry) -> dict[str, str]:
    """A line of the index; only what is known of it."""
    fields = {"version": entry.version, "state": entry.state, "reason": entry.reason}
    return {"name": entry.name} | {key: value for key, value in fields.items() if value}


def index_wanted(body: Any) -> bool:
    """Whether an index is to hold only what is ready.

    Raises:
        InvalidArgumentError: The member that says so is no boolean; the text is Triton's.
    """
    wanted = body.get("ready", False) if isinstance(body, dict) else False
    if not isinstance(wanted, bool):
        raise InvalidArgumentError("Invalid value for 'ready': expected a boolean")
    return wanted


def _parameters(body: bytes) -> dict[str, LoadParameter]:
    return load_parameters(load(body))


def load_parameters(body: Any) -> dict[str, LoadParameter]:
    """The parameters of a load, files decoded.

    Raises:
        InternalError: One is unknown, or no string; the texts are Triton's.
        InvalidArgumentError: A file is not in base64.
    """
    if not isinstance(body, dict) or "parameters" not in body:
        return {}
    parameters: dict[str, LoadParameter] = {}
    for key, value in members(body["parameters"]).items():
        given = text(value)
        if key == "config":
            parameters[key] = given
        elif key.startswith("file:"):
            parameters[key] = _decoded(key, given)
        else:
            raise InternalError("unexpected error on creating Triton parameter")
    return parameters


def _decoded(key: str, encoded: str) -> bytes:
    try:
        return binascii.a2b_base64("".join(encoded.split()), strict_mode=True)
    except ValueError as error:  # binascii.Error is one
        raise InvalidArgumentError(f"load parameter '{key}' must be in base64: {error}") from None
