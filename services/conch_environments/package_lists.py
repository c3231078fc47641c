"""Reads the packages that are listed in a model's files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from conch.core.errors import InvalidArgumentError
from conch_environments.local_dependencies import (
    named_in_lines,
    relative_in_lock,
    relative_in_project,
)

Kind = Literal["requirements", "project", "uv-lock", "pylock", "script"]

_SCRIPT = re.compile(r"(?m)^# /// script[ \t]*\n(?P<lines>(?:^#(?:| .*)\n)+?)^# ///[ \t]*$")
_NESTED = re.compile(r"(?m)^[ \t]*(?:-r|-c|--requirement|--constraint)(?:[ \t]+|=)?(?P<file>\S+)")


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


def find_packages(where: str, version_directory: Path, model_file: str) -> Packages | None:
    """The first list found; the version's directory precedes the model's.

    Raises:
        InvalidArgumentError: A file can't be read or is malformed.
    """
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
