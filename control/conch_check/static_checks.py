"""Checks that a load does not make: settings without effect, a model's Python source, repository agents.

Nothing here runs user code; of the agents, only ``checksum`` runs.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from conch.core.add_ons import load_add_ons
from conch.protocol.model_config_pb2 import ModelConfig, ModelQueuePolicy
from conch_control.config.model_spec import uncustomizable_families
from conch_control.config.problems import Problem, Problems, attempt, entry_path, nearest
from conch_control.config.warmup import samples_without_size
from conch_control.native_agents import NativeAgents
from conch_control.repoagents import Checksum, ModelContext, agent_names, is_built_in

_OWN = "CONCH_"
_PARAMETERS = (
    "CONCH_CACHE_TTL",
    "CONCH_MAX_QUEUE_SIZE",
    "CONCH_MEMORY_MB",
    "CONCH_PADDING",
    "CONCH_PINNED",
)
_ADD_ONS = "conch.parameters"
"""Entry-point group: tuples of the parameters that add-ons read."""


def ineffective_settings(
    config: ModelConfig,
    of_backend: Sequence[str] = (),
    passed_on: bool = True,
    host_policies: bool = False,
) -> Problems:
    """Settings of an effective config that have no effect, as problems that fail no load.

    Args:
        config: The config.
        of_backend: Parameters that its backend reads.
        passed_on: True if models of the backend get parameters of other names.
        host_policies: True if its instances run as host policies say.
    """
    yield from _batching_advice(config)
    for number, group in enumerate(config.instance_group):
        for field in ("secondary_devices",) if host_policies else ("host_policy", "secondary_devices"):
            if getattr(group, field):
                path = f"instance_group[{number}].{field}"
                yield Problem(path, f"{field} is accepted and has no effect in this version")
    yield from samples_without_size(config)
    yield from uncustomizable_families(config)
    of_add_ons = chain.from_iterable(load_add_ons(_ADD_ONS).values())
    known = sorted({*_PARAMETERS, *of_backend, *of_add_ons})
    begins = tuple(name for name in known if name.endswith(("_", ".")))
    for key in sorted(config.parameters):
        if passed_on and not key.startswith(_OWN):
            continue
        if key not in known and not (begins and key.startswith(begins)):
            yield Problem(
                entry_path("parameters", key),
                f"parameter '{key}' is unknown and has no effect",
                expected="one of " + ", ".join(f"{name}..." if name in begins else name for name in known),
                found=f"'{key}'",
                nearest=nearest(key, known),
            )
    if config.backend == "python":
        for field in ("batch_input", "batch_output"):
            if getattr(config, field):
                yield Problem(
                    field,
                    f"{field} has no effect for a Python model, which gets each request as it is",
                )


def _batching_advice(config: ModelConfig) -> Problems:
    if not config.HasField("dynamic_batching"):
        return
    batching = config.dynamic_batching
    policies = {"dynamic_batching.default_queue_policy": batching.default_queue_policy} | {
        entry_path("dynamic_batching.priority_queue_policy", level): batching.priority_queue_policy[level]
        for level in sorted(batching.priority_queue_policy)
    }
    used = batching.preserve_ordering or any(_has_limits(policy) for policy in policies.values())
    if config.max_batch_size == 0 and config.input and not (used or batching.preferred_batch_size):
        yield Problem(
            "dynamic_batching",
            "dynamic_batching has no effect without max_batch_size: there is nothing to batch along",
            expected="max_batch_size > 0",
            found="0",
        )
    if batching.priority_queue_policy and not batching.priority_levels:
        yield Problem(
            "dynamic_batching.priority_queue_policy",
            "priority_queue_policy has no effect without priority_levels",
            expected="priority_levels > 0",
        )
    for path, policy in policies.items():
        yield from _policy_advice(path, policy)


def _has_limits(policy: ModelQueuePolicy) -> bool:
    return bool(policy.default_timeout_microseconds or policy.max_queue_size)


def _policy_advice(path: str, policy: ModelQueuePolicy) -> Problems:
    if policy.default_timeout_microseconds:
        return
    if policy.allow_timeout_override:
        yield Problem(
            f"{path}.allow_timeout_override",
            "allow_timeout_override has no effect without default_timeout_microseconds, which requests may "
            "only shorten",
            expected="default_timeout_microseconds > 0",
        )
    if policy.timeout_action:
        yield Problem(
            f"{path}.timeout_action",
            "timeout_action has no effect without default_timeout_microseconds",
            expected="default_timeout_microseconds > 0",
        )


_CLASS = "TritonPythonModel"
_COMPLETES = "auto_complete_config"
_EXECUTES = "execute"


@dataclass(frozen=True, slots=True)
class PythonFile:
    """Result of parsing a model's source file; `error` tells why it can't run, empty if it can."""

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
    names = set()
    for node in ast.walk(tree):
        names.add(getattr(node, "name", None) or getattr(node, "attr", None) or getattr(node, "id", None))
    # A class without `execute` is completed by what an add-on makes of it.
    return _EXECUTES not in names or not names.isdisjoint((_COMPLETES, "setattr"))


def agent_problems(config: ModelConfig, model: str, directory: Path, agents: NativeAgents) -> Problems:
    """Problems of a model's repository agents that would fail its load."""
    for number, agent in enumerate(config.model_repository_agents.agents):
        path = f"model_repository_agents.agents[{number}]"
        if _is_third_party(agent.name):
            return  # it may change the model for the next agents
        found = yield from attempt(f"{path}.name", partial(agents.find, agent.name))
        if found is not None and agents.has_library(agent.name):
            return  # likewise
        if found is Checksum:
            checksum = Checksum(ModelContext(model, {}, dict(agent.parameters)))
            yield from attempt(f"{path}.parameters", partial(checksum.load, directory))


def agent_notes(config: ModelConfig, agents: NativeAgents) -> Problems:
    """Repository agents that are not checked."""
    for number, agent in enumerate(config.model_repository_agents.agents):
        if _is_third_party(agent.name) or agents.has_library(agent.name):
            yield Problem(
                f"model_repository_agents.agents[{number}].name",
                f"repository agent '{agent.name}' is not run: what it makes of the model is not checked",
            )


def _is_third_party(name: str) -> bool:
    """True for an agent of another package."""
    return not is_built_in(name) and name in agent_names()
