"""Repositories in object stores: S3, Google Cloud Storage and Azure Blob Storage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from conch.core.errors import InvalidArgumentError
from conch_control.control_options import StorageOptions
from conch_control.repository.source import Repository
from conch_stores.cache import ModelCache
from conch_stores.connection import Connection, StoreTimeouts
from conch_stores.credentials import CredentialReader
from conch_stores.locations import Location, parse_location
from conch_stores.objects import ObjectRepository
from conch_stores.stores import OpenStore

_MOUNTS = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY",
    "gs": "TRITON_GCS_MOUNT_DIRECTORY",
    "as": "TRITON_AZURE_MOUNT_DIRECTORY",
}


def open_s3(text: str, options: StorageOptions) -> Repository:
    """Opens a repository in S3 or a compatible store; a `RepositoryKind`."""
    location = parse_location(text)
    from conch_stores.s3 import open_store  # the store's packages are an extra

    return _open(location, open_store, options)


def open_gcs(text: str, options: StorageOptions) -> Repository:
    """Opens a repository in Google Cloud Storage; a `RepositoryKind`."""
    location = parse_location(text)
    from conch_stores.gcs import open_store

    return _open(location, open_store, options)


def open_azure(text: str, options: StorageOptions) -> Repository:
    """Opens a repository in Azure Blob Storage; a `RepositoryKind`."""
    location = parse_location(text)
    from conch_stores.azure import open_store

    return _open(location, open_store, options)


def _open(location: Location, open_store: OpenStore, options: StorageOptions) -> Repository:
    credentials = CredentialReader(os.environ)
    connection = Connection(location, open_store, credentials, StoreTimeouts.of(options.timeout_s))
    return ObjectRepository(
        connection,
        ModelCache(cache_directory(options, os.environ, _MOUNTS[location.scheme]), options.cache_bytes),
        data_only="and --storage-data-only is on" if options.data_only else "",
    )


def cache_directory(options: StorageOptions, environment: Mapping[str, str], variable: str = "") -> Path:
    """Cache directory of a kind of store: the option, Triton's variable for it, or the XDG default.

    Raises:
        InvalidArgumentError: Triton's variable does not name a directory.
    """
    if options.cache_directory is not None:
        return options.cache_directory.absolute()
    mount = environment.get(variable)
    if mount:
        if not Path(mount).is_dir():
            raise InvalidArgumentError(f"{variable}: '{mount}' is not a directory")
        return Path(mount).absolute()
    base = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home(), ".cache")
    return Path(base, "conch", "models").absolute()
