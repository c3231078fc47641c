"""Has the repository agents of a model see to it, as its load would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from conch.core.errors import ConchError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.problems import Problem
from conch_control.config.suggest import nearest
from conch_control.repoagents.chain import agent_names, is_built_in, make_chain


def agent_problems(config: ModelConfig, name: str, directory: Path, run_code: bool) -> Iterator[Problem]:
    """What the agents that a config names have against a load; ends at the first that is not run.

    Args:
        config: The config as it is written.
        name: Model name.
        directory: The model's directory.
        run_code: Whether agents of other packages may run.
    """
    with ExitStack() as loaded:
        for number, agent in enumerate(config.model_repository_agents.agents):
            path = f"model_repository_agents.agents[{number}]"
            if not is_built_in(agent.name) and agent.name in agent_names() and not run_code:
                return
            alone = ModelConfig()
            alone.CopyFrom(config)
            del alone.model_repository_agents.agents[:]
            alone.model_repository_agents.agents.append(agent)
            try:
                chain = make_chain(alone, name)
                directory = chain.load(directory)
            except ConchError as error:
                unknown = agent.name not in agent_names()
                yield Problem(
                    f"{path}.name" if unknown else path,
                    error.message,
                    nearest=nearest(agent.name, agent_names()) if unknown else "",
                )
                return
            loaded.callback(chain.completed, False)


def agent_notes(config: ModelConfig, run_code: bool) -> Iterator[Problem]:
    """What of a config's agents is not looked at."""
    for number, agent in enumerate(config.model_repository_agents.agents):
        if is_built_in(agent.name) or agent.name not in agent_names():
            continue
        what = (
            "what it makes of the model's files is not checked" if run_code else "not run without --run-code"
        )
        yield Problem(
            f"model_repository_agents.agents[{number}].name", f"repository agent '{agent.name}': {what}"
        )
