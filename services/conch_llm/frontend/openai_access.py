"""Access control of OpenAI's routes: API keys, or the access policy, and keys of restricted routes.

Threads and locks: event loop only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hmac import compare_digest

from conch.access.access_guard import AUTHORIZATION, Access, AccessGuard, PortRules, Restrictions
from conch.access.principals import INFERS, Roles
from conch.core.errors import ConchError, UnauthenticatedError
from conch.frontends.http.http_exchange import HttpExchange
from conch_llm.frontend.model_names import ModelNames, NamedModel

API_KEYS = ("api-key", "x-api-key")
"""Headers with a key, as Azure's clients and Anthropic's send it."""
_REFUSAL = "This API is restricted, expecting header '{key}' with valid value"
_BEARER = "bearer "


class _Peer:
    """The client of a request, whose key may come in either header."""

    def __init__(self, exchange: HttpExchange) -> None:
        self._exchange = exchange
        self.client = exchange.client
        self.certificate_names = exchange.certificate_names

    def header_values(self, name: str) -> Sequence[str]:
        values = self._exchange.header_values(name)
        if name == AUTHORIZATION and not values:
            return [f"Bearer {key}" for header in API_KEYS for key in self._exchange.header_values(header)]
        return values


class OpenAiAccess:
    """The checks of one port's requests.

    Args:
        access: The access policy; None without one.
        restrictions: Categories of routes that need a key of their own.
        keys: API keys of which callers need one; empty for none, and with a policy, whose keys count.
        names: The models.
    """

    def __init__(
        self, access: Access | None, restrictions: Restrictions, keys: Iterable[str], names: ModelNames
    ) -> None:
        self.guard = AccessGuard(access, "openai", PortRules(restrictions, _REFUSAL))
        self._keys = tuple(key.encode() for key in keys)
        self._names = names

    def admit(self, exchange: HttpExchange, category: str, roles: Roles, action: str, model: str) -> None:
        """Identifies the caller before its body is read.

        Raises:
            UnauthenticatedError: It has no valid key.
            PermissionDeniedError: It lacks the role.
            ResourceExhaustedError: It is over a limit.
        """
        if roles and self._keys:
            self._check_key(exchange)
        if self.guard.checks(roles, category):
            size = None if b"transfer-encoding" in exchange.fields else exchange.length or 0
            grant = self.guard.admit(_Peer(exchange), roles, action, model, size=size, category=category)
            if self.guard.identifies:
                exchange.access = grant

    def model(self, exchange: HttpExchange, name: str, roles: Roles = INFERS) -> NamedModel | None:
        """The model of a name, if the caller may use it; None if a request loads it, see `ModelNames.find`.

        Raises:
            PermissionDeniedError: It may not, also where there is no such model.
            ConchError: There is none, or it is not ready.
        """
        grant = exchange.access
        try:
            found = self._names.find(name, lambda model: self.shows(exchange, roles, model))
        except ConchError:
            if grant is not None:
                self.guard.check(exchange, grant, roles, "infer", name)
            raise
        if grant is not None:
            self.guard.check(exchange, grant, roles, "infer", name if found is None else found.own_name)
        return found

    def shows(self, exchange: HttpExchange, roles: Roles, model: str) -> bool:
        """True if the caller may see a model."""
        grant = exchange.access
        return grant is None or grant.principal.allows(roles, model)

    def _check_key(self, exchange: HttpExchange) -> None:
        given = [
            value[len(_BEARER) :].strip() if value[: len(_BEARER)].lower() == _BEARER else ""
            for value in exchange.header_values(AUTHORIZATION)
        ]
        given += [key for header in API_KEYS for key in exchange.header_values(header)]
        if not given:
            raise UnauthenticatedError(
                "No API key was given: send it as 'Authorization: Bearer KEY', or as 'api-key: KEY' or "
                "'x-api-key: KEY'"
            )
        if len(given) > 1:
            raise UnauthenticatedError("More than one API key was given: send one")
        shown = given[0].encode("latin-1")
        valid = False
        for key in self._keys:
            valid |= compare_digest(shown, key)
        if not valid:
            raise UnauthenticatedError("Incorrect API key provided")
