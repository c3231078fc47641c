"""Who the server is to an object store: from environment variables, or Triton's JSON file of credentials.

Nothing here talks to a store. Secrets are left out of representations; `redacted` takes them out of texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch_control.repository.storage.locations import Location, Scheme

CREDENTIAL_FILE = "TRITON_CLOUD_CREDENTIAL_PATH"
"""The variable that names the file."""

_AUTH_TYPES = ("managed_identity", "default")
_FIELDS: dict[Scheme, tuple[str, ...]] = {
    "s3": ("secret_key", "key_id", "region", "session_token", "profile"),
    "as": ("account_str", "account_key"),
}


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """Credentials for S3; what is empty is left to the AWS library: its variables, files and services.

    Attributes:
        key_id: Access key.
        secret: Its secret.
        session_token: Token of a temporary key.
        region: Region of the bucket.
        profile: Profile of the AWS configuration.
    """

    key_id: str = ""
    secret: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    region: str = ""
    profile: str = ""

    def secrets(self) -> tuple[str, ...]:
        """What must not be shown."""
        return self.secret, self.session_token


@dataclass(frozen=True, slots=True)
class GcsCredentials:
    """Credentials for Google's store.

    Attributes:
        path: A file with them; empty for those of the machine, or none.
        emulated: Whether the store is an emulator, which wants none.
    """

    path: str = ""
    emulated: bool = False

    def secrets(self) -> tuple[str, ...]:
        """What must not be shown: nothing, the library reads the file."""
        return ()


@dataclass(frozen=True, slots=True)
class AzureCredentials:
    """Credentials for Azure.

    Attributes:
        account: The account that the key is of; empty for that of the location.
        key: Key of the account.
        auth_type: ``managed_identity`` or ``default`` for those of the machine; empty for the key, or none.
        client_id: Which of several managed identities.
        connection_string: All in one, as Azure's tools write it.
    """

    account: str = ""
    key: str = field(default="", repr=False)
    auth_type: str = ""
    client_id: str = ""
    connection_string: str = field(default="", repr=False)

    def secrets(self) -> tuple[str, ...]:
        """What must not be shown."""
        parts = (part.partition("=") for part in self.connection_string.split(";"))
        hidden = [value for name, _, value in parts if name in ("AccountKey", "SharedAccessSignature")]
        return (self.key, self.connection_string, *hidden)


Credentials = S3Credentials | GcsCredentials | AzureCredentials


class CredentialReader:
    """Finds the credentials of locations.

    Args:
        environment: Environment variables.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._file: Mapping[str, Mapping[str, Any]] | None = None

    def forget(self) -> None:
        """Says that the credentials did not do, so that the file is read again."""
        self._file = None

    def read(self, location: Location) -> Credentials:
        """The credentials for a location; the file is read again where what it held does not match.

        Raises:
            InvalidArgumentError: The file, or a variable, is wrong, or the file has none for the location.
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
    """The longest of some prefixes that a path begins with; None if there is none."""
    return max((prefix for prefix in prefixes if path.startswith(prefix)), key=len, default=None)


def read_credential_file(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Triton's file of credentials: by scheme, by prefix of the location.

    Raises:
        InvalidArgumentError: It can't be read, or is not of that form; nothing of it is in the text.
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
    """The credentials that environment variables give for a location.

    Raises:
        InvalidArgumentError: One of them has a value it can't have.
    """
    if location.scheme == "s3":
        return S3Credentials()  # the AWS library reads its own variables
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
    """A text without secrets."""
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
