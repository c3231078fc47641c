"""Layout of a model's directory: config file, version directories, fingerprints, version policy, markers."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from conch.core.errors import InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig

log = logging.getLogger(__name__)


CONFIG_FILE = "config.pbtxt"
ROLLOUT_FILE = "rollout.toml"
"""Declares labels and a rollout: it is no part of what is loaded."""
_CONFIGS = "configs"
_OTHER_DIRECTORIES = frozenset({"warmup", "initial_state", _CONFIGS})
_MAX_VERSION = 2**63 - 1
_MOST_DIGITS = 256

Fingerprint = tuple[tuple[str, int, int, int | str], ...]
"""State of a model's files: path, size, mtime and identity of each, sorted by path.

The mtime is in nanoseconds, 0 where only the identity counts. The identity is a local file's inode or an
object's etag.
"""


def variant_path(config_name: str) -> str:
    """Path of a named config variant inside the model's directory."""
    return f"{_CONFIGS}/{config_name}.pbtxt"


def config_file(directory: Path, config_name: str = "") -> Path:
    """The config file of a model: the named variant if it exists, else ``config.pbtxt``."""
    if config_name:
        variant = directory / variant_path(config_name)
        if variant.is_file():
            return variant
    return directory / CONFIG_FILE


def version_numbers(directory: Path) -> list[int]:
    """Versions that have a directory, ascending; logs a warning for other directories.

    Raises:
        OSError: The directory can't be read.
    """
    versions, ignored = split_versions(
        name for name, is_directory in list_directory(directory).items() if is_directory
    )
    for name, reason in ignored.items():
        log.warning("ignore version directory '%s' which %s", name, reason)
    return versions


def is_internal(name: str) -> bool:
    """True for entries that no user made: hidden ones, such as a Kubernetes volume's links, and caches."""
    return name.startswith(".") or name in ("lost+found", "__pycache__")


def split_versions(names: Iterable[str]) -> tuple[list[int], dict[str, str]]:
    """Splits directory names into versions, ascending, and ignored names with the reason."""
    versions: list[int] = []
    ignored: dict[str, str] = {}
    for name in sorted(names):
        if name in _OTHER_DIRECTORIES or is_internal(name):
            continue
        if not _is_number(name):
            ignored[name] = "fails to convert to integral number"
        elif name.startswith("0"):
            ignored[name] = "contains leading zeros in its directory name"
        else:
            versions.append(int(name))
    return sorted(versions), ignored


def list_directory(directory: Path) -> dict[str, bool]:
    """The entries of a directory by name: True for directories, and for what can't be examined.

    Raises:
        OSError: The directory can't be read.
    """
    found: dict[str, bool] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                found[entry.name] = entry.is_dir()
            except OSError:  # a link loop, or no permission: its use reports the error
                found[entry.name] = True
    return found


def fingerprint(directory: Path) -> Fingerprint:
    """Fingerprint of a directory; links are followed.

    A file that is replaced meanwhile shows as a change, now or next time.
    """
    found: list[tuple[str, int, int, int]] = []
    _add_files(found, os.fspath(directory), "", frozenset())
    return tuple(sorted(found))


def without_rollout(state: Fingerprint) -> Fingerprint:
    """A fingerprint without `ROLLOUT_FILE`, whose change reloads nothing."""
    return tuple(entry for entry in state if entry[0] != ROLLOUT_FILE) if has_rollout(state) else state


def has_rollout(state: Fingerprint) -> bool:
    """True if a model has a `ROLLOUT_FILE`."""
    return any(entry[0] == ROLLOUT_FILE for entry in state)


def versions_in(state: Fingerprint) -> list[int]:
    """Versions in a fingerprint, ascending."""
    tops = {path.partition("/")[0] for path, *_ in state if "/" in path}
    return sorted(int(name) for name in tops if _is_number(name) and not name.startswith("0"))


def of_configs(state: Fingerprint) -> Fingerprint:
    """The config files of a fingerprint."""
    return tuple(entry for entry in state if _is_config(entry[0]))


def of_version(state: Fingerprint, version: int) -> Fingerprint:
    """The files of one version in a fingerprint."""
    return tuple(entry for entry in state if entry[0].startswith(f"{version}/"))


def of_all_versions(state: Fingerprint) -> Fingerprint:
    """The files of a fingerprint shared by all versions, without config files."""
    return tuple(
        entry
        for entry in state
        if not (_is_config(entry[0]) or ("/" in entry[0] and _is_number(entry[0].partition("/")[0])))
    )


