"""The inside of a model's directory: its config file, its version directories, its fingerprint."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from conch.core.errors import InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig

log = logging.getLogger(__name__)


CONFIG_FILE = "config.pbtxt"
_CONFIGS = "configs"
_OTHER_DIRECTORIES = frozenset({"warmup", "initial_state", _CONFIGS})
_MAX_VERSION = 2**63 - 1
_MOST_DIGITS = 256

Fingerprint = tuple[tuple[str, int, int, int | str], ...]
"""Path, size, modification time and identity of every file of a model, sorted by path.

The time is in nanoseconds, 0 where only the identity counts. The identity is the inode of a local file, and
the etag of an object.
"""


def variant_path(config_name: str) -> str:
    """Where a named variant of a config is, inside the model's directory."""
    return f"{_CONFIGS}/{config_name}.pbtxt"


def config_file(directory: Path, config_name: str = "") -> Path:
    """The config file of a model: the named variant where there is one, else the usual one."""
    if config_name:
        variant = directory / variant_path(config_name)
        if variant.is_file():
            return variant
    return directory / CONFIG_FILE


def version_numbers(directory: Path) -> list[int]:
    """Versions a model has a directory for, ascending; other directories are warned about.

    Raises:
        OSError: The directory can't be read.
    """
    with os.scandir(directory) as entries:
        versions, ignored = split_versions(entry.name for entry in entries if is_directory(entry))
    for name, reason in ignored.items():
        log.warning("ignore version directory '%s' which %s", name, reason)
    return versions


def split_versions(names: Iterable[str]) -> tuple[list[int], dict[str, str]]:
    """What the directories inside a model's directory are.

    Args:
        names: Their names.

    Returns:
        Versions, ascending; and those that are neither versions nor have another purpose, by name, each with
        the reason.
    """
    versions: list[int] = []
    ignored: dict[str, str] = {}
    for name in sorted(names):
        if name in _OTHER_DIRECTORIES:
            continue
        if not _is_number(name):
            ignored[name] = "fails to convert to integral number"
        elif name.startswith("0"):
            ignored[name] = "contains leading zeros in its directory name"
        else:
            versions.append(int(name))
    return sorted(versions), ignored


def is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether something is a directory, or can't be told: then whoever uses it finds out why not."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or to where nobody may look
        return True


def fingerprint(directory: Path) -> Fingerprint:
    """What tells one state of a model's files from another; links are followed.

    A file that is replaced while this runs shows up as a change, now or at the next look.
    """
    return tuple(sorted(_files(os.fspath(directory), "", set())))


def versions_in(state: Fingerprint) -> list[int]:
    """Versions that have a directory by a fingerprint, ascending."""
    tops = {path.partition("/")[0] for path, *_ in state if "/" in path}
    return sorted(int(name) for name in tops if _is_number(name) and not name.startswith("0"))


def of_configs(state: Fingerprint) -> Fingerprint:
    """The part of a fingerprint that is about config files."""
    return tuple(entry for entry in state if _is_config(entry[0]))


def of_version(state: Fingerprint, version: int) -> Fingerprint:
    """The part of a fingerprint that is about one version."""
    return tuple(entry for entry in state if entry[0].startswith(f"{version}/"))


def of_all_versions(state: Fingerprint) -> Fingerprint:
    """The part of a fingerprint that is about what all versions share, but for config files."""
    return tuple(
        entry
        for entry in state
        if not (_is_config(entry[0]) or ("/" in entry[0] and _is_number(entry[0].partition("/")[0])))
    )


def _is_config(path: str) -> bool:
    return path == CONFIG_FILE or path.startswith(f"{_CONFIGS}/")


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < _MOST_DIGITS and int(name) <= _MAX_VERSION


def _files(directory: str, prefix: str, above: set[tuple[int, int]]) -> Iterator[tuple[str, int, int, int]]:
    try:
        status = os.stat(directory)
        identity = (status.st_dev, status.st_ino)
        if identity in above:  # a link to a directory that contains it
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
                yield path, status.st_size, status.st_mtime_ns, status.st_ino
                continue
        except OSError:
            yield path, -1, -1, -1
            continue
        # Python writes its caches next to the model it imports; they are no change to it.
        if entry.name != "__pycache__":
            yield f"{path}/", 0, 0, 0  # an empty version directory counts too
            yield from _files(entry.path, f"{path}/", above | {identity})


def select_versions(config: ModelConfig, available: Collection[int]) -> list[int]:
    """The versions to load, ascending.

    Args:
        config: A normalised config.
        available: Versions that have a directory.

    Raises:
        InvalidArgumentError: There are none.
    """
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


def stays_within(directory: Path, relative: str) -> bool:
    """Whether a path is relative and stays in a directory by its text.

    Links are followed wherever they lead, as repositories use them to share files; they are the
    operator's. The text of a config may be a client's. Nothing is looked up, so that what is refused tells
    neither where the directory is nor what is outside of it.

    Args:
        directory: The directory.
        relative: The path, as `Path` and `os.path.join` append it to the directory.
    """
    if os.path.isabs(relative):
        return False
    root = os.path.abspath(directory)
    path = os.path.abspath(os.path.join(root, relative))
    return os.path.commonpath([root, path]) == root


_MOST_SHOWN = 3

# Vim asks with 4913 whether it may write to a directory; emacs locks files with links named .#*.
_EDITORS = re.compile(r"(?:^|/)(?:\.[^/]*\.sw[a-z]|4913|[^/]*~|\.?#[^/]*#?|[^/]*\.(?:tmp|bak|orig))$")


def differing(before: Fingerprint, after: Fingerprint) -> tuple[str, ...]:
    """The paths of files that are not the same in both states, sorted."""
    return tuple(sorted({path for path, *_ in set(before) ^ set(after)}))


def some(paths: Sequence[str]) -> str:
    """Paths for a log line, not too many of them."""
    more = len(paths) - _MOST_SHOWN
    shown = ", ".join(paths[:_MOST_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def without_editors(state: Fingerprint) -> Fingerprint:
    """A state without what editors keep beside the files that they have open."""
    return tuple(entry for entry in state if not _EDITORS.search(entry[0]))
