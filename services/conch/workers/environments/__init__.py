"""Which interpreter a worker of a Python model runs in, with which variables and modules."""

from __future__ import annotations

from conch.core.spec import ModelSpec
from conch.workers.environments.cache import EnvironmentCache
from conch.workers.environments.environment import Environment, server_environment

__all__ = ["Environment", "EnvironmentCache", "environment_for", "server_environment"]


def environment_for(spec: ModelSpec, cache: EnvironmentCache) -> Environment:
    """The environment of a model version's workers, made ready if it has to be.

    Args:
        spec: The model version.
        cache: Where environments are kept that were unpacked or built.

    Raises:
        ConchError: It can't be made, or no model can run in it; the text says which file asks for what.
    """
    return server_environment()
