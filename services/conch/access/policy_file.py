"""Reads the policy file of ``--access-policy``, and the files that it names, and checks them.

All errors say file, line and field, and what to write instead.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from conch.access.principals import Role
from conch.access.request_limits import RequestLimits
from conch.access.token_verifier import JwtSettings, KeySet
from conch.core.errors import InvalidArgumentError

LEAST_KEY_CHARACTERS = 16

_NAME = re.compile(r"[A-Za-z0-9._@:/-]{1,100}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_CERTIFICATE = re.compile(r"(cn|dns|uri):.+")
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_JWT_FIELDS = ("issuer", "audience", "jwks_file", "jwks_url", "clock_skew_seconds")
_CLOCK_SKEW_S = 30.0
_LIMIT_FIELDS = ("requests_per_second", "bytes_per_second", "concurrent", "cold_loads_per_minute")
_LEAST, _MOST = 0.001, 1e15  # of a limit
_CREDENTIALS = ("key_file", "key_sha256", "claims", "certificate", "anonymous")
_PRINCIPAL_FIELDS = ("name", *_CREDENTIALS, *Role, *_LIMIT_FIELDS)

ReadFile = Callable[[Path], bytes]


@dataclass(frozen=True, slots=True)
class PrincipalEntry:
    """One ``[[principal]]``.

    Attributes:
        name: Unique in the policy.
        keys: SHA-256 of its keys.
        claims: Claims of its tokens; all of them must be there.
        certificates: Names in its certificates, such as ``cn:web``.
        anonymous: True if callers without credentials act as this principal.
        models: Patterns of the models of each role.
        limits: Its limits.
    """

    name: str
    keys: tuple[bytes, ...]
    claims: Mapping[str, str]
    certificates: tuple[str, ...]
    anonymous: bool
    models: Mapping[Role, tuple[str, ...]]
    limits: RequestLimits


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy file as it was read.

    Attributes:
        principals: In the order of the file.
        jwt: Rules of accepted tokens; None to accept none.
        keys: The keys that sign them, if they are in a file.
    """

    principals: tuple[PrincipalEntry, ...]
    jwt: JwtSettings | None = None
    keys: KeySet | None = None

    @property
    def jwks_url(self) -> str:
        """The URL of the keys that sign tokens; empty without one."""
        return "" if self.jwt is None else self.jwt.jwks_url

    @property
    def certificates(self) -> bool:
        """True if any principal is identified by a client certificate."""
        return any(each.certificates for each in self.principals)


