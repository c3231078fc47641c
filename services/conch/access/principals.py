"""Roles, principals and grants: what a caller may do, and with which models.

`OPEN` to `CONTROLS` are the role sets of the table of operations. Threads and locks: any thread; a principal
puts patterns together when they are first needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import translate

from conch.access.request_limits import Limiter
from conch.core.errors import PermissionDeniedError

EVERY_MODEL = "*"
"""Stands for a model's name if a call concerns all models, or the server as a whole."""

_NAMESPACE = "::"


class Role(StrEnum):
    """Permission of a principal for models: to infer, to read or to control."""

    INFER = "infer"
    READ = "read"
    CONTROL = "control"


Roles = frozenset[Role]
"""The roles of which one suffices for a call."""

OPEN: Roles = frozenset()
"""Health of the server: no credentials."""
ANY: Roles = frozenset(Role)
INFERS: Roles = frozenset((Role.INFER,))
READS: Roles = frozenset((Role.READ, Role.CONTROL))
CONTROLS: Roles = frozenset((Role.CONTROL,))


class ModelPatterns:
    """Names with ``*`` for any characters and ``?`` for one.

    A pattern without ``::`` is compared with the name behind a namespace, ``/repository::model``, and one
    with it with the whole. Namespaces are places of repositories, which have a slash, and names of models
    have none: so a model whose own name has ``::`` is not taken for one in a namespace.

    Attributes:
        some: True if there is any pattern.
    """

    __slots__ = ("_bare", "_every", "_full", "some")

    def __init__(self, patterns: Iterable[str]) -> None:
        listed = tuple(patterns)
        self.some = bool(listed)
        self._every = EVERY_MODEL in listed
        self._bare = _any_of(each for each in listed if _NAMESPACE not in each)
        self._full = _any_of(each for each in listed if _NAMESPACE in each)

    def match(self, model: str) -> bool:
        """True if a pattern matches a model; `EVERY_MODEL` matches only itself."""
        if self._every:
            return True
        if model == EVERY_MODEL:
            return False
        _, slash, last = model.rpartition("/")
        bare = last.partition(_NAMESPACE)[2] if slash else model
        return self._bare.fullmatch(bare) is not None or self._full.fullmatch(model) is not None


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    # Brackets are no characters of a class here.
    return re.compile("|".join(translate(each.replace("[", "[[]")) for each in patterns) or "(?!)")


class Principal:
    """A caller that the policy names.

    Args:
        name: Its name in logs and metrics.
        models: Patterns of the models of each role.
        limiter: Its limits, shared by all its callers.
    """

    __slots__ = ("_models", "_patterns", "limiter", "name")

    def __init__(self, name: str, models: Mapping[Role, Iterable[str]], limiter: Limiter) -> None:
        self.name = name
        self.limiter = limiter
        self._models = models
        self._patterns: dict[Roles, ModelPatterns] = {}  # a few sets of roles

    def allows(self, roles: Roles, model: str = "") -> bool:
        """True if the principal has one of the roles: for the model or, without a name, for any model."""
        patterns = self._patterns.get(roles)
        if patterns is None:
            listed = [each for role in Role if role in roles for each in self._models.get(role, ())]
            patterns = self._patterns[roles] = ModelPatterns(listed)
        return patterns.match(model) if model else patterns.some


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights of one caller, by its credentials.

    Attributes:
        principal: The principal that it acts as.
        subject: The caller in its own issuer's words: subject of a token, name of a certificate; else empty.
        expires_s: Seconds since 1970 after which the credentials end.
        epoch: The state of the policy that gave it; see `AccessGuard.renew`.
        unsized: True for a request that was counted before its size was known, such as the first of a stream.
    """

    principal: Principal
    subject: str = ""
    expires_s: float = float("inf")
    epoch: object = None
    unsized: bool = False

    @property
    def name(self) -> str:
        """Name of the principal."""
        return self.principal.name

    def pay_load(self) -> None:
        """Pays for a cold load. Raises ResourceExhaustedError: the principal has none left for now."""
        self.principal.limiter.take_load()

    def check(self, roles: Roles, model: str = "") -> None:
        """Raises PermissionDeniedError unless the principal has one of the roles, for the model if named.

        The text is the same for models that exist and for others.
        """
        if roles and not self.principal.allows(roles, model):
            raise PermissionDeniedError(_denial(self.principal.name, roles, model))


def _denial(principal: str, roles: Roles, model: str) -> str:
    needed = " or ".join(f"'{role}'" for role in Role if role in roles)
    where = ""
    if model == EVERY_MODEL:
        where = " for all models"
    elif model:
        where = f" for model '{model}'"
    return f"principal '{principal}' may not do this: it needs the role {needed}{where}"
