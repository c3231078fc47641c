"""Static checks of user code: Python models and repository agents. Only the agent ``checksum`` is run."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.problems import Problem, Problems, attempt
from conch_control.repoagents import ModelContext
from conch_control.repoagents.chain import agent_names, find_hook, is_built_in
from conch_control.repoagents.hooks import Checksum

_CLASS = "TritonPythonModel"
_COMPLETES = "auto_complete_config"


@dataclass(frozen=True, slots=True)
class PythonFile:
    """Result of parsing a model's source file.

    Attributes:
        error: Why it can't run; empty if it can.
        line: Line of the error from 1; 0 for none.
        column: Column of the error from 1; 0 for none.
        may_complete_config: True if it may complete its config.
    """

    error: str = ""
    line: int = 0
    column: int = 0
    may_complete_config: bool = True


def read_python(content: bytes, name: str) -> PythonFile:
    """Parses a source file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the model's source
            tree = ast.parse(content, name)
    except SyntaxError as error:
        return PythonFile(f"{type(error).__name__}: {error.msg}", error.lineno or 0, error.offset or 0, False)
    except (ValueError, RecursionError, MemoryError) as error:
        return PythonFile(str(error) or type(error).__name__, may_complete_config=False)
    return PythonFile(may_complete_config=_may_complete_config(tree))


def _may_complete_config(tree: ast.Module) -> bool:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == _CLASS]
    if len(classes) != 1 or classes[0].bases or classes[0].decorator_list or classes[0].keywords:
        return True  # the base class or decorator may define it
    for node in ast.walk(tree):
        name = getattr(node, "name", None) or getattr(node, "attr", None) or getattr(node, "id", None)
        if name in (_COMPLETES, "setattr"):
            return True
    return False


def agent_problems(config: ModelConfig, model: str, directory: Path) -> Problems:
    """Problems of a model's repository agents that would fail its load."""
    for number, agent in enumerate(config.model_repository_agents.agents):
        path = f"model_repository_agents.agents[{number}]"
        if _is_third_party(agent.name):
            return  # it may change the model for the next agents
        found = yield from attempt(f"{path}.name", partial(find_hook, agent.name))
        if found is Checksum:
            checksum = Checksum(ModelContext(model, {}, dict(agent.parameters)))
            yield from attempt(f"{path}.parameters", partial(checksum.load, directory))


def agent_notes(config: ModelConfig) -> Problems:
    """Repository agents that are not checked."""
    for number, agent in enumerate(config.model_repository_agents.agents):
        if _is_third_party(agent.name):
            yield Problem(
                f"model_repository_agents.agents[{number}].name",
                f"repository agent '{agent.name}' is not run: what it makes of the model is not checked",
            )


def _is_third_party(name: str) -> bool:
    """True for an agent of another package."""
    return not is_built_in(name) and name in agent_names()
