"""What health probes are told: a table of the server's stage and of its models, as pure functions.

docs/operations.md shows the whole table; a server that is stopping answers with an error instead, except
that the gRPC health service has a word for it.
"""

from __future__ import annotations

from collections.abc import Callable

from conch.core.stage import Stage

ReadyCheck = Callable[[], bool]
"""Finds out, which may take time, whether something is ready."""


def server_live(stage: Stage) -> bool:
    """Whether the server is alive: also while models are loaded for minutes, not after a failed start."""
    return stage not in (Stage.FAILED, Stage.STOPPING)


def server_ready(stage: Stage, strict: bool, models: ReadyCheck) -> bool:
    """Whether the server is to be sent requests.

    Args:
        stage: Where it is in its life.
        strict: Whether all models must be ready.
        models: Whether they are; asked only if that matters.
    """
    return stage is Stage.SERVING and (not strict or models())


def model_ready(stage: Stage, model: ReadyCheck) -> bool:
    """Whether the server is to be sent requests for a model.

    Args:
        stage: Where the server is in its life.
        model: Whether the model takes them; asked only if that matters.
    """
    # A probe may ask for a model instead of the server, so draining must show here too.
    return stage in (Stage.STARTING, Stage.SERVING) and model()
