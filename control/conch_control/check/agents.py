"""What is wrong with the repository agents that a config names: those that are not there, wrong checksums.

Only `checksum` is run: nobody knows what the others do.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.problems import Problem, Problems, attempt
from conch_control.repoagents import ModelContext
from conch_control.repoagents.chain import agent_names, find_hook, is_built_in
from conch_control.repoagents.checksum import Checksum


def agent_problems(config: ModelConfig, model: str, directory: Path) -> Problems:
    """What keeps the repository agents of a model from letting it be loaded.

    Args:
        config: The config as it is written.
        model: Model name.
        directory: The model's directory.
    """
    for number, agent in enumerate(config.model_repository_agents.agents):
        path = f"model_repository_agents.agents[{number}]"
        if _is_theirs(agent.name):
            return  # it may leave anything to those that come after it
        found = yield from attempt(f"{path}.name", partial(find_hook, agent.name))
        if found is Checksum:
            checksum = Checksum(ModelContext(model, {}, dict(agent.parameters)))
            yield from attempt(f"{path}.parameters", partial(checksum.load, directory))


def agent_notes(config: ModelConfig) -> Problems:
    """Which repository agents of a model are not looked at."""
    for number, agent in enumerate(config.model_repository_agents.agents):
        if _is_theirs(agent.name):
            yield Problem(
                f"model_repository_agents.agents[{number}].name",
                f"repository agent '{agent.name}' is not run: what it makes of the model is not checked",
            )


def _is_theirs(name: str) -> bool:
    """Whether an agent comes with another package."""
    return not is_built_in(name) and name in agent_names()
