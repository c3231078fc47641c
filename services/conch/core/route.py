"""Routes: which version of a model gets a request that names none, while several share its requests.

A `Route` never changes; other shares are another route. A choice costs no state and no lock. The first of
these rules that names a version decides:

1. A choice that the request has been given: it may be resolved several times, with one outcome.
2. The header or metadata `OVERRIDE`: a version number, ``candidate``, ``stable`` or a label.
3. The version that has the sequence of the request, whatever its share; not one that has its copy only.
4. A match rule: the candidate.
5. The share that the request's key falls into by a salted hash; without a key, by chance.

Rules 1 to 4 choose a version whatever its share. Versions that are not ready get nothing by rules 4 and 5:
stable has their share, and while it is not ready the highest ready version has its own.

A request that an ensemble or a model makes has override, key and chance of the outermost request, so that
one request of a client sees one side of all models with equal shares and salts. An override of the outermost
request that such a model has no ready version for is ignored.

A share only adds keys when it grows, as each key keeps its place in [0, `WHOLE`). Another salt places all
keys anew; for that the hash has to mix, which crc32 does not: another salt there is an XOR of all places.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, Protocol

from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.request import InferenceRequest
from conch.core.version_text import STABLE, parse_version

if TYPE_CHECKING:
    from conch.core.servable import Servable

WHOLE = 10_000
"""All requests, in the unit of shares: 1 is 0.01 %."""

OVERRIDE = "conch-version"
"""Header or metadata that names a version, where the route lets it."""

CANDIDATE = "candidate"

RoutedBy = Literal["weight", "sticky", "override", "sequence", "match"]
"""The rule that has chosen a version: by chance and shares, by a key and shares, and the others by name."""

_ATTRIBUTE = re.compile(r"(sequence|principal)|(header):([a-z0-9!#$%&'*+.^_`|~-]+)", re.IGNORECASE)


class _Granted(Protocol):
    @property
    def name(self) -> str: ...


class _Caller(Protocol):
    """The parts of `conch.core.request_log.Caller` that routes read."""

    @property
    def access(self) -> _Granted | None: ...

    def header(self, name: str) -> str: ...


class Chosen(Protocol):
    """The parts of a `Servable` that routes ask."""

    def continues(self, request: InferenceRequest) -> bool:
        """True if a request belongs to a live sequence of this version."""


class Mirror(Protocol):
    """Copies of stable's requests for another version."""

    version: int

    def before(self, stable: Servable, ready: Mapping[int, Servable]) -> Servable:
        """Wraps the stable version that serves a request, so that the request is copied."""

    def mirrors(self, correlation_id: int | str) -> bool:
        """True if a sequence of the other version is a copy."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """Something that requests may have.

    Attributes:
        kind: The sequence, the principal of the access policy, or a header or an entry of metadata.
        name: Name of the header, in lower case.
    """

    kind: Literal["sequence", "principal", "header"]
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Attribute:
        """Reads ``sequence``, ``principal`` or ``header:NAME``.

        Raises:
            InvalidArgumentError: The text is none of these.
        """
        found = _ATTRIBUTE.fullmatch(text)
        if found is None:
            raise InvalidArgumentError(f"'{text}' is none of 'sequence', 'principal' and 'header:NAME'")
        if found[2]:
            return cls("header", found[3].lower())
        return cls("sequence" if found[1].lower() == "sequence" else "principal")

    def read(self, request: InferenceRequest, caller: _Caller | None) -> str:
        """The value for a request of a caller; empty for none."""
        if self.kind == "sequence":
            return str(request.correlation_id or "")
        if caller is None:
            return ""
        if self.kind == "header":
            return caller.header(self.name)
        grant = caller.access
        return "" if grant is None else grant.name


@dataclass(frozen=True, slots=True)
class MatchRule:
    """Requests that always get the candidate; the pattern is a shell's (``*``, ``?``, ``[...]``)."""

    attribute: Attribute
    pattern: str

    @classmethod
    def parse(cls, text: str) -> MatchRule:
        """Reads ``header:NAME=PATTERN`` or ``principal:PATTERN``.

        Raises:
            InvalidArgumentError: The text is neither.
        """
        kind, _, rest = text.partition(":")
        if kind == "principal" and rest:
            return cls(Attribute("principal"), rest)
        named, equals, pattern = text.partition("=")
        if kind == "header" and equals and pattern:
            return cls(Attribute.parse(named), pattern)
        raise InvalidArgumentError(f"'{text}' is neither 'header:NAME=PATTERN' nor 'principal:PATTERN'")

    def matches(self, request: InferenceRequest, caller: _Caller | None) -> bool:
        """True if a request's attribute matches the pattern; False for a request without the attribute."""
        value = self.attribute.read(request, caller)
        return bool(value) and fnmatchcase(value, self.pattern)


def route_salt(group: str, rollout: str) -> bytes:
    """The salt of a rollout in a group of models, or of one model; the same on all servers of a fleet."""
    return blake2b(f"{group}\0{rollout}".encode(), digest_size=32).digest()


