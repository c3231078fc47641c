"""The checks of calls: `Access` is the access policy of a server, and each port has an `AccessGuard`.

A guard holds what protects its port: the access policy, restricted protocols and APIs, a token of the port's
own, and which clients may bring files of models. Most ports ask it twice: a message is received from admitted
callers only, so that others can't fill the server's memory, and often only the message names the model.

    =======  =====================================  ==========================================================
    port     when the headers have arrived          when the message is decoded
    =======  =====================================  ==========================================================
    gRPC     `admit`                                `check`; for each request of a stream `next`
    HTTP     `check_key`; `admit` for the model in  `check`, for operations only: some bodies tell which role
             the path, if any                       is needed, or that all models are meant
    control  `admit`                                `check`; before each message of a watch `renew`
    console  `admit` for the model in the path, or  nothing; before each event of a live page `renew`
             for all
    metrics  `admit` for all models                 nothing
    =======  =====================================  ==========================================================

`MeteredAdmission` calls `enter` for each inference request. After a change, also one that failed, the port
calls `changed`. Without any rules a port asks nothing per request.

Owns: the state of the policy in effect, the limiters and the counts of refusals.
Threads and locks: calls on any thread; `Access` swaps the whole state at once, and has a lock for its counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hmac import compare_digest
from typing import Protocol

from conch.access.policy_state import PolicyState
from conch.access.principals import EVERY_MODEL, Grant, Principal, Role, Roles
from conch.access.request_limits import Limiter, RequestLimits
from conch.core.clock import wall_seconds
from conch.core.errors import (
    ConchError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from conch.observability.logging.audit_log import OK, AuditLog, AuditRecord
from conch.observability.metrics.access_metrics import AccessCounts

AUTHORIZATION = "authorization"
SCHEME = "bearer"

Restrictions = Mapping[str, tuple[str, str]]
"""Access category to the (key, value) that its calls must carry as metadata or header."""

_UPLOADS = "model-repository"  # the category of loads
_ADDED_BY_PROXIES = frozenset(("forwarded", "via", "x-forwarded-for", "x-real-ip"))
_REASONS: Mapping[str, str] = {
    PermissionDeniedError.code: "forbidden",
    ResourceExhaustedError.code: "limited",
}
_NO_CREDENTIALS = "unauthenticated"
_MISSING = (
    "no credentials: send a key or a token as 'authorization: Bearer ...', or a client certificate that the "
    "access policy names"
)
_SEVERAL = "there is more than one 'authorization' header: send one"


class Client(Protocol):
    """The client of a call."""

    @property
    def client(self) -> str:
        """Address of the client."""


class Peer(Client, Protocol):
    """The client of a call, with what identifies it."""

    def header_values(self, name: str) -> Sequence[str]:
        """All values of a header or of a text key of metadata, by its name in lower case."""

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """Names in the client's certificate, such as ``cn:web`` or ``uri:spiffe://a/b``; none without one."""


class Counts:
    """Counters by name; any thread."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(names, 0)

    def add(self, name: str) -> None:
        """Counts one."""
        with self._lock:
            self._counts[name] += 1

    def snapshot(self) -> dict[str, int]:
        """The counts now."""
        with self._lock:
            return dict(self._counts)


class RestrictedError(UnauthenticatedError):
    """A call of a restricted category does not carry its key; the statuses are Triton's."""

    grpc_status = UnavailableError.grpc_status
    http_status = PermissionDeniedError.http_status


def _everything(name: str) -> Grant:
    """The grant of a caller to whom no policy applies."""
    return Grant(Principal(name, dict.fromkeys(Role, EVERY_MODEL), Limiter(name, RequestLimits())))


EVERYTHING = _everything("")
"""The grant of a caller that no rule identifies."""


class OwnToken:
    """A token of one port, whose holders may do everything there; it is valid beside a policy.

    Args:
        token: The token.
        principal: The name of its holders in the audit log.
        missing: Text for a caller without a token, if there is no policy.
        wrong: Text for a caller with another one, if there is no policy.
    """

    def __init__(self, token: str, principal: str, missing: str, wrong: str) -> None:
        self.grant = _everything(principal)
        self.missing = missing
        self.wrong = wrong
        self._expected = f"Bearer {token}".encode()

    def is_shown(self, sent: Sequence[str]) -> bool:
        """True if the values of the header 'authorization' are this token and nothing else."""
        return len(sent) == 1 and compare_digest(sent[0].encode(errors="backslashreplace"), self._expected)


@dataclass(frozen=True, slots=True)
class PortRules:
    """Restrictions, upload rule and token of one port, checked beside the access policy.

    Attributes:
        restrictions: Categories of calls that need a key.
        refusal: Text for a call without its key; ``{key}`` stands for the key's name.
        any_upload: True if clients may send a model's files with a load even where nothing identifies them.
        token: The port's own token; None for none.
    """

    restrictions: Restrictions = field(default_factory=dict)
    refusal: str = "{key}"
    any_upload: bool = False
    token: OwnToken | None = None


