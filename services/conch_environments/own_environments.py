"""Finds and makes the environment of a model: a directory, an unpacked archive, or a built one.

Threads and locks: runs on the thread that loads the model, for minutes at worst.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from conch.core.errors import InvalidArgumentError, UnavailableError, UnsupportedError
from conch.core.model_control import LoadCancelled, load_cancelled
from conch.workers.environment import Environment, OwnEnvironment
from conch.workers.environment_spec import MODEL_DIRECTORY
from conch_environments.archives import digest, unpack
from conch_environments.building import Tools, build, key_of
from conch_environments.cache import EnvironmentCache, Kept, Make, check_options
from conch_environments.interpreter import activated, interpreter_in
from conch_environments.package_lists import Packages, find_packages
from conch_environments.tools import run_tool

log = logging.getLogger(__name__)

EXECUTION_ENV_PATH = "EXECUTION_ENV_PATH"
BUILD = "build-environments"
PREPARED = "environment"

_BROKEN = "does not run any more and is removed"
_NOTES = "archives"
"""Folder of the cache with digests of archives and wheels."""


@dataclass(frozen=True, slots=True)
class PreparedEnvironment(OwnEnvironment):
    """A directory or an archive that the config or the operator names.

    Attributes:
        name: The model.
        prepared: The path.
        options: Options of the backend.
    """

    name: str
    prepared: Path
    reason: str
    options: Mapping[str, str]

    def make(self, variables: Mapping[str, str]) -> Environment:
        """Unpacks an archive that the cache does not have."""
        stopped = load_cancelled()
        label = f"model '{self.name}', environment '{self.prepared}'"
        if self.prepared.is_dir():
            return _running(self.prepared, label, variables, stopped)
        return _unpacked(self.prepared, label, variables, EnvironmentCache.of(self.options), stopped)


@dataclass(frozen=True, slots=True)
class BuiltEnvironment(OwnEnvironment):
    """An environment with the packages that a model lists.

    Attributes:
        name: The model.
        packages: Packages to install.
        options: Options of the backend.
    """

    name: str
    packages: Packages
    reason: str
    options: Mapping[str, str]

    def make(self, variables: Mapping[str, str]) -> Environment:
        """Installs the packages, unless the cache has them."""
        label = f"model '{self.name}', environment of '{self.packages.file}'"
        if self.options.get(BUILD, "true") != "true":
            raise UnsupportedError(
                f"{label}: the server was started with --backend-config=python,{BUILD}=false, so no packages "
                f"are installed; name an environment that has them with EXECUTION_ENV_PATH"
            )
        cache = EnvironmentCache.of(self.options)
        return _built(self.packages, label, variables, cache, load_cancelled())


def find_environment(
    name: str,
    version_directory: Path,
    model_file: str,
    parameters: Mapping[str, str],
    options: Mapping[str, str],
) -> OwnEnvironment | None:
    """The environment that a model version asks for, for the entry-point group ``conch.environments``.

    A path in the config comes before packages in the model's files, and these before a path of the operator.

    Raises:
        ConchError: A setting is wrong, or a file can't be read or is malformed.
    """
    where = f"model '{name}'"
    check_options(options)
    if given := parameters.get(EXECUTION_ENV_PATH, ""):
        path = given.replace(MODEL_DIRECTORY, str(version_directory.parent))
        return _prepared(name, path, f"parameter '{EXECUTION_ENV_PATH}'", options)
    packages = None if _ignored(options) else find_packages(where, version_directory, model_file)
    if packages is not None:
        return BuiltEnvironment(name, packages, f"'{packages.file}'", options)
    if given := options.get(PREPARED, ""):
        return _prepared(name, given, f"--backend-config=...,{PREPARED}", options)
    return None


def _prepared(name: str, given: str, source: str, options: Mapping[str, str]) -> PreparedEnvironment:
    path = Path(given).absolute()
    if not path.exists():
        raise InvalidArgumentError(f"model '{name}': there is no '{path}', which {source} names")
    return PreparedEnvironment(name, path, source, options)


def _ignored(options: Mapping[str, str]) -> bool:
    value = options.get(BUILD, "true")
    if value not in ("true", "false", "ignore"):
        raise InvalidArgumentError(
            f"--backend-config=python,{BUILD} must be 'true', 'false' or 'ignore', not '{value}'"
        )
    return value == "ignore"


def _running(
    prefix: Path, label: str, added: Mapping[str, str], stopped: LoadCancelled, kept: Kept | None = None
) -> Environment:
    with ExitStack() as undo:
        if kept is not None:
            undo.callback(kept.release)
        found = interpreter_in(prefix, label, added=added, stopped=stopped)
        undo.pop_all()
    if kept is None:
        return Environment(found.python, found.variables, found.paths, label, found.version)
    return Environment(found.python, found.variables, found.paths, label, found.version, kept.release)


def _in_cache(
    cache: EnvironmentCache,
    key: str,
    make: Make,
    label: str,
    added: Mapping[str, str],
    stopped: LoadCancelled,
) -> Environment:
    """An environment from the cache; rebuilt if its interpreter no longer runs."""
    kept = cache.find_or_make(key, make, label, stopped)
    try:
        return _running(kept.folder / "env", label, added, stopped, kept)
    except InvalidArgumentError as error:
        log.warning("%s", error.message)
        if not _runs_without(added, kept.folder / "env", label, stopped):
            cache.remove(kept.folder.name, _BROKEN)
    # The same entry if it is in use, or if only the variables are wrong.
    kept = cache.find_or_make(key, make, label, stopped)
    try:
        return _running(kept.folder / "env", label, added, stopped, kept)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"{error.message}; it is kept in '{kept.folder}', which can be deleted while no server uses it"
        ) from error


def _runs_without(added: Mapping[str, str], prefix: Path, label: str, stopped: LoadCancelled) -> bool:
    try:
        return bool(added and interpreter_in(prefix, label, stopped=stopped))
    except InvalidArgumentError:
        return False


def _unpacked(
    archive: Path, label: str, added: Mapping[str, str], cache: EnvironmentCache, stopped: LoadCancelled
) -> Environment:
    def make(folder: Path, lock: int) -> Mapping[str, str]:
        prefix = folder / "env"
        prefix.mkdir()
        unpack(archive, prefix, label, stopped)
        if digest(archive, notes, stopped) != found:
            raise UnavailableError(f"{label}: the archive was changed while it was unpacked")
        fix = prefix / "bin" / "conda-unpack"
        if fix.is_file():
            python = prefix / "bin" / "python"
            run_tool([str(python), str(fix)], label, prefix, activated(prefix), lock, stopped)
        return {
            "version": interpreter_in(prefix, label, added=added, stopped=stopped).version,
            "from": str(archive),
        }

    notes = cache.directory / _NOTES
    try:
        found = digest(archive, notes, stopped)
    except OSError as error:
        raise UnavailableError(f"{label}: the archive can't be read: {error.strerror}") from error
    key = f"unpacked-{platform.machine()}-{found[:32]}"
    return _in_cache(cache, key, make, label, added, stopped)


def _built(
    packages: Packages, label: str, added: Mapping[str, str], cache: EnvironmentCache, stopped: LoadCancelled
) -> Environment:
    def make(folder: Path, lock: int) -> Mapping[str, str]:
        facts = build(packages, folder, label, Tools.detect(), lock, stopped, added)
        if packages.wheels and key_of(packages, notes, stopped) != key:
            raise UnavailableError(f"{label}: a wheel was changed while the environment was built")
        return facts

    notes = cache.directory / _NOTES
    key = key_of(packages, notes, stopped)
    return _in_cache(cache, key, make, label, added, stopped)
