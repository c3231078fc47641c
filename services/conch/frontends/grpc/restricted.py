"""Restricted protocols: groups of RPCs that need a secret in the call's metadata.

Source: Triton's ``--grpc-restricted-protocol=<group,group>:<key>=<value>``; a call must carry the metadata
``triton-grpc-protocol-<key>`` with that value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hmac import compare_digest

from conch.core.errors import UnavailableError
from conch.frontends.grpc.adapter import Metadata, StreamCall, StreamHandler, UnaryCall, UnaryHandler
from conch.frontends.restrictions import parse_groups

GROUPS: dict[str, tuple[str, ...]] = {
    "health": ("ServerLive", "ServerReady", "ModelReady"),
    "metadata": ("ServerMetadata", "ModelMetadata"),
    "inference": ("ModelInfer", "ModelStreamInfer"),
    "shared-memory": (
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
    ),
    "model-config": ("ModelConfig",),
    "model-repository": ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    "statistics": ("ModelStatistics",),
    "trace": ("TraceSetting",),
    "logging": ("LogSettings",),
}
"""The RPCs of each group, by short name; the health check of gRPC itself belongs to ``health``."""

Restrictions = Mapping[str, tuple[str, str]]
"""Group name to the (key, value) its calls must carry."""

Refused = Callable[[str, str, int], None]
"""Is told of calls to run models that were refused: why, from which client, how long the request was."""


def _untold(text: str, client: str, size: int) -> None:
    """Where nobody wants to know."""


def parse_restrictions(specifications: list[str]) -> dict[str, tuple[str, str]]:
    """Reads ``<group,group>:<key>=<value>`` specifications.

    Raises:
        ValueError: One is malformed, or names an unknown group or one that has been named before.
    """
    return {
        group: (f"triton-grpc-protocol-{key.lower()}", value)
        for group, (key, value) in parse_groups(specifications, GROUPS, "protocol").items()
    }


def _secret_of(restrictions: Restrictions, method: str) -> tuple[str, str] | None:
    if method.startswith("/grpc.health.v1.Health/"):
        return restrictions.get("health")
    name = method.rpartition("/")[2]
    return next(
        (restrictions[group] for group, names in GROUPS.items() if group in restrictions and name in names),
        None,
    )


def _runs_models(method: str) -> bool:
    return method.rpartition("/")[2] in GROUPS["inference"]


def restrict(
    handlers: Mapping[str, UnaryHandler], restrictions: Restrictions, refused: Refused = _untold
) -> dict[str, UnaryHandler]:
    """The handlers, those of restricted groups behind a check; the others are left untouched."""

    def guarded(method: str, handler: UnaryHandler, key: str, value: str) -> UnaryHandler:
        tell = refused if _runs_models(method) else _untold

        def handle(call: UnaryCall, message: bytes) -> None:
            if _carries(call.metadata, key, value):
                handler(call, message)
            else:
                call.abort(UnavailableError.grpc_status, _text(key))
                tell(_text(key), call.peer, len(message))

        return handle

    return {
        method: handler
        if (secret := _secret_of(restrictions, method)) is None
        else guarded(method, handler, *secret)
        for method, handler in handlers.items()
    }


def restrict_streams(
    handlers: Mapping[str, StreamHandler], restrictions: Restrictions, refused: Refused = _untold
) -> dict[str, StreamHandler]:
    """As `restrict`, for streams; they are checked once, when they are opened."""

    def guarded(method: str, handler: StreamHandler, key: str, value: str) -> StreamHandler:
        tell = refused if _runs_models(method) else _untold

        def handle(call: StreamCall) -> None:
            if _carries(call.metadata, key, value):
                handler(call)
            else:
                call.refuse(UnavailableError.grpc_status, _text(key))
                tell(_text(key), call.peer, 0)

        return handle

    return {
        method: handler
        if (secret := _secret_of(restrictions, method)) is None
        else guarded(method, handler, *secret)
        for method, handler in handlers.items()
    }


def _carries(metadata: Metadata, key: str, value: str) -> bool:
    return any(
        name == key and isinstance(given, str) and compare_digest(given.encode(), value.encode())
        for name, given in metadata
    )


def _text(key: str) -> str:
    return f"This protocol is restricted, expecting header '{key}'"
