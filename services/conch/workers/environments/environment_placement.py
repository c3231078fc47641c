"""Where a model with an environment runs: in workers, whose interpreter need not be the server's."""

from __future__ import annotations

from collections.abc import Mapping

from conch.backends.python.python_settings import NeedsWorkerError, Placement, Settings
from conch.core.spec import ModelSpec
from conch.workers.environments.environment_spec import Asked


def placement_of(spec: ModelSpec) -> Placement:
    """Where the instances of a model version run.

    What asks for an environment, or for variables, gets workers where nobody has said otherwise: such a
    model works as it does in Triton, without a word in its config.

    Raises:
        NeedsWorkerError: It asks for an environment, but is to run in the server's process.
    """
    return placement_as_asked(spec.name, Asked.of(spec), spec.parameters, spec.backend_options)


def placement_as_asked(
    name: str, asked: Asked, parameters: Mapping[str, str], options: Mapping[str, str]
) -> Placement:
    """The same, for a model whose config is not complete yet."""
    placement = Settings.read(name, parameters, options).placement
    if not asked.reason or placement == "worker":
        return placement
    if "CONCH_PLACEMENT" in parameters:
        said = "parameter 'CONCH_PLACEMENT'"
    elif "placement" in options:
        said = "--backend-config=python,placement"
    else:
        return "worker"
    raise NeedsWorkerError(
        f"model '{name}': {asked.reason} asks for an environment of its own, which only a worker process can "
        f"have",
        f"but {said} has it run in the server's process ('{placement}'); set CONCH_PLACEMENT to 'worker' for "
        f"the model",
    )
