"""Parses the URLs of repositories in object stores."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from conch.core.errors import InvalidArgumentError
from conch_control.repository.repository_kinds import without_user

Scheme = Literal["s3", "gs", "as"]

SPELLINGS: dict[Scheme, str] = {
    "s3": "s3://bucket/path, s3://host:port/bucket/path or s3://https://host:port/bucket/path",
    "gs": "gs://bucket/path",
    "as": "as://account/container/path",
}
"""Syntax of the locations of each scheme."""

_HOST = r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
_ENDPOINT = re.compile(rf"(?:(https?)://)?({_HOST}):([0-9]{{1,5}})(?:/(.*))?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Location:
    """A location in an object store.

    Attributes:
        text: The location as given, without trailing slashes.
        bucket: Bucket, or Azure container.
        prefix: Prefix of all object names: empty, or with a trailing slash.
        endpoint: URL of a custom S3 server; empty for AWS.
        account: Azure storage account.
    """

    scheme: Scheme
    text: str
    bucket: str
    prefix: str = ""
    endpoint: str = ""
    account: str = ""

    def __str__(self) -> str:
        return self.text


def parse_location(text: str) -> Location:
    """Parses a URL of one of the schemes. Raises InvalidArgumentError: it is malformed."""
    scheme, _, rest = text.partition("://")
    if scheme == "s3":
        return _s3(text, rest)
    if scheme == "gs":
        bucket, prefix = _split(text, "gs", rest)
        return Location("gs", text.rstrip("/"), bucket, prefix)
    account, _, place = rest.partition("/")
    if not _NAME.fullmatch(account):
        raise _wrong(text, "as", "the name of the account is missing or wrong")
    bucket, prefix = _split(text, "as", place)
    return Location("as", text.rstrip("/"), bucket, prefix, account=account)


def _s3(text: str, rest: str) -> Location:
    endpoint = ""
    found = _ENDPOINT.fullmatch(rest)
    if found is not None:
        # Plain HTTP by default, as in Triton: custom servers seldom have certificates.
        protocol, host, port, rest = found[1] or "http", found[2], int(found[3]), found[4] or ""
        if not 0 < port < 65536:
            raise _wrong(text, "s3", f"{port} is not a port")
        endpoint = f"{protocol}://{host}:{port}"
    elif (secure := re.fullmatch(rf"(https?)://({_HOST})(?:/(.*))?", rest, re.DOTALL)) is not None:
        protocol, host, rest = secure[1], secure[2], secure[3] or ""
        endpoint = f"{protocol}://{host}:{_DEFAULT_PORTS[protocol]}"
    bucket, prefix = _split(text, "s3", rest)
    return Location("s3", text.rstrip("/"), bucket, prefix, endpoint)


def _split(text: str, scheme: Scheme, rest: str) -> tuple[str, str]:
    """Bucket and prefix of ``bucket/path``."""
    bucket, _, path = rest.partition("/")
    kind = "container" if scheme == "as" else "bucket"
    if not _NAME.fullmatch(bucket):
        raise _wrong(text, scheme, f"the name of the {kind} is missing or wrong")
    parts = [part for part in path.split("/") if part]  # repeated slashes count as one, as in Triton
    if any(part in (".", "..") for part in parts):
        raise _wrong(text, scheme, "its path must not hold '.' or '..'")
    if not path.isprintable():
        raise _wrong(text, scheme, "its path is not text")
    return bucket, "".join(f"{part}/" for part in parts)


def _wrong(text: str, scheme: Scheme, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"model repository '{without_user(text)}': {reason}; write {SPELLINGS[scheme]}"
    )
