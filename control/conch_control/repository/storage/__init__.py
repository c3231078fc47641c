"""Repositories in object stores; opens repositories of any kind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from conch.core.errors import InvalidArgumentError
from conch_control.control_options import StorageOptions
from conch_control.repository.local import LocalRepository
from conch_control.repository.source import Repository
from conch_control.repository.storage.cache import ModelCache
from conch_control.repository.storage.connection import Connection, StoreTimeouts
from conch_control.repository.storage.credentials import CredentialReader
from conch_control.repository.storage.locations import Location, parse_location
from conch_control.repository.storage.objects import ObjectRepository
from conch_control.repository.storage.stores import find_store

_MOUNTS = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY",
    "gs": "TRITON_GCS_MOUNT_DIRECTORY",
    "as": "TRITON_AZURE_MOUNT_DIRECTORY",
}


def open_repository(
    location: str | Path,
    options: StorageOptions | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Repository:
    """Opens the repository at a location without accessing it; see `Repository.check`.

    Raises:
        InvalidArgumentError: The location is malformed.
        UnsupportedError: The package for its kind is not installed.
    """
    options = options or StorageOptions()
    parsed = parse_location(location)
    if isinstance(parsed, Path):
        return LocalRepository(parsed)
    connection = Connection(
        parsed, find_store(parsed), CredentialReader(environment), StoreTimeouts.of(options.timeout_s)
    )
    cache = ModelCache(cache_directory(parsed, options, environment), options.cache_bytes)
    return ObjectRepository(connection, cache)


def cache_directory(location: Location, options: StorageOptions, environment: Mapping[str, str]) -> Path:
    """Cache directory for a location: the option, Triton's variable, or the XDG default.

    Raises:
        InvalidArgumentError: Triton's variable does not name a directory.
    """
    if options.cache_directory is not None:
        return options.cache_directory.absolute()
    mount = environment.get(_MOUNTS[location.scheme])
    if mount:
        if not Path(mount).is_dir():
            raise InvalidArgumentError(f"{_MOUNTS[location.scheme]}: '{mount}' is not a directory")
        return Path(mount).absolute()
    base = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home(), ".cache")
    return Path(base, "conch", "models").absolute()