class RouteCounts:
    """Requests of one model that routes have divided, by version and rule; thread-safe."""

    __slots__ = ("_counts", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[int, RoutedBy], int] = {}

    def add(self, version: int, by: RoutedBy) -> None:
        """Counts a request."""
        with self._lock:
            self._counts[version, by] = self._counts.get((version, by), 0) + 1

    def snapshot(self) -> dict[tuple[int, RoutedBy], int]:
        """A copy."""
        with self._lock:
            return dict(self._counts)


@dataclass(frozen=True, slots=True)
class Route:
    """Divides the requests of one model without a version; see the module.

    Attributes:
        stable: The version that gets all that no other one does.
        candidate: The version of match rules and of ``candidate`` in an override; None for none.
        shares: Versions with their shares in `WHOLE`, in the order of their places; together at most that. A
            version may have several, and stable has the rest, too.
        salt: Places keys; see `route_salt`.
        sticky: The first of these that a request has is its key; a sequence is the last resort.
        match: Requests that get the candidate while it is ready.
        override: True if `OVERRIDE` counts.
        shadow: Gets copies of requests that the stable version serves; None for none.
        rollout: Number of the rollout that it belongs to, for traces; 0 for none.
        counts: Counts the requests; None for no counts.
    """

    stable: int
    candidate: int | None = None
    shares: tuple[tuple[int, int], ...] = ()
    salt: bytes = b""
    sticky: tuple[Attribute, ...] = ()
    match: tuple[MatchRule, ...] = ()
    override: bool = True
    shadow: Mirror | None = None
    rollout: int = 0
    counts: RouteCounts | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        shares = [share for _, share in self.shares]
        if min(shares, default=0) < 0 or sum(shares) > WHOLE:
            raise ValueError(f"shares must be at least 0 and together at most {WHOLE}, not {shares}")

    def traffic(self, version: int) -> float:
        """The percentage of requests that a version gets by its share."""
        if version == self.stable:
            others = sum(share for other, share in self.shares if other != version)
            return (WHOLE - others) / (WHOLE / 100)
        return sum(share for other, share in self.shares if other == version) / (WHOLE / 100)

    def choose(
        self, request: InferenceRequest, ready: Mapping[int, Chosen], labels: Mapping[str, int]
    ) -> int:
        """The version for a request; not ready only if none is, or if it is named by the override.

        Raises:
            InvalidArgumentError: The override names neither a version number nor a label.
        """
        kept: tuple[int, str, int] | None = getattr(request, "side", None)
        if kept is not None and kept[0] in ready:
            return kept[0]
        version, by = self._choose(request, ready, labels)
        request.side = version, by, self.rollout
        if self.counts is not None:
            self.counts.add(version, by)
        return version

    def _choose(
        self, request: InferenceRequest, ready: Mapping[int, Chosen], labels: Mapping[str, int]
    ) -> tuple[int, RoutedBy]:
        outer = request.outermost
        caller: _Caller | None = getattr(outer.context, "caller", None)
        wanted = caller.header(OVERRIDE) if self.override and caller is not None else ""
        if wanted:
            try:
                version = self._named(wanted, labels)
            except ConchError:
                if outer is request:
                    raise
            else:
                if outer is request or version in ready:
                    return version, "override"
        if request.correlation_id and not request.sequence_start:
            for version, model in ready.items():
                if model.continues(request) and not self._is_copied(request, version):
                    return version, "sequence"
        candidate = self.candidate
        for rule in self.match:
            if candidate is not None and candidate in ready and rule.matches(outer, caller):
                return candidate, "match"
        (place, by), bound = self._place(outer, caller), 0
        for version, share in self.shares:
            bound += share
            if place < bound:
                if version in ready:
                    return version, by
                break
        return self.stable if self.stable in ready or not ready else max(ready), by

    def _is_copied(self, request: InferenceRequest, version: int) -> bool:
        shadow = self.shadow
        return shadow is not None and shadow.version == version and shadow.mirrors(request.correlation_id)

    def _named(self, wanted: str, labels: Mapping[str, int]) -> int:
        if wanted == CANDIDATE and self.candidate is not None:
            return self.candidate
        if wanted in (CANDIDATE, STABLE):
            return self.stable
        return labels[wanted] if wanted in labels else parse_version(wanted)

    def _place(self, outer: InferenceRequest, caller: _Caller | None) -> tuple[int, RoutedBy]:
        """The place of a request in [0, `WHOLE`), and whether a key or chance gives it."""
        for attribute in self.sticky:
            key = attribute.read(outer, caller)
            if key:
                break
        else:
            key = str(outer.correlation_id or "")
        if key:
            digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=self.salt).digest()
            return int.from_bytes(digest) % WHOLE, "sticky"
        # Chance, but the same for all that the request makes, without anything to keep.
        return hash((outer.received_ns, id(outer))) % WHOLE, "weight"
