"""Shared memory of clients: status, register, unregister."""

from __future__ import annotations

import binascii
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from conch.core.errors import InvalidArgumentError
from conch.frontends.http.bodies import member, read_settings
from conch.frontends.http.jsontext import access
from conch.frontends.http.jsontext.access import text, unsigned
from conch.frontends.http.pools import Pools, run_on
from conch.frontends.http.replies import empty_reply, json_reply
from conch.frontends.http.routing import ApiRoute, route
from conch.memory.regions import Regions

_HANDLE_BYTES = 64
_CATEGORY = "shared-memory"
_SYSTEM = "/v2/systemsharedmemory(?:/region/(?P<region>[^/]+))?"
_CUDA = "/v2/cudasharedmemory(?:/region/(?P<region>[^/]+))?"


def memory_routes(regions: Regions, pools: Pools, most_bytes: int) -> list[ApiRoute]:
    """The table."""

    async def system_status(request: Request, region: str) -> Response:
        return json_reply(
            [
                {"name": each.name, "key": each.key, "offset": each.offset, "byte_size": each.byte_size}
                for each in regions.system_regions(region)
            ]
        )

    async def cuda_status(request: Request, region: str) -> Response:
        return json_reply(
            [
                {"name": each.name, "device_id": each.device_id, "byte_size": each.byte_size}
                for each in regions.cuda_regions(region)
            ]
        )

    async def register_system(request: Request, region: str) -> Response:
        _check_name(region, "system")
        regions.check_allowed()
        key, offset, byte_size = system_registration(
            await read_settings(request, pools, most_bytes, required=True)
        )
        await run_on(pools.quick, regions.register_system, region, key, offset, byte_size)
        return empty_reply()

    async def register_cuda(request: Request, region: str) -> Response:
        _check_name(region, "cuda")
        regions.check_allowed()
        handle, device, byte_size = cuda_registration(
            await read_settings(request, pools, most_bytes, required=True)
        )
        await run_on(pools.quick, regions.register_cuda, region, handle, device, byte_size)
        return empty_reply()

    async def unregister_system(request: Request, region: str) -> Response:
        await run_on(pools.quick, regions.unregister_system, region)
        return empty_reply()

    async def unregister_cuda(request: Request, region: str) -> Response:
        await run_on(pools.quick, regions.unregister_cuda, region)
        return empty_reply()

    return [
        route(_SYSTEM + "/status", ["GET"], _CATEGORY, system_status),
        route(_SYSTEM + "/register", ["POST"], _CATEGORY, register_system),
        route(_SYSTEM + "/unregister", ["POST"], _CATEGORY, unregister_system),
        route(_CUDA + "/status", ["GET"], _CATEGORY, cuda_status),
        route(_CUDA + "/register", ["POST"], _CATEGORY, register_cuda),
        route(_CUDA + "/unregister", ["POST"], _CATEGORY, unregister_cuda),
    ]


def _check_name(region: str, kind: str) -> None:
    """Refuses a path without a name before looking at the body."""
    if not region:
        raise InvalidArgumentError(f"'region name' is necessary to register {kind} shared memory region")


def _field(body: Any, name: str) -> Any:
    if not isinstance(body, dict) or name not in body:
        raise InvalidArgumentError(f"Shared memory register request has no '{name}' field")
    return body[name]


def system_registration(body: Any) -> tuple[str, int, int]:
    """Key, offset and size of a system region to be registered.

    Raises:
        ConchError: One is missing, or of the wrong type; the texts are Triton's.
    """
    key = text(_field(body, "key"))
    offset = member(body, "offset")
    return key, 0 if offset is None else unsigned(offset), unsigned(_field(body, "byte_size"))


def cuda_registration(body: Any) -> tuple[bytes, int, int]:
    """Handle, device and size of a CUDA region to be registered.

    Raises:
        ConchError: One is missing, or of the wrong type; the texts are Triton's.
    """
    encoded = text(access.member(_field(body, "raw_handle"), "b64"))
    byte_size = unsigned(access.member(body, "byte_size"))
    device = unsigned(access.member(body, "device_id"))
    try:
        handle = binascii.a2b_base64("".join(encoded.split()), strict_mode=True)
    except ValueError:
        handle = b""
    if len(handle) != _HANDLE_BYTES:
        raise InvalidArgumentError("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return handle, device, byte_size
