"""Resolves the environment of a model: the server's, a directory, an unpacked archive, or a built one.

Threads and locks: runs on the thread that loads the model, for minutes at worst.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from conch.core.errors import InvalidArgumentError, UnavailableError, UnsupportedError
from conch.core.model_control import LoadCancelled, load_cancelled
from conch.core.spec import ModelSpec
from conch.workers.environments.archives import digest, unpack
from conch.workers.environments.building import Tools, build, key_of
from conch.workers.environments.cache import EnvironmentCache, Kept, Make
from conch.workers.environments.environment import Environment, server_environment
from conch.workers.environments.environment_spec import BUILD, EnvironmentSpec, Packages, may_build
from conch.workers.environments.interpreter import activated, interpreter_in
from conch.workers.environments.tools import run_tool

log = logging.getLogger(__name__)

_BROKEN = "does not run any more and is removed"
_NOTES = "archives"
"""Folder of the cache with digests of archives and wheels."""


def environment_for(spec: ModelSpec, cache: EnvironmentCache) -> Environment:
    """Resolves the environment of a model version, and makes it if needed.

    Raises:
        ConchError: The environment can't be made or run models; the text names the file. Or the load was
            stopped.
    """
    return resolve_environment(spec.name, EnvironmentSpec.of(spec), spec.backend_options, cache)


def resolve_environment(
    name: str, wanted: EnvironmentSpec, options: Mapping[str, str], cache: EnvironmentCache
) -> Environment:
    """As `environment_for`, for a config that is not complete."""
    stopped = load_cancelled()
    variables = wanted.variables or {}
    if wanted.prepared is not None:
        label = f"model '{name}', environment '{wanted.prepared}'"
        if wanted.prepared.is_dir():
            return _running(wanted.prepared, label, variables, stopped)
        return _unpacked(wanted.prepared, label, variables, cache, stopped)
    if wanted.packages is not None:
        label = f"model '{name}', environment of '{wanted.packages.file}'"
        if not may_build(options):
            raise UnsupportedError(
                f"{label}: the server was started with --backend-config=python,{BUILD}=false, so no packages "
                f"are installed; name an environment that has them with EXECUTION_ENV_PATH"
            )
        return _built(wanted.packages, label, variables, cache, stopped)
    return server_environment(variables)


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
