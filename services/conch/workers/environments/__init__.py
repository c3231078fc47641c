"""Environments of worker processes: interpreter, variables and packages."""

from __future__ import annotations

from conch.workers.environments.cache import EnvironmentCache
from conch.workers.environments.environment import Environment, server_environment
from conch.workers.environments.environment_spec import EnvironmentSpec, placement_of, resolve_placement
from conch.workers.environments.resolve import environment_for, resolve_environment

__all__ = [
    "Environment",
    "EnvironmentCache",
    "EnvironmentSpec",
    "environment_for",
    "placement_of",
    "resolve_environment",
    "resolve_placement",
    "server_environment",
]