def read_policy(path: Path, read_file: ReadFile = Path.read_bytes) -> Policy:
    """Reads a policy.

    Args:
        path: The policy file; files that it names are relative to its directory.
        read_file: Reads a file.

    Raises:
        InvalidArgumentError: It can't be read, or something in it is wrong.
    """
    try:
        text = read_file(path).decode()
        document = tomllib.loads(text)
    except OSError as error:
        raise InvalidArgumentError(f"{path}: the access policy can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of TOML, with line and column, or of UTF-8
        raise InvalidArgumentError(f"{path}: the access policy is no TOML: {error}") from None
    return _Reader(path, text, read_file).policy(document)


class _Reader:
    """Reads one policy.

    Attributes:
        place: The table that is read: its header, its number among those of the header, and its name.
    """

    def __init__(self, path: Path, text: str, read_file: ReadFile) -> None:
        self._path = path
        self._lines = text.splitlines()
        self._read_file = read_file
        self._place = ("", 0, "")

    def policy(self, document: dict[str, Any]) -> Policy:
        for key in document.keys() - {"principal", "jwt"}:
            raise self._error(
                key, "is unknown: a policy has [[principal]] tables and at most one table [jwt]"
            )
        jwt, keys = (None, None) if "jwt" not in document else self._jwt(document["jwt"])
        listed = document.get("principal", [])
        if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
            raise self._error("principal", "must be one or more tables [[principal]]")
        entries = []
        for number, table in enumerate(listed):
            self._place = ("[[principal]]", number, "")
            entries.append(self._principal(table, jwt))
        self._check_together(entries, jwt)
        return Policy(tuple(entries), jwt, keys)

    def _check_together(self, entries: list[PrincipalEntry], jwt: JwtSettings | None) -> None:
        seen: dict[object, str] = {}
        for number, entry in enumerate(entries):
            self._place = ("[[principal]]", number, entry.name)
            if any(entry.name == other.name for other in entries[:number]):
                raise self._error("name", "occurs twice: each principal needs a name of its own")
            unique: list[tuple[object, str]] = [(digest, "key_file") for digest in entry.keys]
            unique += [(name, "certificate") for name in entry.certificates]
            if entry.anonymous:
                unique.append((None, "anonymous"))
            for what, field in unique:
                if what in seen:
                    raise self._error(
                        field, f"is also given for principal '{seen[what]}': a credential has one"
                    )
                seen[what] = entry.name
        self._place = ("[jwt]", 0, "")
        if jwt is not None and not any(entry.claims for entry in entries):
            raise self._error("issuer", "has no effect: give a principal 'claims', such as { sub = \"web\" }")

    def _principal(self, table: dict[str, Any], jwt: JwtSettings | None) -> PrincipalEntry:
        name = self._text(table, "name")
        if not _NAME.fullmatch(name):
            raise self._error("name", "must be 1 to 100 of the characters A-Z a-z 0-9 . _ @ : / -")
        self._place = (*self._place[:2], name)
        self._check_fields(table, _PRINCIPAL_FIELDS)
        claims = table.get("claims", {})
        if not isinstance(claims, dict) or not all(
            isinstance(each, str) and each for each in claims.values()
        ):
            raise self._error("claims", 'must be a table of texts, such as { sub = "web" }')
        if claims and jwt is None:
            raise self._error("claims", "needs a table [jwt] that says which tokens are accepted")
        certificates = self._texts(table, "certificate")
        if not all(map(_CERTIFICATE.fullmatch, certificates)):
            raise self._error(
                "certificate",
                'must be names as in a certificate: "cn:web", "dns:web.example", "uri:spiffe://a/b"',
            )
        anonymous = table.get("anonymous", False)
        if not isinstance(anonymous, bool):
            raise self._error("anonymous", "must be true or false")
        keys = (*self._keys(table), *self._digests(table))
        if not (keys or claims or certificates or anonymous):
            raise self._error(
                "name", f"has no credentials: give one of {', '.join(_CREDENTIALS[:-1])}, or anonymous = true"
            )
        models = {role: self._texts(table, role) for role in Role if table.get(role)}
        if not models:
            raise self._error("name", 'has no role: give patterns of models, such as infer = ["digits*"]')
        return PrincipalEntry(name, keys, claims, certificates, anonymous, models, self._limits(table))

    def _keys(self, table: dict[str, Any]) -> tuple[bytes, ...]:
        if "key_file" not in table:
            return ()
        path = self._path.parent / self._text(table, "key_file")
        text = self._contents("key_file", path).decode("ascii", errors="replace")
        keys = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        if not keys:
            raise self._error("key_file", f"names {path}, which has no key: write one key on a line")
        for key in keys:
            if len(key) < LEAST_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
                raise self._error(
                    "key_file",
                    f"names {path}, in which a key is not {LEAST_KEY_CHARACTERS} or more printable ASCII "
                    f"characters without spaces; conch access key makes one",
                )
        return tuple(sha256(key.encode()).digest() for key in keys)

    def _digests(self, table: dict[str, Any]) -> tuple[bytes, ...]:
        digests = self._texts(table, "key_sha256")
        if not all(map(_SHA256.fullmatch, digests)):
            raise self._error("key_sha256", "must be SHA-256 in 64 hexadecimal digits; see conch access key")
        return tuple(map(bytes.fromhex, digests))

    def _limits(self, table: dict[str, Any]) -> RequestLimits:
        values: dict[str, Any] = {}
        for field in _LIMIT_FIELDS:
            value = values[field] = table.get(field)
            if value is None:
                continue
            whole = field == "concurrent"
            kind = int if whole else int | float
            if isinstance(value, bool) or not isinstance(value, kind) or not _LEAST <= value <= _MOST:
                wanted = "a whole number from 1" if whole else f"a number from {_LEAST}"
                raise self._error(
                    field,
                    f"must be {wanted} to {_MOST:g}, got {value!r:.40}; leave it out for no limit",
                )
        return RequestLimits(**values)

    def _jwt(self, table: Any) -> tuple[JwtSettings, KeySet | None]:
        if not isinstance(table, dict):
            raise self._error("jwt", "must be a table [jwt]")
        self._place = ("[jwt]", 0, "")
        self._check_fields(table, _JWT_FIELDS)
        issuer, audiences = self._text(table, "issuer"), self._texts(table, "audience")
        if not audiences:
            raise self._error("audience", "is missing: give the audience that tokens for this server have")
        skew_s = table.get("clock_skew_seconds", _CLOCK_SKEW_S)
        if isinstance(skew_s, bool) or not isinstance(skew_s, int | float) or not 0 <= skew_s <= 600:
            raise self._error("clock_skew_seconds", f"must be a number from 0 to 600, got {skew_s!r}")
        if ("jwks_file" in table) is ("jwks_url" in table):
            raise self._error("issuer", "needs either jwks_file or jwks_url, for the keys that sign tokens")
        self._check_library()
        if "jwks_url" in table:
            url = self._text(table, "jwks_url")
            if not _is_safe(url):
                raise self._error("jwks_url", f"must begin with https://, or be on this machine; got '{url}'")
            return JwtSettings(issuer, audiences, None, url, float(skew_s)), None
        path = self._path.parent / self._text(table, "jwks_file")
        try:
            keys = KeySet(self._contents("jwks_file", path))
        except ValueError as error:
            raise self._error("jwks_file", f"names {path}: {error}") from None
        return JwtSettings(issuer, audiences, path, "", float(skew_s)), keys

    def _check_library(self) -> None:
        if find_spec("jwt") is None or find_spec("cryptography") is None:
            raise self._error("issuer", "needs PyJWT and cryptography: pip install 'conch[jwt]'")

    def _check_fields(self, table: dict[str, Any], known: Iterable[str]) -> None:
        for field in table:
            if field not in known:
                raise self._error(field, f"is unknown: known are {', '.join(known)}")

    def _text(self, table: dict[str, Any], field: str) -> str:
        value = table.get(field)
        if not isinstance(value, str) or not value:
            raise self._error(field, "is missing" if value is None else "must be a text in quotes")
        return value

    def _texts(self, table: dict[str, Any], field: str) -> tuple[str, ...]:
        """One text, or a list of them; empty if the field is missing."""
        value = table.get(field, [])
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(each, str) and each for each in listed):
            raise self._error(field, f'must be a list of texts, such as {field} = ["..."]')
        return tuple(listed)

    def _contents(self, field: str, path: Path) -> bytes:
        try:
            return self._read_file(path)
        except (OSError, ValueError) as error:  # NUL in the path
            text = getattr(error, "strerror", error)
            raise self._error(field, f"names {path}, which can't be read: {text}") from None

    def _error(self, field: str, text: str) -> InvalidArgumentError:
        header, _, name = self._place
        owner = f"principal '{name}': " if name else f"{header}: " if header else ""
        return InvalidArgumentError(f"{self._path}:{self._line(field)}: {owner}{field} {text}")

    def _line(self, field: str) -> int:
        """The line of a field of the table that is read, or that of the table."""
        header, number, _ = self._place
        inside, count, found = not header, -1, 1
        for at, line in enumerate(self._lines, 1):
            stripped = line.replace(" ", "")
            if stripped.startswith("["):
                begins = bool(header) and stripped.startswith(header)
                count += begins
                inside = begins and count == number
                found = at if inside else found
                if not header and stripped.strip("[]") == field:
                    return at
            elif inside and stripped.partition("=")[0].strip("\"'") == field:
                return at
        return found


def _is_safe(url: str) -> bool:
    """True if keys from a URL can't be changed in transit: it is ``https``, or ``http`` to this machine."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # the port is checked when it is read
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and host in _LOCAL_HOSTS))
