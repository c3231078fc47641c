"""What a model asks for: the environment that its config names, or the packages that its files list."""

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
    """A list of packages beside a model.

    Attributes:
        kind: How they are listed: a ``requirements.txt``; the dependencies of a ``pyproject.toml``; the
            ``uv.lock`` of one; a ``pylock.toml``; or the comment in a script that PEP 723 describes.
        file: The file.
        contents: All that counts, with the file it is from: the same contents make the same environment.
        wheels: Files of packages that are named by path; what is in them counts too.
        own: Whether something else is named by a relative path, so that it means something else elsewhere.
        dependencies: The requirements themselves, where they stand in TOML.
        requires_python: Which versions of Python they are for, or empty.
    """

    kind: Kind
    file: Path
    contents: tuple[tuple[Path, bytes], ...]
    wheels: tuple[Path, ...] = ()
    own: bool = False
    dependencies: tuple[str, ...] = ()
    requires_python: str = ""

    def is_current(self) -> bool:
        """Whether the files still are what they were."""
        try:
            # Of a script only the comment counts, which has been read already.
            return self.kind == "script" or all(path.read_bytes() == data for path, data in self.contents)
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """What one model version asks for.

    Attributes:
        prepared: The directory or archive that the config names.
        packages: What is to be installed for it.
        variables: Variables for its workers, beside those that all workers inherit.
        reason: What asks for workers of its own, for messages; empty if nothing does.
    """

    prepared: Path | None = None
    packages: Packages | None = None
    variables: Mapping[str, str] | None = None
    reason: str = ""

    @classmethod
    def of(cls, spec: ModelSpec) -> EnvironmentSpec:
        """What a model version asks for.

        Raises:
            ConchError: A file can't be read, or is not what it should be.
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
        """The same, of what a config and the backend's options say."""
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
        asks = PASS if PASS in parameters else f"{VARIABLE}{next(iter(own))}" if own else ""
        reason = f"parameter '{asks}'" if asks else ""
        return cls(None, None, variables, reason)


def may_build(options: Mapping[str, str]) -> bool:
    """Whether packages may be installed."""
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
    """The variables of the server that the model's config and the operator name."""
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
    """The first list there is: what a version says comes before what the model says."""
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
    """The dependencies of a project; None where a file is only there for the settings of tools."""
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
    """The comment of PEP 723 in a model's file."""
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
    """A requirements file and all that it names: further lists, and constraints."""
    if path in seen:
        return
    seen.add(path)
    data = _bytes(where, path)
    yield path, data
    text = data.decode(errors="replace")
    for match in _NESTED.finditer(text):
        nested = path.parent / match["file"].strip("'\"")
        if nested.is_file():  # a URL, or a file that the tool will not find
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
    """Where the instances of a model version run.

    What asks for an environment, or for variables, gets workers by default: such a
    model works as in Triton, without further settings.

    Raises:
        NeedsWorkerError: It asks for an environment, but is to run in the server's process.
    """
    return resolve_placement(spec.name, EnvironmentSpec.of(spec), spec.parameters, spec.backend_options)


def resolve_placement(
    name: str, asked: EnvironmentSpec, parameters: Mapping[str, str], options: Mapping[str, str]
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
