"""Access control of the console: the access policy, sessions, and the checks of every request.

Without ``--access-policy`` the console has a policy of its own: viewer and admin with tokens, or everyone.
A key or a token is exchanged for a session cookie. Requests that change something must come from the page
of the console: browsers mark them with `Sec-Fetch-Site` or `Origin`, and it adds a header that no form can.

Owns: the sessions. Threads and locks: event loop only, but `changed`.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from hmac import compare_digest
from http.cookies import CookieError, SimpleCookie
from typing import Final, NamedTuple, Protocol

from conch.access.access_guard import AUTHORIZATION, SCHEME, Access, AccessGuard
from conch.access.policy_file import Policy, PrincipalEntry
from conch.access.policy_state import PolicyState
from conch.access.principals import ANY, CONTROLS, EVERY_MODEL, INFERS, OPEN, READS, Grant, Role, Roles
from conch.access.request_limits import RequestLimits
from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import (
    ConchError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from conch_console.console_options import ConsoleOptions

log = logging.getLogger(__name__)

COOKIE: Final = "conch-console"
KNOWN_COOKIE: Final = "conch-console-known"
"""Cookie of a browser in which a principal has logged in before."""
OWN_HEADER: Final = b"x-conch-console"
READING: Final = "console"
"""Name of read operations in the audit log."""

MOST_SESSIONS: Final = 100
"""Limit of sessions of one principal."""

_SESSION_NS = 12 * 3600 * 10**9
_KNOWN_S = 30 * 24 * 3600
_WRONG_LOGINS, _WRONG_IN_ALL, _LOGINS, _LOGINS_NS = 5, 100, 20, 60 * 10**9
_EVERYWHERE, _KNOWN = "everywhere", "known browsers"
_MOST_CLIENTS = 1000
_HOST = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::[0-9]+)?|([^\[\]:]+)(?::[0-9]+)?")


class Need(Enum):
    """Permission that a route needs: roles of which one suffices."""

    roles: Roles

    NOTHING = "nothing", OPEN
    """Pages and login."""
    READ = "read", READS
    """For all models, as pages show all."""
    CONTROL = "control", CONTROLS
    """For the model in the path, or for all; only where the console allows control."""
    INFER = "infer", INFERS
    """For the model in the path; only where the console allows requests to models."""
    SETTINGS = "settings", CONTROLS
    """For all models, whatever the console allows; nothing is changed."""

    def __new__(cls, name: str, roles: Roles) -> Need:
        """Adds the roles to a member."""
        need = object.__new__(cls)
        need._value_ = name
        need.roles = roles
        return need


class Visitor(Protocol):
    """Client address and headers of a request; `HttpExchange` is one."""

    @property
    def client(self) -> str:
        """Address of the client."""

    @property
    def fields(self) -> Mapping[bytes, bytes]:
        """Headers, by their names in lower case."""

    def header_values(self, name: str) -> Sequence[str]:
        """All values of a header, by its name in lower case."""

    @property
    def length(self) -> int | None:
        """Bytes of the body; None if there is none, or in chunks."""

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """Names in the client's certificate."""


@dataclass(frozen=True, slots=True)
class ConsolePeer:
    """A visitor as the policy identifies it: by the credential of its session, or by its certificate."""

    client: str
    certificate_names: tuple[str, ...]
    credential: str = field(repr=False)
    sent: Sequence[str] = field(default=(), repr=False)

    def header_values(self, name: str) -> Sequence[str]:
        """The credential as other ports get it; a header of the browser counts for nothing, if it is one."""
        if self.ambiguous:
            return self.sent
        return (f"{SCHEME} {self.credential}",) if name == AUTHORIZATION and self.credential else ()

    @property
    def ambiguous(self) -> bool:
        """True if there are several credentials, which all ports refuse."""
        return len(self.sent) > 1


class User(NamedTuple):
    """The user of a request."""

    name: str
    """Name of the user in the log."""
    grant: Grant
    peer: ConsolePeer

    def allows(self, need: Need, model: str = "") -> bool:
        """True if the policy allows `need` for the model; without a name, for any model."""
        return self.grant.principal.allows(need.roles, model)


class MisdirectedError(PermissionDeniedError):
    """The request is for a host that this console is not."""

    http_status = 421


@dataclass(slots=True)
class _Session:
    credential: str = field(repr=False)
    ends_ns: int
    principal: str
    subject: str


