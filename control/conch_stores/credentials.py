"""Credentials for object stores, from environment variables or Triton's JSON file.

Accesses no store. Representations hide secrets; `redacted` removes them from texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch_stores.locations import Location, Scheme

CREDENTIAL_FILE = "TRITON_CLOUD_CREDENTIAL_PATH"
"""Variable that names the file."""

_AUTH_TYPES = ("managed_identity", "default")
_FIELDS: dict[Scheme, tuple[str, ...]] = {
    "s3": ("secret_key", "key_id", "region", "session_token", "profile"),
    "as": ("account_str", "account_key"),
}


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """Credentials for S3; empty values are left to the AWS library."""

    key_id: str = ""
    secret: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    region: str = ""
    profile: str = ""

    def secrets(self) -> tuple[str, ...]:
        """Values to hide."""
        return self.secret, self.session_token


@dataclass(frozen=True, slots=True)
class GcsCredentials:
    """Credentials for Google Cloud Storage; without a file the machine's, or anonymous access."""

    path: str = ""
    emulated: bool = False

    def secrets(self) -> tuple[str, ...]:
        """None: the library reads the file."""
        return ()


@dataclass(frozen=True, slots=True)
class AzureCredentials:
    """Credentials for Azure.

    Attributes:
        account: Account of the key; empty for the location's.
        auth_type: ``managed_identity`` or ``default`` for the machine's; empty for the key, or anonymous
            access.
        client_id: Selects one of several managed identities.
    """

    account: str = ""
    key: str = field(default="", repr=False)
    auth_type: str = ""
    client_id: str = ""
    connection_string: str = field(default="", repr=False)

    def secrets(self) -> tuple[str, ...]:
        """Values to hide."""
        parts = (part.partition("=") for part in self.connection_string.split(";"))
        hidden = [value for name, _, value in parts if name in ("AccountKey", "SharedAccessSignature")]
        return (self.key, self.connection_string, *hidden)


Credentials = S3Credentials | GcsCredentials | AzureCredentials


class CredentialReader:
    """Reads the credentials of locations."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._file: Mapping[str, Mapping[str, Any]] | None = None

    def forget(self) -> None:
        """Drops the cached file after an authentication error."""
        self._file = None

    def read(self, location: Location) -> Credentials:
        """Credentials for a location; rereads the file if the cached one has no match.

        Raises:
            InvalidArgumentError: The file or a variable is invalid, or nothing matches.
        """
        path = self._environment.get(CREDENTIAL_FILE)
        if not path:
            return from_environment(location, self._environment)
        if self._file is not None:
            found = match(self._file.get(location.scheme, {}), location.text)
            if found is not None:
                return _from_entry(location, self._file[location.scheme][found], path)
        self._file = read_credential_file(Path(path))
        entries = self._file.get(location.scheme, {})
        found = match(entries, location.text)
        if found is None:
            raise InvalidArgumentError(f"Cannot match credential for path  {location.text}")
        return _from_entry(location, entries[found], path)


def match(prefixes: Iterable[str], path: str) -> str | None:
    """The longest prefix of a path; None if there is none."""
    return max((prefix for prefix in prefixes if path.startswith(prefix)), key=len, default=None)


def read_credential_file(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Reads Triton's credential file: by scheme, by location prefix.

    Raises:
        InvalidArgumentError: It is unreadable or malformed; of its content the text has a scheme at most.
    """
    where = f"{CREDENTIAL_FILE}: '{path}'"
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise InvalidArgumentError(f"{where} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"{where} is not text") from None
    except json.JSONDecodeError as error:
        raise InvalidArgumentError(
            f"{where} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        ) from None
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"{where} must be an object with 's3', 'gs' and 'as'")
    for scheme, entries in content.items():
        if not isinstance(entries, dict):
            raise InvalidArgumentError(f"{where}: '{scheme}' must be an object with a member per location")
    return content


def from_environment(location: Location, environment: Mapping[str, str]) -> Credentials:
    """Credentials from environment variables. Raises InvalidArgumentError: a value is invalid."""
    if location.scheme == "s3":
        return S3Credentials()  # the AWS library reads its variables itself
    if location.scheme == "gs":
        return _gcs(environment.get("GOOGLE_APPLICATION_CREDENTIALS", ""), environment)
    auth_type = environment.get("AZURE_STORAGE_AUTH_TYPE", "")
    if auth_type and auth_type not in _AUTH_TYPES:
        raise InvalidArgumentError(
            f"AZURE_STORAGE_AUTH_TYPE: must be one of {', '.join(_AUTH_TYPES)}, got {auth_type}"
        )
    return _checked(
        location,
        AzureCredentials(
            account=environment.get("AZURE_STORAGE_ACCOUNT", ""),
            key=environment.get("AZURE_STORAGE_KEY", ""),
            auth_type=auth_type,
            client_id=environment.get("AZURE_STORAGE_CLIENT_ID", ""),
            connection_string=environment.get("AZURE_STORAGE_CONNECTION_STRING", ""),
        ),
        "AZURE_STORAGE_ACCOUNT",
    )


def redacted(text: str, secrets: Iterable[str]) -> str:
    """A text without the secrets."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _from_entry(location: Location, entry: Any, path: str) -> Credentials:
    where = f"{CREDENTIAL_FILE}: '{path}', credentials for '{location.text}'"
    if location.scheme == "gs":
        if not isinstance(entry, str):
            raise InvalidArgumentError(f"{where}: must be the path of a file")
        return _gcs(entry, {})
    if not isinstance(entry, dict):
        raise InvalidArgumentError(f"{where}: must be an object")
    values: dict[str, str] = {}
    for name in _FIELDS[location.scheme]:
        value = entry.get(name, "")
        if not isinstance(value, str):
            raise InvalidArgumentError(f"{where}: '{name}' must be a string")
        values[name] = value
    if location.scheme == "as":
        azure = AzureCredentials(values["account_str"], values["account_key"])
        return _checked(location, azure, f"{where}: 'account_str'")
    if bool(values["key_id"]) != bool(values["secret_key"]):
        raise InvalidArgumentError(f"{where}: 'key_id' and 'secret_key' must be given together")
    return S3Credentials(
        values["key_id"], values["secret_key"], values["session_token"], values["region"], values["profile"]
    )


def _gcs(path: str, environment: Mapping[str, str]) -> GcsCredentials:
    return GcsCredentials(path, bool(environment.get("STORAGE_EMULATOR_HOST")))


def _checked(location: Location, credentials: AzureCredentials, where: str) -> AzureCredentials:
    if credentials.key and credentials.account not in ("", location.account):
        raise InvalidArgumentError(
            f"{where}: the key is of account '{credentials.account}', the model repository "
            f"'{location.text}' is in account '{location.account}'"
        )
    return credentials