class Access:
    """The access policy of a server.

    Args:
        state: The policy in effect at first.
        audit: Log of refusals and changes; None for none.
        wall: Seconds since 1970.

    Attributes:
        state: The policy in effect. Another one holds from the next call on, and from the next request of
            each open stream.
        reloads: Counts reloads of the policy by result.
        fetches: Counts fetches of signing keys by result.
    """

    def __init__(
        self, state: PolicyState, audit: AuditLog | None = None, wall: Callable[[], float] = wall_seconds
    ) -> None:
        self.state = state
        self._audit = audit
        self._wall = wall
        self._refusals = Counts((_NO_CREDENTIALS, *_REASONS.values()))
        self.reloads = Counts(("ok", "failed"))
        self.fetches = Counts(("ok", "failed"))

    def counts(self) -> AccessCounts:
        """Counters of refusals, of requests by principal, of reloads and of fetches."""
        requests = {name: limiter.requests for name, limiter in self.state.limiters.items()}
        return AccessCounts(
            self._refusals.snapshot(), requests, self.reloads.snapshot(), self.fetches.snapshot()
        )

    def grant(self, peer: Peer) -> Grant:
        """Identifies a caller. Raises UnauthenticatedError: it has no valid credentials."""
        state = self.state
        given = peer.header_values(AUTHORIZATION)
        if len(given) > 1:  # a proxy may have checked another one than this server would
            raise UnauthenticatedError(_SEVERAL)
        if given and given[0]:
            scheme, _, credential = given[0].partition(" ")
            if scheme.lower() != SCHEME or not credential:
                raise UnauthenticatedError("the header 'authorization' must be 'Bearer' and a key or a token")
            return state.grant_of(credential.strip(), self._wall())
        for name in peer.certificate_names:
            found = state.certificates.get(name)
            if found is not None:
                return found
        if state.anonymous is not None:
            return state.anonymous
        raise UnauthenticatedError(_MISSING)

    def holds(self, grant: Grant) -> bool:
        """True if a grant is of the policy in effect and its credentials have not expired."""
        return grant.epoch is self.state and grant.expires_s > self._wall()

    def count_refusal(self, error: ConchError) -> None:
        """Counts a refused call by its reason."""
        self._refusals.add(_REASONS.get(error.code, _NO_CREDENTIALS))

    def audit(self, record: AuditRecord) -> None:
        """Writes a line of the audit log, if there is one."""
        if self._audit is not None:
            self._audit.add(record)


