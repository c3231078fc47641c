"""Opens MLflow registries."""

from __future__ import annotations

import os

from conch_control.control_options import StorageOptions
from conch_control.repository.source import Repository
from conch_mlflow.locations import MlflowEnvironment, parse_location
from conch_mlflow.mlflow_options import allows_code
from conch_mlflow.mlflow_repository import MlflowRepository
from conch_stores import cache_directory
from conch_stores.cache import ModelCache
from conch_stores.connection import StoreTimeouts


def open_mlflow(text: str, options: StorageOptions) -> Repository:
    """Opens a registry; a `RepositoryKind`."""
    location = parse_location(text)
    import yaml  # noqa: F401  # an extra, which the error of a missing package names

    cache = ModelCache(cache_directory(options, os.environ), options.cache_bytes)
    timeouts = StoreTimeouts.of(options.timeout_s)
    return MlflowRepository(location, MlflowEnvironment(os.environ), cache, timeouts, allows_code(options))
