"""The inside of a model's directory: its config file, its version directories, its fingerprint."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

log = logging.getLogger(__name__)

CONFIG_FILE = "config.pbtxt"
_CONFIGS = "configs"
_OTHER_DIRECTORIES = frozenset({"warmup", "initial_state", _CONFIGS})
_MAX_VERSION = 2**63 - 1

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
        versions, ignored = split_versions(entry.name for entry in entries if entry.is_dir())
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
        if not (name.isascii() and name.isdigit()) or int(name) > _MAX_VERSION:
            ignored[name] = "fails to convert to integral number"
        elif name.startswith("0"):
            ignored[name] = "contains leading zeros in its directory name"
        else:
            versions.append(int(name))
    return sorted(versions), ignored


def fingerprint(directory: Path) -> Fingerprint:
    """What tells one state of a model's files from another; links are followed.

    A file that is replaced while this runs shows up as a change, now or at the next look.
    """
    return tuple(sorted(_files(os.fspath(directory), "", set())))


def without_configs(state: Fingerprint) -> Fingerprint:
    """The part of a fingerprint that is not about config files: what the config is, its reader knows."""
    return tuple(
        entry for entry in state if entry[0] != CONFIG_FILE and not entry[0].startswith(f"{_CONFIGS}/")
    )


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
