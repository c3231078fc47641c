"""Which interpreter a worker of a Python model runs in, with which variables and modules."""

from __future__ import annotations

from conch.workers.environments.cache import EnvironmentCache
from conch.workers.environments.environment import Environment, server_environment
from conch.workers.environments.environment_placement import placement_as_asked, placement_of
from conch.workers.environments.environment_spec import Asked
from conch.workers.environments.resolve import environment_as_asked, environment_for

__all__ = [
    "Asked",
    "Environment",
    "EnvironmentCache",
    "environment_as_asked",
    "environment_for",
    "placement_as_asked",
    "placement_of",
    "server_environment",
]
