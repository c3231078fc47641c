"""Builds an environment from a list of packages: with uv if available, otherwise with venv and pip.

Threads and locks: the caller holds the cache's lock of the folder; tools inherit it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.model_control import LoadCancelled, never
from conch_environments.archives import digest
from conch_environments.interpreter import OLDEST, interpreter_in, without_python
from conch_environments.package_lists import Packages
from conch_environments.tools import run_tool

_FORMAT = 2
"""Part of every key; incremented when the way of building changes."""

_LOCKED = frozenset({"uv-lock", "pylock"})
_GENERATED = "requirements.txt"


@dataclass(frozen=True, slots=True)
class Tools:
    """Available tools.

    Attributes:
        uv: Command of uv, or empty.
        pip: True if this interpreter's pip can install into another environment.
    """

    uv: tuple[str, ...] = ()
    pip: bool = False

    @classmethod
    def detect(cls) -> Tools:
        """Detects the tools."""
        found = shutil.which("uv")
        if found is not None:
            return cls((found,))
        if importlib.util.find_spec("uv") is not None:
            return cls((sys.executable, "-m", "uv"))
        return cls((), _pip_version() >= (22, 3))


def key_of(packages: Packages, notes: Path, stopped: LoadCancelled = never) -> str:
    """Cache key: equal for equal packages, interpreter and platform. `notes` caches digests of wheels.

    Raises:
        ConchError: A wheel can't be read, or the load was stopped.
    """
    hashed = hashlib.sha256()
    facts = [
        _FORMAT,
        packages.kind,
        sys.version,
        sys.base_prefix,
        platform.python_implementation(),
        sysconfig.get_platform(),
        str(packages.file.parent) if packages.own else "",
    ]
    try:
        wheels = [digest(path, notes, stopped).encode() for path in packages.wheels]
    except OSError as error:
        raise UnavailableError(f"'{error.filename}' can't be read: {error.strerror}") from error
    for data in (*(repr(fact).encode() for fact in facts), *(data for _, data in packages.contents), *wheels):
        hashed.update(len(data).to_bytes(8, "little"))
        hashed.update(data)
    return f"built-{hashed.hexdigest()[:32]}"


def build(
    packages: Packages,
    folder: Path,
    label: str,
    tools: Tools,
    lock: int | None = None,
    stopped: LoadCancelled = never,
    added: Mapping[str, str] | None = None,
) -> Mapping[str, str]:
    """Builds the environment in ``folder/env`` of an empty folder; returns facts for the cache's record.

    The tools inherit descriptor `lock`. The new interpreter is tried with the model's variables `added`.

    Raises:
        ConchError: The build failed or was stopped.
    """
    python = _python_for(packages, label, tools)
    _check_tools(packages, label, tools)
    prefix = folder / "env"
    scratch = folder / "tmp"
    scratch.mkdir()
    variables = {
        **without_python(os.environ),
        "PYTHONNOUSERSITE": "1",
        "PIP_USER": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "NO_COLOR": "1",
        "TMPDIR": str(scratch),  # removed with the folder if a tool is killed
        "UV_PROJECT_ENVIRONMENT": str(prefix),
    }
    base = packages.file.parent
    for command in _commands(packages, folder, prefix, python, tools):
        run_tool(command, label, base, variables, lock, stopped)
    if not packages.is_current():
        raise UnavailableError(f"{label}: the file was changed while the environment was built")
    shutil.rmtree(scratch)
    found = interpreter_in(prefix, label, conda=False, added=added, stopped=stopped)
    return {"version": found.version, "from": str(packages.file)}


def _python_for(packages: Packages, label: str, tools: Tools) -> str:
    """The interpreter to build with: this one, or a specifier for uv."""
    wanted = packages.requires_python
    try:
        if allows(wanted, tuple(sys.version_info[:3])):
            return sys.executable
    except ValueError as error:
        raise InvalidArgumentError(
            f"{label}: '{error}' in requires-python '{wanted}' is no version of Python"
        ) from None
    if tools.uv:
        return f"{wanted},>={'.'.join(map(str, OLDEST))}"
    raise InvalidArgumentError(
        f"{label}: it requires Python '{wanted}', but the server runs in {platform.python_version()}; put uv "
        f"on the server's PATH, which finds other versions, or name an environment with EXECUTION_ENV_PATH"
    )


def _check_tools(packages: Packages, label: str, tools: Tools) -> None:
    if packages.kind in _LOCKED and not tools.uv:
        lock = "uv.lock" if packages.kind == "uv-lock" else "pylock.toml"
        raise UnavailableError(
            f"{label}: {lock} needs uv, which is neither on the server's PATH nor installed beside it"
        )
    if not tools.uv and not tools.pip and importlib.util.find_spec("ensurepip") is None:
        raise UnavailableError(
            f"{label}: there is nothing to build an environment with; put uv on the server's PATH, or "
            f"install pip beside the server"
        )


def _commands(
    packages: Packages, folder: Path, prefix: Path, python: str, tools: Tools
) -> list[tuple[str, ...]]:
    """Commands in order. numpy is resolved together with the packages, so that one version suits all."""
    inside = str(prefix / "bin" / "python")
    requirements = packages.file
    if packages.kind in ("script", "project"):
        requirements = folder / _GENERATED
        requirements.write_text("".join(f"{line}\n" for line in packages.dependencies))
    if tools.uv:
        make = (*tools.uv, "venv", "--no-project", "--python", python, str(prefix))
        compiled = "--compile-bytecode"  # else the first worker does, which takes a minute for large packages
        install = (*tools.uv, "pip", "install", compiled, "--python", inside)
        if packages.kind == "uv-lock":
            # A file .python-version would select another interpreter.
            project = ("--python", inside, "--project", str(packages.file.parent))
            sync = (*tools.uv, "sync", "--frozen", "--no-dev", "--no-install-project", compiled, *project)
            return [make, sync, (*install, "numpy")]
        if packages.kind == "pylock":
            return [make, (*install, "-r", str(packages.file)), (*install, "numpy")]
        if packages.kind == "project" and _has_name(packages):
            requirements = packages.file  # uv reads its [tool.uv], such as package indexes
        return [make, (*install, "-r", str(requirements), *_numpy(packages))]
    if tools.pip:
        make = (python, "-m", "venv", "--without-pip", str(prefix))
        install = (python, "-m", "pip", "--python", inside, "install", "--progress-bar", "off")
    else:
        make = (python, "-m", "venv", str(prefix))
        install = (inside, "-m", "pip", "install", "--progress-bar", "off")
    return [make, (*install, "-r", str(requirements), *_numpy(packages))]


def _has_name(packages: Packages) -> bool:
    """True if a project has a name; uv does not read one without."""
    return "name" in tomllib.loads(packages.contents[0][1].decode())["project"]


def _numpy(packages: Packages) -> tuple[str, ...]:
    """numpy, unless all packages need hashes; a list without numpy then fails after the build."""
    hashed = any(b"--hash" in data or b"--require-hashes" in data for _, data in packages.contents)
    return () if packages.kind == "requirements" and hashed else ("numpy",)


def _pip_version() -> tuple[int, ...]:
    if importlib.util.find_spec("pip") is None:
        return (0,)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return tuple(int(part) for part in version("pip").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return (0,)


_CLAUSE = re.compile(r"(~=|==|!=|<=|>=|<|>)\s*(\d+(?:\.\d+)*)(\.\*)?")

Version = tuple[int, ...]

_COMPARISONS: Mapping[str, Callable[[Version, Version], bool]] = {
    "<=": lambda version, other: version <= other,
    ">=": lambda version, other: version >= other,
    "<": lambda version, other: version < other,
    ">": lambda version, other: version > other,
}


def allows(specifier: str, version: Version) -> bool:
    """True if a version (three numbers) satisfies a specifier such as ``>=3.10,<3.13``; empty allows any.

    Raises:
        ValueError: A clause is malformed or names a pre-release.
    """
    return all(_holds(clause.strip(), version) for clause in specifier.split(",") if clause.strip())


def _holds(clause: str, version: Version) -> bool:
    match = _CLAUSE.fullmatch(clause)
    if match is None:
        raise ValueError(clause)
    operator, digits, wildcard = match.groups()
    parts = tuple(int(part) for part in digits.split("."))
    if wildcard is not None and operator not in ("==", "!="):
        raise ValueError(clause)
    if operator == "~=":
        if len(parts) < 2:
            raise ValueError(clause)
        return version >= _padded(parts) and version[: len(parts) - 1] == parts[:-1]
    if operator in ("==", "!="):
        same = version[: len(parts)] == parts if wildcard is not None else version == _padded(parts)
        return same == (operator == "==")
    return _COMPARISONS[operator](version, _padded(parts))


def _padded(parts: Version) -> Version:
    return (*parts, 0, 0, 0)[: max(3, len(parts))]
