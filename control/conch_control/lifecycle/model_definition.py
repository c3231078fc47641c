"""Reads a model's definition, config and versions, before anything is loaded.

Errors here are Triton's "failed to poll": clients get one fixed text; log and index have the reason.
Runs on the thread of the load.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from conch.core.errors import ConchError, InternalError, InvalidArgumentError, PermissionDeniedError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.json_format import parse_override
from conch_control.config.parse import normalize, read_config
from conch_control.config.platforms import filling_backend
from conch_control.config.powers import beyond_data, is_code
from conch_control.config.problems import Problems, raise_first
from conch_control.config.validate import completed_problems, config_problems
from conch_control.control_options import ControlOptions
from conch_control.repoagents import AgentChain, FindHook, find_hook, make_chain
from conch_control.repository.layout import CONFIG_FILE, config_file, version_numbers
from conch_control.repository.source import DataOnly

log = logging.getLogger(__name__)


class PollError(InternalError):
    """A model's definition can't be read; `reason` is for operators.

    Where config or parameters are wrong, which is no secret of the machine's, the message ends with it.
    """

    def __init__(self, name: str, reason: str, shown: bool = False) -> None:
        text = f"failed to load '{name}', failed to poll from model repository"
        super().__init__(f"{text}: {reason}" if shown else text)
        self.reason = reason


class NoVersionError(InvalidArgumentError):
    """No version is selected; `reason` is for operators, the message wraps it as Triton does."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"load failed for model '{name}': {reason}\n")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Definition:
    """A model's definition.

    Attributes:
        directory: The model's directory, as its repository agents left it.
        config: Normalised config, not completed; never changed.
        written: Config as written; never changed.
        agents: Repository agents of this load.
        parts: Identifiers of the composing models, with namespaces.
    """

    name: str
    directory: Path
    config: ModelConfig
    versions: tuple[int, ...]
    written: ModelConfig = field(default_factory=ModelConfig, compare=False)
    agents: AgentChain = field(default_factory=AgentChain, compare=False)
    namespace: str = ""
    parts: tuple[str, ...] = ()


def read_definition(
    name: str,
    directory: Path,
    options: ControlOptions,
    override: str | None = None,
    find: FindHook = find_hook,
    namespace: str = "",
    renamed: bool = False,
    data_only: DataOnly | None = None,
) -> Definition:
    """Runs the repository agents and reads the definition.

    The caller reports the result of the load to the agents. The config of a `renamed` model may have another
    name. Files and config of a `DataOnly` model have to be data, whether the config is the repository's, a
    variant of it or a client's.

    Raises:
        PollError: The config is missing or invalid, the directory is unreadable, or an agent refuses.
    """
    try:
        config = _read_config(directory, options, override, renamed)
        if data_only is not None:
            own = override is None and config_file(directory, options.model_config_name).name == CONFIG_FILE
            _check_data(config, directory, data_only.data_only, data_only.checked_backends if own else ())
        agents = make_chain(config, name, find)
        if not agents:
            return _read(name, namespace, directory, options, config, agents)
        prepared = agents.load(directory)
        with ExitStack() as undo:
            undo.callback(agents.load_failed)
            if prepared != directory and override is None:
                config = _read_config(prepared, options, None, renamed)
            definition = _read(name, namespace, prepared, options, config, agents)
            undo.pop_all()
        return definition
    except (ConchError, OSError) as error:
        reason = error.message if isinstance(error, ConchError) else str(error)
        log.error("Poll failed for model directory '%s': %s", name, reason)
        raise PollError(name, reason, isinstance(error, ConchError)) from error


def _read_config(
    directory: Path, options: ControlOptions, override: str | None, renamed: bool
) -> ModelConfig:
    if override is not None:
        config = parse_override(override)
    else:
        path = config_file(directory, options.model_config_name)
        # With completion, a missing file equals an empty one.
        has_config = options.strict_model_config or path.exists()
        config = read_config(path, options.max_config_bytes) if has_config else ModelConfig()
    if renamed:
        config.name = ""
    return config


def _check_data(config: ModelConfig, directory: Path, remedy: str, backends: Collection[str]) -> None:
    """Raises PermissionDeniedError: the config or a file makes more than data of a model."""
    for folder, _, names in os.walk(directory):
        for name in filter(is_code, names):
            path = Path(folder, name).relative_to(directory)
            raise PermissionDeniedError(f"it brings code ('{path}'), {remedy}")
    filled = ModelConfig()
    filled.CopyFrom(config)
    for _ in _filling_backend(filled, directory):
        pass  # the load reports them
    for power in beyond_data(filled, backends):
        raise PermissionDeniedError(f"it brings {power}, {remedy}")


def _filling_backend(config: ModelConfig, directory: Path) -> Problems:
    versions = version_numbers(directory)
    # The first version tells the format of all.
    first = directory / str(versions[0]) if versions else None
    content = frozenset[str]() if first is None else frozenset(os.listdir(first))
    return filling_backend(config, content.__contains__, first)


def _read(
    identifier: str,
    namespace: str,
    directory: Path,
    options: ControlOptions,
    config: ModelConfig,
    agents: AgentChain,
) -> Definition:
    name = identifier.removeprefix(f"{namespace}::") if namespace else identifier
    written = ModelConfig.FromString(config.SerializeToString())
    config.name = name
    versions = version_numbers(directory)
    raise_first(_filling_backend(config, directory))
    config.name = written.name or name
    normalize(config)
    raise_first(config_problems(config))
    if options.strict_model_config:
        raise_first(completed_problems(config, options.devices))  # else completion follows
    if config.name != name:
        raise InvalidArgumentError(
            f"unexpected directory name '{name}' for model '{config.name}', directory name must equal model "
            f"name"
        )
    return Definition(identifier, directory, config, tuple(versions), written, agents, namespace)
