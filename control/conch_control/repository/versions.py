"""Which of a model's versions its version policy selects."""

from __future__ import annotations

import logging
from collections.abc import Collection

from conch.core.errors import InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig

log = logging.getLogger(__name__)


def select_versions(config: ModelConfig, available: Collection[int]) -> list[int]:
    """The versions to load, ascending.

    Args:
        config: A normalised config.
        available: Versions that have a directory.

    Raises:
        InvalidArgumentError: There are none.
    """
    policy = config.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "specific":
        for version in policy.specific.versions:
            if version not in available:
                log.error(
                    "version %d is specified for model '%s', but the version directory is not present",
                    version,
                    config.name,
                )
        selected = sorted(set(policy.specific.versions).intersection(available))
    elif choice == "latest":
        selected = sorted(available)[-policy.latest.num_versions :]
    else:
        selected = sorted(available)
    if not selected:
        raise InvalidArgumentError(
            f"at least one version must be available under the version policy of model '{config.name}'"
        )
    return selected