def _is_config(path: str) -> bool:
    return path == CONFIG_FILE or path.startswith(f"{_CONFIGS}/")


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < _MOST_DIGITS and int(name) <= _MAX_VERSION


def _add_files(
    files: list[tuple[str, int, int, int]], directory: str, prefix: str, above: frozenset[tuple[int, int]]
) -> None:
    try:
        status = os.stat(directory)
        identity = (status.st_dev, status.st_ino)
        if identity in above:  # a link to a parent directory
            return
        with os.scandir(directory) as found:
            entries = list(found)
    except OSError:
        return
    for entry in entries:
        path = f"{prefix}{entry.name}"
        try:
            if not entry.is_dir():
                status = entry.stat()
                files.append((path, status.st_size, status.st_mtime_ns, status.st_ino))
                continue
        except OSError:
            files.append((path, -1, -1, -1))
            continue
        # Python's caches are no change of the model.
        if entry.name != "__pycache__":
            files.append((f"{path}/", 0, 0, 0))  # so that empty version directories count
            _add_files(files, entry.path, f"{path}/", above | {identity})


def select_versions(config: ModelConfig, available: Collection[int]) -> list[int]:
    """Versions that the version policy selects, ascending. Raises InvalidArgumentError: it selects none."""
    policy = config.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "specific":
        for version in policy.specific.versions:
            if version not in available:
                log.error(
                    "version %d is specified for model '%s', but the version directory is not present",
                    version,
                    config.name,
                )
        selected = sorted(set(policy.specific.versions).intersection(available))
    elif choice == "latest":
        selected = sorted(available)[-policy.latest.num_versions :]
    else:
        selected = sorted(available)
    if not selected:
        raise InvalidArgumentError(
            f"at least one version must be available under the version policy of model '{config.name}'"
        )
    return selected


_MOST_SHOWN = 3

# Vim tests write permission with a file 4913; Emacs locks files with links named .#*.
_EDITORS = re.compile(r"(?:^|/)(?:\.[^/]*\.sw[a-z]|4913|[^/]*~|\.?#[^/]*#?|[^/]*\.(?:tmp|bak|orig))$")


def changed_paths(before: Fingerprint, after: Fingerprint) -> tuple[str, ...]:
    """Paths of files that differ between two fingerprints, sorted."""
    return tuple(sorted({path for path, *_ in set(before) ^ set(after)}))


def shortened_paths(paths: Sequence[str]) -> str:
    """At most three paths for a log line."""
    more = len(paths) - _MOST_SHOWN
    shown = ", ".join(paths[:_MOST_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def without_editor_files(state: Fingerprint) -> Fingerprint:
    """A fingerprint without temporary files of editors."""
    return tuple(entry for entry in state if not _EDITORS.search(entry[0]))


# Markers tell whether a copying tool has finished a model, or a subdirectory of it such as a version. They
# are no part of the model: adding or removing one is no change.
COMPLETE = ".complete"
"""Marker written last: everything is there, and settling can be skipped."""
INCOMPLETE = ".incomplete"
"""Marker of a model that is being written."""
_MARKERS = frozenset({COMPLETE, INCOMPLETE})


def split_markers(state: Fingerprint) -> tuple[Fingerprint, Fingerprint]:
    """Splits a fingerprint into the model's files and the markers."""
    markers = tuple(entry for entry in state if _is_marker(entry[0]))
    if not markers:
        return state, ()
    return tuple(entry for entry in state if not _is_marker(entry[0])), markers


def is_incomplete(markers: Fingerprint) -> bool:
    """True if a marker says that files are missing."""
    return any(path.endswith(INCOMPLETE) for path, *_ in markers)


def marked_complete(
    state: Fingerprint, markers: Fingerprint, before: Fingerprint, markers_before: Fingerprint
) -> bool:
    """True if markers that are new since `markers_before` cover everything that has changed."""
    fresh = {
        path.removesuffix(COMPLETE).rstrip("/")
        for path, *_ in set(markers).difference(markers_before)
        if not path.endswith(INCOMPLETE)
    }
    if "" in fresh:
        return True
    changed = {
        path.rpartition("/")[0].partition("/")[0] for path, *_ in set(state).symmetric_difference(before)
    }
    return bool(changed) and changed <= fresh


def _is_marker(path: str) -> bool:
    directory, _, name = path.rpartition("/")
    return name in _MARKERS and "/" not in directory
