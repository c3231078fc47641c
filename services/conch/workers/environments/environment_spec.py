"""Reads a model's environment spec: an environment named by its config, or packages listed in its files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from conch.backends.python.python_settings import NeedsWorkerError, Placement, Settings
from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec
from conch.workers.environments.environment import named
from conch.workers.environments.local_dependencies import (
    named_in_lines,
    relative_in_lock,
    relative_in_project,
)

EXECUTION_ENV_PATH = "EXECUTION_ENV_PATH"
MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
BUILD = "build-environments"
PREPARED = "environment"
VARIABLE = "CONCH_ENV_"
PASS = "CONCH_PASS_ENVIRONMENT"
PASS_OPTION = "pass-environment"

Kind = Literal["requirements", "project", "uv-lock", "pylock", "script"]

_SCRIPT = re.compile(r"(?m)^# /// script[ \t]*\n(?P<lines>(?:^#(?:| .*)\n)+?)^# ///[ \t]*$")
_NESTED = re.compile(r"(?m)^[ \t]*(?:-r|-c|--requirement|--constraint)(?:[ \t]+|=)?(?P<file>\S+)")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATTERN = re.compile(r"[A-Za-z0-9_*?]+")


@dataclass(frozen=True, slots=True)
class Packages:
    """A list of packages in a model's files.

    Attributes:
        kind: Format: ``requirements.txt``, dependencies of a ``pyproject.toml``, its ``uv.lock``, a
            ``pylock.toml``, or a script's comment of PEP 723.
        file: The file.
        contents: Relevant contents by file; equal contents make equal environments.
        wheels: Package files that are named by path; their contents count too.
        own: True if it names anything else by a relative path, which depends on the directory.
        dependencies: The requirements, if the format is TOML.
        requires_python: Specifier of Python versions, or empty.
    """

    kind: Kind
    file: Path
    contents: tuple[tuple[Path, bytes], ...]
    wheels: tuple[Path, ...] = ()
    own: bool = False
    dependencies: tuple[str, ...] = ()
    requires_python: str = ""

    def is_current(self) -> bool:
        """True if the files are unchanged."""
        try:
            # Only the comment of a script counts, and it was read already.
            return self.kind == "script" or all(path.read_bytes() == data for path, data in self.contents)
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """The environment that a model version requires.

    Attributes:
        prepared: Directory or archive from the config.
        packages: Packages to install.
        variables: Variables besides the inherited ones.
        reason: Setting that requires a worker, for messages; empty if none does.
    """

    prepared: Path | None = None
    packages: Packages | None = None
    variables: Mapping[str, str] | None = None
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
        where = f"model '{name}'"
        directory = version_directory.parent
        own = _variables(where, directory, parameters)
        variables = {**_passed(where, parameters, options), **own}
        given = parameters.get(EXECUTION_ENV_PATH, "")
        if given:
            path = Path(given.replace(MODEL_DIRECTORY, str(directory))).absolute()
            if not path.exists():
                raise InvalidArgumentError(
                    f"{where}: there is no '{path}', which parameter '{EXECUTION_ENV_PATH}' names"
                )
            return cls(path, None, variables, f"parameter '{EXECUTION_ENV_PATH}'")
        packages = None if _ignored(options) else _packages(where, version_directory, model_file)
        if packages is not None:
            return cls(None, packages, variables, f"'{packages.file}'")
        if given := options.get(PREPARED, ""):
            source = f"--backend-config=...,{PREPARED}"
            path = Path(given).absolute()
            if not path.exists():
                raise InvalidArgumentError(f"{where}: there is no '{path}', which {source} names")
            return cls(path, None, variables, source)
        setting = PASS if PASS in parameters else f"{VARIABLE}{next(iter(own))}" if own else ""
        reason = f"parameter '{setting}'" if setting else ""
        return cls(None, None, variables, reason)


def may_build(options: Mapping[str, str]) -> bool:
    """True if packages may be installed."""
    return options.get(BUILD, "true") == "true"


def _ignored(options: Mapping[str, str]) -> bool:
    value = options.get(BUILD, "true")
    if value not in ("true", "false", "ignore"):
        raise InvalidArgumentError(
            f"--backend-config=python,{BUILD} must be 'true', 'false' or 'ignore', not '{value}'"
        )
    return value == "ignore"


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


def _packages(where: str, version_directory: Path, model_file: str) -> Packages | None:
    """The first list found; the version's directory precedes the model's."""
    script = version_directory / model_file
    for found in (
        _in_directory(where, version_directory),
        _in_script(where, script),
        _in_directory(where, version_directory.parent),
    ):
        if found is not None:
            return found
    return None


def _in_directory(where: str, directory: Path) -> Packages | None:
    path = directory / "requirements.txt"
    if path.is_file():
        lists = tuple(_with_nested(where, path, set()))
        found = named_in_lines((data.decode(errors="replace") for _, data in lists), directory)
        return Packages("requirements", path, lists, found.files, found.relative)
    path = directory / "pylock.toml"
    if path.is_file():
        data = _bytes(where, path)
        lock = _parsed(where, path, data)
        requires = _text(where, path, lock.get("requires-python", ""))
        return Packages("pylock", path, ((path, data),), (), relative_in_lock(lock), (), requires)
    path = directory / "pyproject.toml"
    return _in_project(where, path) if path.is_file() else None


def _in_project(where: str, path: Path) -> Packages | None:
    """The dependencies of a project; None if the file only configures tools."""
    data = _bytes(where, path)
    whole = _parsed(where, path, data)
    project = whole.get("project")
    if not isinstance(project, dict):
        return None
    if "dependencies" in project.get("dynamic", ()):
        raise InvalidArgumentError(
            f"{where}: the dependencies in '{path}' are dynamic, so they can't be told without building the "
            f"project; list them in [project], or in a requirements.txt"
        )
    requires = _text(where, path, project.get("requires-python", ""))
    dependencies = _texts(where, path, project.get("dependencies", []))
    found = named_in_lines(dependencies, path.parent)
    tool = whole.get("tool", {})
    own = found.relative or relative_in_project(tool.get("uv") if isinstance(tool, dict) else None)
    lock = path.with_name("uv.lock")
    if lock.is_file():
        locked = _bytes(where, lock)
        return Packages("uv-lock", path, ((path, data), (lock, locked)), found.files, own, (), requires)
    return Packages("project", path, ((path, data),), found.files, own, dependencies, requires)


def _in_script(where: str, path: Path) -> Packages | None:
    """Reads the PEP 723 comment of a model's file."""
    if path.suffix != ".py" or not path.is_file():
        return None
    text = _bytes(where, path).decode(errors="replace").replace("\r\n", "\n")
    blocks = _SCRIPT.findall(text)
    if not blocks:
        return None
    if len(blocks) > 1:
        raise InvalidArgumentError(f"{where}: '{path}' has more than one comment '# /// script'")
    block = "".join(line[1:].removeprefix(" ") + "\n" for line in blocks[0].splitlines())
    table = _parsed(where, path, block.encode())
    dependencies = _texts(where, path, table.get("dependencies", []))
    requires = _text(where, path, table.get("requires-python", ""))
    found = named_in_lines(dependencies, path.parent)
    contents = ((path, block.encode()),)
    return Packages("script", path, contents, found.files, found.relative, dependencies, requires)


def _with_nested(where: str, path: Path, seen: set[Path]) -> Iterator[tuple[Path, bytes]]:
    """Yields a requirements file, and the lists and constraints that it includes."""
    if path in seen:
        return
    seen.add(path)
    data = _bytes(where, path)
    yield path, data
    text = data.decode(errors="replace")
    for match in _NESTED.finditer(text):
        nested = path.parent / match["file"].strip("'\"")
        if nested.is_file():  # otherwise a URL, or missing
            yield from _with_nested(where, nested, seen)


def _bytes(where: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{where}: '{path}' can't be read: {error.strerror}") from error


def _parsed(where: str, path: Path, data: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode())
    except ValueError as error:
        raise InvalidArgumentError(f"{where}: '{path}' is not TOML: {error}") from error


def _texts(where: str, path: Path, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or any(not isinstance(item, str) or "\n" in item for item in value):
        raise InvalidArgumentError(f"{where}: 'dependencies' in '{path}' must be a list of strings")
    return tuple(value)


def _text(where: str, path: Path, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{where}: 'requires-python' in '{path}' must be a string")
    return value


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
