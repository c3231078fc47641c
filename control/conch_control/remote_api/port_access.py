"""Who may what on the control port: without an access policy every caller, with one its principals.

The token of the port, where there is one, stays valid beside a policy and gives all roles. Threads and locks:
any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hmac import compare_digest
from typing import Any, Protocol

from conch.access.access_guard import AUTHORIZATION, Access, AccessGuard
from conch.access.principals import CONTROLS, EVERY_MODEL, READS, Grant, Principal, Role, Roles
from conch.access.request_limits import Limiter, Limits
from conch.core.errors import as_conch_error
from conch_control.remote_api.messages import SCHEME

_CERTIFICATE_NAMES = (("x509_common_name", "cn"), ("peer_dns", "dns"), ("peer_uri", "uri"))
_TOKEN_PRINCIPAL = "control-token"

ACTIONS: Mapping[str, tuple[Roles, str]] = {
    "Load": (CONTROLS, "load_model"),
    "Unload": (CONTROLS, "unload_model"),
    "Drain": (CONTROLS, "drain"),
    "Index": (READS, "repository_index"),
    "Describe": (READS, "describe_model"),
    "Watch": (READS, "watch_models"),
}
"""The roles of each method, of which one suffices, and its name in the audit log."""


class CallAccess(Protocol):
    """What the caller of one call may do."""

    @property
    def principal(self) -> str:
        """The caller's name in the access policy; empty without one, and for the port's own token."""

    def received(self, size: int) -> None:
        """Counts the bytes of the call's message."""

    def check(self, model: str) -> None:
        """Raises PermissionDeniedError: it may not read the model."""

    def sees(self, model: str) -> bool:
        """Whether it may see a model."""

    def changing(self, model: str) -> Any:
        """A context in which the caller's change is made: checked before, audited afterwards."""

    def renew(self) -> None:
        """Raises UnauthenticatedError or PermissionDeniedError: the call may not go on."""


class PortAccess(Protocol):
    """Identifies callers."""

    def admit(self, context: Any, method: str) -> CallAccess:
        """Admits a call before its message is received. Raises ConchError: it may not call the method."""


class OpenAccess:
    """Lets every caller do everything: nothing but the port's own token and certificates protects it."""

    principal = ""

    def admit(self, context: Any, method: str) -> CallAccess:
        """Admits the call."""
        return self

    def received(self, size: int) -> None:
        """Counts nothing."""

    def check(self, model: str) -> None:
        """Raises nothing."""

    def sees(self, model: str) -> bool:
        """Returns True."""
        return True

    @contextmanager
    def changing(self, model: str) -> Iterator[None]:
        """Audits nothing."""
        yield

    def renew(self) -> None:
        """Raises nothing."""


class PolicyAccess:
    """Lets the principals of an access policy do what it says, and holders of the port's token everything."""

    def __init__(self, access: Access, token: str | None) -> None:
        self._guard = AccessGuard(access, "control")
        self._expected = None if token is None else (SCHEME + token).encode()
        limiter = Limiter(_TOKEN_PRINCIPAL, Limits())
        self._operator = Principal(_TOKEN_PRINCIPAL, dict.fromkeys(Role, EVERY_MODEL), limiter)

    def admit(self, context: Any, method: str) -> CallAccess:
        """Identifies the caller, see `AccessGuard.admit`."""
        roles, action = ACTIONS[method]
        peer = ContextPeer(context)
        shown = [value.encode(errors="backslashreplace") for value in peer.header_values(AUTHORIZATION)]
        if self._expected is not None and len(shown) == 1 and compare_digest(shown[0], self._expected):
            return _GrantedCall(self._guard, peer, Grant(self._operator), roles, action, renewed=False)
        grant = self._guard.admit(peer, roles, action)
        return _GrantedCall(self._guard, peer, grant, roles, action, renewed=True)


class _GrantedCall:
    """A call of a principal; `renewed` is False for the port's own token, which no policy takes back."""

    def __init__(
        self, guard: AccessGuard, peer: ContextPeer, grant: Grant, roles: Roles, action: str, renewed: bool
    ) -> None:
        self._guard = guard
        self._peer = peer
        self._grant = grant
        self._roles = roles
        self._action = action
        self._renewed = renewed
        self.principal = grant.principal.name if renewed else ""

    def received(self, size: int) -> None:
        self._grant.principal.limiter.charge(size)

    def check(self, model: str) -> None:
        self._guard.check(self._peer, self._grant, self._roles, model, self._action)

    def sees(self, model: str) -> bool:
        return self._grant.principal.allows(self._roles, model)

    @contextmanager
    def changing(self, model: str) -> Iterator[None]:
        self.check(model)
        try:
            yield
        except BaseException as error:
            self._guard.changed(self._peer, self._grant, self._action, model, as_conch_error(error))
            raise
        self._guard.changed(self._peer, self._grant, self._action, model, None)

    def renew(self) -> None:
        if self._renewed:
            self._grant = self._guard.renew(self._peer, self._grant, self._roles, self._action)


class ContextPeer:
    """The client of a call, from its `grpc.ServicerContext`; see `conch.access.access_guard.Peer`."""

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