class ConsoleAccess:
    """The access rules of one console.

    Args:
        options: Address of the console, and the kinds of requests that it allows.
        access: The server's access policy; None for one of the console's own.
        clock: Monotonic time in nanoseconds.

    Attributes:
        takes_login: True if there are credentials to log in with: an access policy, or tokens.
    """

    def __init__(
        self, options: ConsoleOptions, access: Access | None = None, clock: Clock = monotonic_ns
    ) -> None:
        self._options = options
        self._access = Access(PolicyState(_own_policy(options))) if access is None else access
        self._guard = AccessGuard(self._access, "console")
        self._credentials = (
            "a token of this console" if access is None else "a key or a token of the access policy"
        )
        self.takes_login = access is not None or options.tokens is not None
        self._clock = clock
        self._hosts = {host.lower() for host in (*options.hosts, options.address, "localhost")}
        self._sessions: dict[str, _Session] = {}
        self._secret = secrets.token_bytes(32)
        # Times of the last minute, by address and principal: of wrong credentials by address, in all, and of
        # browsers that a principal has used; of logins by address and principal.
        self._logins: dict[tuple[str, str], deque[int]] = {}

    def check_host(self, hosts: Sequence[str]) -> None:
        """Checks the values of the Host header.

        Raises:
            InvalidArgumentError: There is not one of them.
            MisdirectedError: It is not an address or a name of this console.
        """
        if len(hosts) != 1:
            raise InvalidArgumentError(f"a request must have one Host header, not {len(hosts)}")
        (host,) = hosts
        found = _HOST.fullmatch(host)
        if found is not None:
            name = (found[1] or found[2]).lower()
            if name in self._hosts or _is_address(name):  # an address can't be made to resolve elsewhere
                return
        raise MisdirectedError(
            f"'{host[:100]}' is not a name of this console; add it with --console-host if it is meant to be"
        )

    def check_origin(self, fields: Mapping[bytes, bytes]) -> None:
        """Raises PermissionDeniedError: a changing request does not come from the console's page."""
        site, origin = fields.get(b"sec-fetch-site"), fields.get(b"origin")
        own = origin is None or origin.partition(b"://")[2].lower() == fields.get(b"host", b"").lower()
        if site != b"same-origin" and (site is not None or origin is None):
            own = False
        if not own or fields.get(OWN_HEADER) != b"1":
            raise PermissionDeniedError("this may be asked for by the console's own page only")

    def user(self, visitor: Visitor) -> User | None:
        """The user of a request; None without valid credentials."""
        peer = self._peer(visitor)
        try:
            return _user(peer, self._access.grant(peer))
        except ConchError:
            return None

    def admit(self, visitor: Visitor, need: Need, action: str = READING, model: str = "") -> User:
        """The user of a request that may be answered; the policy's limits count it."""
        size = None if b"transfer-encoding" in visitor.fields else visitor.length or 0
        peer = self._peer(visitor)
        if not model or need in (Need.READ, Need.SETTINGS):
            model = EVERY_MODEL
        try:
            user = _user(peer, self._guard.admit(peer, need.roles, action, model, size=size))
        except UnauthenticatedError:
            if peer.ambiguous:
                raise
            self._sessions.pop(_cookie_value(visitor.fields), None)
            raise UnauthenticatedError(f"log in with {self._credentials}") from None
        if need is Need.CONTROL and not self._options.allow_control:
            raise PermissionDeniedError(
                "this console is read-only: the server runs without --console-allow-control"
            )
        if need is Need.INFER and not self._options.allow_infer:
            raise PermissionDeniedError(
                "this console sends no requests to models: the server runs without --console-allow-infer"
            )
        return user

    def renew(self, visitor: Visitor, user: User) -> User:
        """The user of a live stream that goes on. Raises ConchError: the user may not read any more."""
        if user.peer.credential and self._session(visitor.fields) is None:
            raise UnauthenticatedError("the session has ended")
        return user._replace(grant=self._guard.renew(user.peer, user.grant, READS, READING, EVERY_MODEL))

    def changed(self, user: User, action: str, model: str, error: ConchError | None) -> None:
        """Audits a change that was admitted, with its error if it failed; any thread."""
        self._guard.changed(user.peer, user.grant, action, model or EVERY_MODEL, error)

    def log_in(self, visitor: Visitor, credential: str) -> tuple[str, ...]:
        """Exchanges a key or a token for a session; returns the values of the Set-Cookie headers.

        Wrong credentials lock out an address, and in all every address, as they may come from many. Behind a
        proxy all visitors have its address. So a browser in which a principal has logged in before is locked
        out by wrong credentials of such browsers only, and only this principal can log in there meanwhile.
        """
        now = self._clock()
        if len(self._logins) >= _MOST_CLIENTS:
            self._logins = {
                client: times
                for client, times in self._logins.items()
                if times and now - times[-1] < _LOGINS_NS
            }
        address = visitor.client.rpartition(":")[0]
        counts = [
            (self._last_logins(address, "", now), _WRONG_LOGINS),
            (self._last_logins(_EVERYWHERE, "", now), _WRONG_IN_ALL),
        ]
        known = self._known(visitor.fields)
        own = self._last_logins(_KNOWN, known, now) if known else deque[int]()
        locked = [times[0] for times, most in counts if len(times) >= most]
        if locked and (not known or len(own) >= _WRONG_LOGINS):
            raise _too_many("wrong tokens", max(locked), now)
        try:
            if not credential or not self.takes_login:
                raise UnauthenticatedError("no credential")
            grant = self._guard.open(ConsolePeer(visitor.client, (), credential), ANY, "log_in")
            if locked and grant.name != known:
                raise UnauthenticatedError("another principal's credential")
        except UnauthenticatedError:
            for times in (*(times for times, _ in counts), own):
                times.append(now)
            log.warning("console: a wrong token from %s", visitor.client)
            raise UnauthenticatedError(f"this is not {self._credentials}") from None
        logins = self._last_logins(address, grant.name, now)
        if len(logins) >= _LOGINS:
            raise _too_many("logins", logins[0], now)
        logins.append(now)
        self._make_room(grant, now)
        name = secrets.token_urlsafe(32)
        self._sessions[name] = _Session(credential, now + _SESSION_NS, grant.name, grant.subject)
        principal = grant.name.encode().hex()
        mark = f"{principal}.{self._mark_of(principal)}"
        return self._cookie(name, _SESSION_NS // 10**9), self._cookie(mark, _KNOWN_S, KNOWN_COOKIE)

    def _known(self, fields: Mapping[bytes, bytes]) -> str:
        """The principal that has logged in with this browser before; empty for none."""
        principal, _, mark = _cookie_value(fields, KNOWN_COOKIE).partition(".")
        if not compare_digest(mark.encode(), self._mark_of(principal).encode()):
            return ""
        return bytes.fromhex(principal).decode()

    def _mark_of(self, principal: str) -> str:
        return hmac.digest(self._secret, principal.encode(), "sha256").hex()

    def _make_room(self, grant: Grant, now: int) -> None:
        """Ends sessions that are over; of a principal with too many its oldest, the caller's own first."""
        for name, session in list(self._sessions.items()):
            if session.ends_ns <= now:
                del self._sessions[name]
        own = [name for name, session in self._sessions.items() if session.principal == grant.name]
        if len(own) >= MOST_SESSIONS:
            oldest = (name for name in own if self._sessions[name].subject == grant.subject)
            del self._sessions[next(oldest, own[0])]

    def log_out(self, fields: Mapping[bytes, bytes]) -> str:
        """Ends a session; returns the value of the Set-Cookie header that removes its cookie."""
        self._sessions.pop(_cookie_value(fields), None)
        return self._cookie("", 0)

    def _session(self, fields: Mapping[bytes, bytes]) -> _Session | None:
        session = self._sessions.get(_cookie_value(fields))
        return None if session is None or session.ends_ns <= self._clock() else session

    def _peer(self, visitor: Visitor) -> ConsolePeer:
        session = self._session(visitor.fields)
        credential = "" if session is None else session.credential
        sent = visitor.header_values(AUTHORIZATION)
        return ConsolePeer(visitor.client, visitor.certificate_names, credential, sent)

    def _last_logins(self, address: str, principal: str, now: int) -> deque[int]:
        """Times of an address' logins as a principal in the last minute; of wrong ones without a name."""
        times = self._logins.setdefault((address, principal), deque())
        while times and now - times[0] >= _LOGINS_NS:
            times.popleft()
        return times

    def _cookie(self, value: str, seconds: int, name: str = COOKIE) -> str:
        secure = "" if self._options.tls is None else "; Secure"
        return f"{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"


def _too_many(what: str, first: int, now: int) -> ResourceExhaustedError:
    error = ResourceExhaustedError(f"too many {what}; try again in a minute")
    error.retry_after_ms = max((first + _LOGINS_NS - now) // 10**6, 1)
    return error


def _user(peer: ConsolePeer, grant: Grant) -> User:
    return User(f"{grant.name}@{peer.client.rpartition(':')[0]}", grant, peer)


def _own_policy(options: ConsoleOptions) -> Policy:
    """The policy of a console without one: its tokens, or everyone who reaches it."""
    tokens = options.tokens
    if tokens is None:
        return Policy((_entry("certificate" if options.mutual else "local", "", Role),))
    entries = (("viewer", tokens.viewer, (Role.READ,)), ("admin", tokens.admin, Role))
    return Policy(tuple(_entry(name, token, roles) for name, token, roles in entries if token))


def _entry(name: str, token: str, roles: Iterable[Role]) -> PrincipalEntry:
    """A principal with roles for all models; anonymous without a token."""
    keys = (sha256(token.encode()).digest(),) if token else ()
    return PrincipalEntry(
        name, keys, {}, (), not token, dict.fromkeys(roles, (EVERY_MODEL,)), RequestLimits()
    )


def _cookie_value(fields: Mapping[bytes, bytes], name: str = COOKIE) -> str:
    try:
        morsel = SimpleCookie(fields.get(b"cookie", b"").decode("latin-1")).get(name)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
