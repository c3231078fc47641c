"""Reads the environment that a model version asks for: variables, and an environment of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from conch.backends.python.python_settings import NeedsWorkerError, Placement, Settings
from conch.core.add_ons import load_add_ons
from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec
from conch.workers.environment import Environment, OwnEnvironment, named, server_environment

MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
VARIABLE = "CONCH_ENV_"
PASS = "CONCH_PASS_ENVIRONMENT"
PASS_OPTION = "pass-environment"

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATTERN = re.compile(r"[A-Za-z0-9_*?]+")

_Find = Callable[[str, Path, str, Mapping[str, str], Mapping[str, str]], OwnEnvironment | None]


@cache
def _finders() -> tuple[_Find, ...]:
    return tuple(load_add_ons("conch.environments").values())


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """The environment that a model version requires.

    Attributes:
        variables: Variables besides the inherited ones.
        own: An environment instead of the server's.
        reason: Setting that requires a worker, for messages; empty if none does.
    """

    variables: Mapping[str, str]
    own: OwnEnvironment | None = None
    reason: str = ""

    @classmethod
    def of(cls, spec: ModelSpec) -> EnvironmentSpec:
        """Reads a complete spec.

        Raises:
            ConchError: A file can't be read or is malformed.
        """
        return cls.read(
            spec.name, spec.version_directory, spec.model_file, spec.parameters, spec.backend_options
        )

    @classmethod
    def read(
        cls,
        name: str,
        version_directory: Path,
        model_file: str,
        parameters: Mapping[str, str],
        options: Mapping[str, str],
    ) -> EnvironmentSpec:
        """Reads parameters of a config and options of the backend."""
        variables = read_variables(name, version_directory, parameters, options)
        for find in _finders():
            own = find(name, version_directory, model_file, parameters, options)
            if own is not None:
                return cls(variables, own, own.reason)
        given = [each for each in parameters if each == PASS or each.startswith(VARIABLE)]
        setting = PASS if PASS in parameters else given[0] if given else ""
        return cls(variables, None, f"parameter '{setting}'" if setting else "")

    def make(self) -> Environment:
        """The environment, which is made if needed. Raises ConchError: it can't be made."""
        return server_environment(self.variables) if self.own is None else self.own.make(self.variables)


def read_variables(
    name: str, version_directory: Path, parameters: Mapping[str, str], options: Mapping[str, str]
) -> dict[str, str]:
    """Variables that the config sets, and those of the server that config and operator select.

    Raises:
        InvalidArgumentError: A setting is malformed.
    """
    where = f"model '{name}'"
    own = _variables(where, version_directory.parent, parameters)
    return {**_passed(where, parameters, options), **own}


def _variables(where: str, directory: Path, parameters: Mapping[str, str]) -> dict[str, str]:
    variables = {}
    for key, value in parameters.items():
        if key.startswith(VARIABLE):
            name = key.removeprefix(VARIABLE)
            if not _VARIABLE_NAME.fullmatch(name) or "\0" in value:
                raise InvalidArgumentError(f"{where}: parameter '{key}' is no variable that can be set")
            variables[name] = value.replace(MODEL_DIRECTORY, str(directory))
    return variables


def _passed(where: str, parameters: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """Variables of the server that config and operator select."""
    patterns: list[str] = []
    for value, source in (
        (options.get(PASS_OPTION), f"--backend-config=python,{PASS_OPTION}"),
        (parameters.get(PASS), f"{where}: parameter '{PASS}'"),
    ):
        if value is None:
            continue
        listed = value.replace(",", " ").split()
        if not listed or not all(map(_PATTERN.fullmatch, listed)):
            raise InvalidArgumentError(
                f"{source} must list names of environment variables, or patterns such as 'AWS_*', separated "
                f"by commas, not '{value}'"
            )
        patterns += listed
    return named(patterns)


def placement_of(spec: ModelSpec) -> Placement:
    """Placement of a model version's instances.

    Models that require an environment or variables run in workers by default, as in Triton.

    Raises:
        NeedsWorkerError: The model requires an environment, but is configured to run in process.
    """
    return resolve_placement(spec.name, EnvironmentSpec.of(spec), spec.parameters, spec.backend_options)


def resolve_placement(
    name: str, wanted: EnvironmentSpec, parameters: Mapping[str, str], options: Mapping[str, str]
) -> Placement:
    """As `placement_of`, for a config that is not complete."""
    placement = Settings.read(name, parameters, options).placement
    if not wanted.reason or placement == "worker":
        return placement
    own = "CONCH_PLACEMENT" in parameters
    setting = "parameter 'CONCH_PLACEMENT'" if own else "--backend-config=python,placement"
    raise NeedsWorkerError(
        f"model '{name}': {wanted.reason} asks for an environment of its own, which only a worker process "
        f"can have",
        f"but {setting} has it run in the server's process ('{placement}'); set CONCH_PLACEMENT to 'worker' "
        f"for the model",
    )
