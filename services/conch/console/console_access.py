"""Who may use the console for what: sessions, and the checks of every request.

A token is exchanged for a session cookie. Requests that change something must come from the console's own
page: browsers mark them with `Sec-Fetch-Site` or `Origin`, and the page adds a header that no form can.
The host must be a name of this console, or a page elsewhere could have its own name resolve to this machine.

Owns: the sessions. Threads and locks: event loop only. Used by: `console_routes`.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Final

from conch.console.console_options import ConsoleOptions
from conch.console.console_users import Call, Need, User, Users
from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import (
    ConchError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)

log = logging.getLogger(__name__)

COOKIE: Final = "conch-console"
OWN_HEADER: Final = b"x-conch-console"

_SESSION_NS = 12 * 3600 * 10**9
_MOST_SESSIONS = 1000
_TRIES, _TRIES_NS = 5, 60 * 10**9
_MOST_CLIENTS = 1000
_HOST = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::[0-9]+)?|([^\[\]:]+)(?::[0-9]+)?")


class MisdirectedError(PermissionDeniedError):
    """The request is for a host that this console is not."""

    http_status = 421


@dataclass(slots=True)
class _Session:
    token: str
    user: User
    ends_ns: int


class ConsoleAccess:
    """The access rules of one console.

    Args:
        options: Where it listens, and what it allows.
        users: Finds its users.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(self, options: ConsoleOptions, users: Users, clock: Clock = monotonic_ns) -> None:
        self._options = options
        self._users = users
        self._clock = clock
        self._hosts = {host.lower() for host in (*options.hosts, options.address, "localhost")}
        self._sessions: dict[str, _Session] = {}
        self._tries: dict[str, deque[int]] = {}

    def check_host(self, fields: Mapping[bytes, bytes]) -> None:
        """Raises MisdirectedError: the Host header is not an address or a name of this console."""
        host = fields.get(b"host", b"").decode("latin-1")
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

    def user(self, call: Call) -> User | None:
        """The user of a request; None without a session where one is needed."""
        session = self._session(call.fields)
        if session is None:
            return None if self._options.logs_in else self._users.find(call, "")
        user = self._users.renew(call, session.token, session.user)
        if user is not None:
            session.user = user
        return user

    def check(self, call: Call, need: Need, action: str = "", model: str = "", size: int = 0) -> User | None:
        """The user of a request that may be answered.

        Args:
            call: The request.
            need: What its route needs.
            action: What it does, for the audit log.
            model: The model that it names, or empty.
            size: Bytes of its body.

        Raises:
            UnauthenticatedError: There is no session.
            PermissionDeniedError: The user may not do this, or the console allows it to no one.
            ResourceExhaustedError: The user is over a limit of the access policy.
        """
        user = self.user(call)
        if need is Need.NOTHING:
            return user
        if user is None:
            raise UnauthenticatedError(self._users.log_in_text)
        self._users.check(call, user, need, action, model, size)
        if need is Need.CONTROL and not self._options.allow_control:
            raise PermissionDeniedError(
                "this console is read-only: the server runs without --console-allow-control"
            )
        if need is Need.INFER and not self._options.allow_infer:
            raise PermissionDeniedError(
                "this console sends no requests to models: the server runs without --console-allow-infer"
            )
        return user

    def changed(self, call: Call, user: User, action: str, model: str, error: ConchError | None) -> None:
        """Audits a change, with its error if it failed."""
        self._users.changed(call, user, action, model, error)

    def log_in(self, token: str, call: Call) -> str:
        """Exchanges a token for a session; returns the value of the Set-Cookie header.

        Raises:
            ResourceExhaustedError: There were too many wrong tokens.
            UnauthenticatedError: The token is wrong.
        """
        now = self._clock()
        tries = self._tries_of(call.client.rpartition(":")[0], now)
        if len(tries) >= _TRIES:
            error = ResourceExhaustedError("too many wrong tokens; try again in a minute")
            error.retry_after_ms = max((tries[0] + _TRIES_NS - now) // 10**6, 1)
            raise error
        user = self._users.find(call, token) if token and self._options.logs_in else None
        if user is None:
            tries.append(now)
            log.warning("console: a wrong token from %s", call.client)
            raise UnauthenticatedError("this is not a token of this console")
        for known, session in list(self._sessions.items()):
            if session.ends_ns <= now:
                del self._sessions[known]
        while len(self._sessions) >= _MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        name = secrets.token_urlsafe(32)
        self._sessions[name] = _Session(token, user, now + _SESSION_NS)
        return self._cookie(name, _SESSION_NS // 10**9)

    def log_out(self, fields: Mapping[bytes, bytes]) -> str:
        """Ends a session; returns the value of the Set-Cookie header that removes its cookie."""
        self._sessions.pop(_cookie_value(fields), None)
        return self._cookie("", 0)

    def _session(self, fields: Mapping[bytes, bytes]) -> _Session | None:
        session = self._sessions.get(_cookie_value(fields))
        return None if session is None or session.ends_ns <= self._clock() else session

    def _tries_of(self, host: str, now: int) -> deque[int]:
        if len(self._tries) >= _MOST_CLIENTS:
            self._tries = {
                each: tries for each, tries in self._tries.items() if tries and now - tries[-1] < _TRIES_NS
            }
        tries = self._tries.setdefault(host, deque())
        while tries and now - tries[0] >= _TRIES_NS:
            tries.popleft()
        return tries

    def _cookie(self, value: str, seconds: int) -> str:
        secure = "" if self._options.tls is None else "; Secure"
        return f"{COOKIE}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"


def _cookie_value(fields: Mapping[bytes, bytes]) -> str:
    try:
        morsel = SimpleCookie(fields.get(b"cookie", b"").decode("latin-1")).get(COOKIE)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
