"""Access to the control port: without an access policy for every caller, with one for its principals.

The token of the port, where there is one, stays valid beside a policy and gives all roles. Threads and locks:
any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from conch.access.access_guard import Access, AccessGuard, OwnToken, PortRules
from conch.access.principals import CONTROLS, READS, Roles
from conch.core.errors import as_conch_error

_CERTIFICATE_NAMES = (("x509_common_name", "cn"), ("peer_dns", "dns"), ("peer_uri", "uri"))
_MISSING = "no token: the metadata 'authorization: Bearer TOKEN' is expected (--token-file of conch models)"
_WRONG = "wrong token: it is not the one in the server's --control-token-file"

ACTIONS: Mapping[str, tuple[Roles, str]] = {
    "Load": (CONTROLS, "load_model"),
    "Unload": (CONTROLS, "unload_model"),
    "SetLabel": (CONTROLS, "set_label"),
    "StartRollout": (CONTROLS, "start_rollout"),
    "UpdateRollout": (CONTROLS, "update_rollout"),
    "GetRollout": (READS, "get_rollout"),
    "ListRollouts": (READS, "list_rollouts"),
    "Drain": (CONTROLS, "drain"),
    "Index": (READS, "repository_index"),
    "Describe": (READS, "describe_model"),
    "Watch": (READS, "watch_models"),
}
"""The roles of each method, of which one suffices, and its name in the audit log."""


def control_guard(access: Access | None, token: str | None) -> AccessGuard:
    """The guard of the port; `token` is its own, None for none."""
    own = None if token is None else OwnToken(token, "control-token", _MISSING, _WRONG)
    return AccessGuard(access, "control", PortRules(token=own))


class CallAccess:
    """Rights of the caller of one call; made before the call's message is received.

    Attributes:
        principal: The caller's name in the access policy; empty without one, and for the port's own token.

    Raises:
        ConchError: It may not call the method.
    """

    def __init__(self, guard: AccessGuard, context: Any, method: str) -> None:
        self._guard = guard
        self._peer = ContextPeer(context)
        self._roles, self._action = ACTIONS[method]
        self._grant = guard.admit(self._peer, self._roles, self._action)
        self.principal = "" if self._grant.epoch is None else self._grant.name

    def received(self, size: int) -> None:
        """Counts the bytes of the call's message."""
        self._grant.principal.limiter.charge(size)

    def check(self, model: str) -> None:
        """Raises PermissionDeniedError: it may not read the model."""
        self._guard.check(self._peer, self._grant, self._roles, self._action, model)

    def allows(self, model: str) -> bool:
        """True if it may see a model."""
        return self._grant.principal.allows(self._roles, model)

    @contextmanager
    def changing(self, model: str) -> Iterator[None]:
        """A context in which the caller's change is made: checked before, audited afterwards."""
        self.check(model)
        try:
            yield
        except BaseException as error:  # audited, and raised again
            self._guard.changed(self._peer, self._grant, self._action, model, as_conch_error(error))
            raise
        self._guard.changed(self._peer, self._grant, self._action, model, None)

    def renew(self) -> None:
        """Raises UnauthenticatedError or PermissionDeniedError: the call may not go on."""
        self._grant = self._guard.renew(self._peer, self._grant, self._roles, self._action)


class ContextPeer:
    """The client of a call, from its `grpc.ServicerContext`."""

    def __init__(self, context: Any) -> None:
        self._context = context

    @property
    def client(self) -> str:
        """Its address."""
        return str(self._context.peer())

    def header_values(self, name: str) -> list[str]:
        """All values of a text key of the metadata."""
        metadata = self._context.invocation_metadata()
        return [value for key, value in metadata if key == name and isinstance(value, str)]

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """Names in its certificate."""
        found = self._context.auth_context()
        return tuple(
            f"{kind}:{name.decode(errors='replace')}"
            for key, kind in _CERTIFICATE_NAMES
            for name in found.get(key, ())
        )