class AccessGuard:
    """The checks of the calls of one port; any thread.

    A port keeps the grant of a call until it ends; `Grant.principal.allows` tells which entries of a listing
    the caller may see:

        guard = AccessGuard(access, "grpc")
        grant = guard.admit(peer, CONTROLS, "load_model")
        guard.check(peer, grant, CONTROLS, "load_model", "digits")
        guard.changed(peer, grant, "load_model", "digits", None)

    All methods have their arguments in one order: the client, its grant, the roles of which one suffices, the
    name of the operation, for the audit log, and the model's name: `EVERY_MODEL` for all, empty if the role
    for any model suffices. Refusals by the policy are counted and audited. They are errors of
    `conch.core.errors`, with gRPC and HTTP status and, over a limit, the time to wait;
    `http.json_body.error_reply` makes a response of one.

    Args:
        access: The server's access policy; None for none.
        port: Its name in the audit log, such as ``grpc``.
        rules: Rules of the port beside the policy.

    Attributes:
        identifies: True if callers of calls with roles are identified, by credentials or as anonymous.
        restricted: Categories whose calls need a key.
    """

    def __init__(self, access: Access | None, port: str, rules: PortRules = PortRules()) -> None:
        self._access = access
        self._port = port
        self._rules = rules
        self._token = rules.token
        self.restricted = rules.restrictions
        self.identifies = access is not None or rules.token is not None
        # Loads with files bring code. Callers with a key or a role are those that the operator has chosen.
        self._any_upload = rules.any_upload or access is not None or _UPLOADS in rules.restrictions

    def checks(self, roles: Roles, category: str) -> bool:
        """True if `admit` may refuse calls with such roles and of such a category."""
        return (self.identifies and bool(roles)) or category in self.restricted

    def may_upload(self, client: str, headers: Iterable[str]) -> bool:
        """True if a client may load a model from files in the request, which may hold code.

        An address proves nothing, not even that of the loopback interface, which a proxy on this machine has.
        The permissions of a Unix socket are the operator's word for those who can open it.

        Args:
            client: Its address, such as ``ipv4:127.0.0.1:5`` or ``unix:``.
            headers: Names of its headers in lower case; those that proxies add speak of another client.
        """
        return self._any_upload or (client.startswith("unix:") and _ADDED_BY_PROXIES.isdisjoint(headers))

    def check_key(self, peer: Peer, category: str) -> None:
        """Checks the key of a restricted category, for ports with checks of their own before `admit`.

        Raises:
            RestrictedError: The call does not carry it.
        """
        key, value = self.restricted[category]
        expected = value.encode()
        for given in peer.header_values(key):
            if compare_digest(given.encode(errors="backslashreplace"), expected):
                return
        raise RestrictedError(self._rules.refusal.format(key=key))

    def open(self, peer: Peer, roles: Roles, action: str, model: str = "") -> Grant:
        """Identifies a caller and checks that it has one of the roles.

        Raises:
            UnauthenticatedError: It has no valid credentials.
            PermissionDeniedError: It has none of the roles.
        """
        grant: Grant | None = None
        access, token = self._access, self._token
        try:
            if token is not None and token.is_shown(shown := peer.header_values(AUTHORIZATION)):
                grant = token.grant
            elif access is not None:
                grant = access.grant(peer)
            elif token is not None:
                raise UnauthenticatedError(token.wrong if shown else token.missing)
            else:
                grant = EVERYTHING
            grant.check(roles, model)
        except ConchError as error:
            self._refuse(peer, grant, action, model, error)
            raise
        return grant

    def admit(
        self,
        peer: Peer,
        roles: Roles,
        action: str,
        model: str = "",
        *,
        size: int | None = 0,
        category: str = "",
    ) -> Grant:
        """As `open` and `check_key`, and applies the rates; `size` is in bytes, None if it is not known yet.

        For a stream it is called as it opens, with None as its size: that counts as the first request.
        `category` is the call's access category, or empty if the port has checked its key.

        Raises:
            ResourceExhaustedError: The principal is over a limit.
        """
        grant = EVERYTHING
        if self.identifies and roles:
            grant = self.open(peer, roles, action, model)
            self._take(peer, grant, action, model, size or 0)
            if size is None:
                grant = replace(grant, unsized=True)
        if category in self.restricted:
            self.check_key(peer, category)
        return grant

    def check(self, peer: Client, grant: Grant, roles: Roles, action: str, model: str) -> None:
        """Checks the role for a model. Raises PermissionDeniedError: the caller lacks it."""
        try:
            grant.check(roles, model)
        except ConchError as error:
            self._refuse(peer, grant, action, model, error)
            raise

    def renew(self, peer: Peer, grant: Grant, roles: Roles, action: str, model: str = "") -> Grant:
        """The grant of a caller whose call goes on; as `open` where policy or credentials have ended."""
        access = self._access
        # Without an epoch no policy has given it, and none takes it back.
        if access is None or grant.epoch is None or access.holds(grant):
            return grant
        return self.open(peer, roles, action, model)

    def next(self, peer: Peer, grant: Grant, roles: Roles, action: str, model: str, size: int) -> Grant:
        """As `admit` and `check`, for a further request of a stream; returns its grant."""
        grant = self.renew(peer, grant, roles, action)
        if grant.unsized:
            grant.principal.limiter.charge(size)
            grant = replace(grant, unsized=False)
        else:
            self._take(peer, grant, action, model, size)
        self.check(peer, grant, roles, action, model)
        return grant

    def enter(self, peer: Client, grant: Grant, action: str, model: str) -> Limiter:
        """Counts an inference request in flight; `Limiter.leave` must follow.

        Raises:
            ResourceExhaustedError: The principal has too many.
        """
        limiter = grant.principal.limiter
        try:
            limiter.enter()
        except ConchError as error:
            self._refuse(peer, grant, action, model, error)
            raise
        return limiter

    def changed(self, peer: Client, grant: Grant, action: str, model: str, error: ConchError | None) -> None:
        """Audits a change that the caller was allowed to ask for, with its error if it failed."""
        if self._access is not None:
            self._access.audit(self._record(peer, grant, action, model, error))

    def _take(self, peer: Client, grant: Grant, action: str, model: str, size: int) -> None:
        try:
            grant.principal.limiter.take_request(size)
        except ConchError as error:
            self._refuse(peer, grant, action, model, error)
            raise

    def _refuse(self, peer: Client, grant: Grant | None, action: str, model: str, error: ConchError) -> None:
        if self._access is not None:
            self._access.count_refusal(error)
            self._access.audit(self._record(peer, grant, action, model, error))

    def _record(
        self, peer: Client, grant: Grant | None, action: str, model: str, error: ConchError | None
    ) -> AuditRecord:
        return AuditRecord(
            ts=wall_seconds(),
            port=self._port,
            client=peer.client,
            principal="" if grant is None else grant.principal.name,
            subject="" if grant is None else grant.subject,
            action=action,
            model=model,
            code=OK if error is None else error.code,
            error="" if error is None else error.message,
        )


UNGUARDED = AccessGuard(None, "")
"""The guard of a port without rules."""
