"""Who the users of the console are: holders of its two tokens, or principals of the access policy.

Without tokens and policy each caller is an admin: it is on this machine, or has a certificate.
Threads and locks: event loop; a change is audited on it, too. Used by: `console_access`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from hmac import compare_digest
from typing import Final, Protocol

from conch.access.access_guard import AUTHORIZATION, Access
from conch.access.principals import CONTROLS, EVERY_MODEL, INFERS, READS, Grant, Roles
from conch.console.console_options import ConsoleOptions
from conch.core.errors import ConchError, PermissionDeniedError, UnauthenticatedError


class Role(IntEnum):
    """What a user may do; a higher role may do what lower ones may."""

    VIEWER = 1
    ADMIN = 2


class Need(IntEnum):
    """What a route needs."""

    NOTHING = 0
    """Pages and login."""
    READ = 1
    CONTROL = 2
    """An admin, where control is allowed."""
    INFER = 3
    """An admin, where requests to models are allowed."""
    ADMIN = 4
    """An admin, whatever is allowed; nothing is changed."""


_ROLES: Final[Mapping[Need, Roles]] = {
    Need.READ: READS,
    Need.CONTROL: CONTROLS,
    Need.INFER: INFERS,
    Need.ADMIN: CONTROLS,
}
"""Roles of the access policy of which one suffices."""


class Call(Protocol):
    """A request, as far as it says who has sent it."""

    fields: Mapping[bytes, bytes]
    client: str

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """Names in the client's certificate; none without one."""


@dataclass(frozen=True, slots=True)
class User:
    """The user of a request.

    Attributes:
        name: As the log names it.
        role: What it may do at most.
        grant: What the access policy grants it; None without a policy.
    """

    name: str
    role: Role
    grant: Grant | None = None

    @property
    def controls(self) -> bool:
        """Whether it may change any model."""
        if self.grant is None:
            return self.role is Role.ADMIN
        return self.grant.principal.allows(CONTROLS)

    @property
    def infers(self) -> bool:
        """Whether it may send requests to any model."""
        if self.grant is None:
            return self.role is Role.ADMIN
        return self.grant.principal.allows(INFERS)


class Users(Protocol):
    """Finds users by their credentials, and says what they may do."""

    @property
    def log_in_text(self) -> str:
        """What a caller without a session is told."""

    def find(self, call: Call, token: str) -> User | None:
        """The user with a token; with an empty one, of the call itself. None if there is none."""

    def renew(self, call: Call, token: str, user: User) -> User | None:
        """The user of a session now; None if the credentials hold no more."""

    def check(self, call: Call, user: User, need: Need, action: str, model: str, size: int) -> None:
        """Raises ConchError: the user may not do this, or too much of it."""

    def changed(self, call: Call, user: User, action: str, model: str, error: ConchError | None) -> None:
        """Audits a change, with its error if it failed."""


class TokenUsers:
    """The users of a console with tokens, or without any protection but its address."""

    log_in_text = "log in with a token of this console"

    def __init__(self, options: ConsoleOptions) -> None:
        self._options = options

    def find(self, call: Call, token: str) -> User | None:
        """See `Users`."""
        tokens, host = self._options.tokens, call.client.rpartition(":")[0]
        if tokens is None:
            return User(f"{'certificate' if self._options.mutual else 'local'}@{host}", Role.ADMIN)
        given = token.encode()
        # Both are compared whatever the first says, so that the time tells nothing.
        admin, viewer = (
            compare_digest(given, each.encode()) and bool(each) for each in (tokens.admin, tokens.viewer)
        )
        role = Role.ADMIN if admin else Role.VIEWER if viewer else None
        return None if role is None else User(f"{role.name.lower()}@{host}", role)

    def renew(self, call: Call, token: str, user: User) -> User | None:
        """See `Users`: tokens hold as long as the server."""
        return user

    def check(self, call: Call, user: User, need: Need, action: str, model: str, size: int) -> None:
        """See `Users`."""
        if need > Need.READ and user.role < Role.ADMIN:
            raise PermissionDeniedError("this needs the admin token; you are logged in as viewer")

    def changed(self, call: Call, user: User, action: str, model: str, error: ConchError | None) -> None:
        """See `Users`: the log has all changes."""


class PolicyUsers:
    """The principals of the access policy.

    Pages show all models, so reading needs the role for all of them, as the metrics port does. The anonymous
    principal does not count: a browser shall ask who its user is.
    """

    log_in_text = "log in with a key or a token of the access policy"

    def __init__(self, access: Access) -> None:
        self._access = access
        self._guard = access.guard("console")

    def find(self, call: Call, token: str) -> User | None:
        """See `Users`."""
        try:
            grant = self._access.grant(_Credentials(call, token))
        except UnauthenticatedError:
            return None
        if not token and not call.certificate_names:
            return None
        admin = grant.principal.allows(CONTROLS, EVERY_MODEL)
        host = call.client.rpartition(":")[0]
        return User(f"{grant.name}@{host}", Role.ADMIN if admin else Role.VIEWER, grant)

    def renew(self, call: Call, token: str, user: User) -> User | None:
        """See `Users`."""
        holds = user.grant is not None and self._access.holds(user.grant)
        return user if holds else self.find(call, token)

    def check(self, call: Call, user: User, need: Need, action: str, model: str, size: int) -> None:
        """See `Users`."""
        assert user.grant is not None
        named = model if need in (Need.CONTROL, Need.INFER) else ""
        self._guard.next(_Credentials(call, ""), user.grant, _ROLES[need], named or EVERY_MODEL, action, size)

    def changed(self, call: Call, user: User, action: str, model: str, error: ConchError | None) -> None:
        """See `Users`."""
        assert user.grant is not None
        self._guard.changed(_Credentials(call, ""), user.grant, action, model, error)


class _Credentials:
    """A call with the token of its session, as the access policy looks at it."""

    def __init__(self, call: Call, token: str) -> None:
        self.client = call.client
        self.certificate_names = call.certificate_names
        self._token = token

    def header(self, name: str) -> str:
        """The token as a header; see `Peer`."""
        return f"Bearer {self._token}" if name == AUTHORIZATION and self._token else ""
