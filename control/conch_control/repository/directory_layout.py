"""Recognises what a directory holds that a platform has put there: a repository, one model, or model files.

Platforms copy what a user names: KServe's ``storageUri`` may be a repository of models, the directory of one
model, or a bare model file. Reads names only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from conch.core.errors import InvalidArgumentError
from conch_control.config.platforms import FORMATS, OWN_FORMATS
from conch_control.repository.layout import CONFIG_FILE, is_internal, list_directory, split_versions

_ADVICE = (
    "make it a repository, with a file such as <model>/1/model.onnx or <model>/1/model.py in it, or the "
    "directory of one model, with 1/model.onnx"
)
_MOST_SHOWN = 5
_SAVED_MODEL = "saved_model.pb"
_SAVED_MODEL_FOLDER = "model.savedmodel"
_TRITONS = frozenset(entry.model_file for entry in FORMATS)
_EXACT = _TRITONS.union(entry.model_file for entry in OWN_FORMATS)
_TELLING_NOTHING = frozenset((".py", ".json", ".txt", ".model"))
_SUFFIXES = {
    suffix: name
    for name in sorted(_EXACT, key=lambda name: (name.startswith("model."), name))
    if (suffix := Path(name).suffix) not in _TELLING_NOTHING
}
"""Usual name of a model file by its suffix."""


class LayoutKind(Enum):
    """Kind of a directory's content."""

    REPOSITORY = "a repository of models"
    MODEL = "the directory of one model"
    FILES = "the files of one model version"


@dataclass(frozen=True, slots=True)
class DirectoryLayout:
    """Models or files at a path.

    Attributes:
        directory: The directory; of a file, the one it is in.
        files: With `FILES`, source path by name in the version directory.
        shared: With `FILES`, source path by name in the model directory, such as the config.
    """

    kind: LayoutKind
    directory: Path
    files: tuple[tuple[str, Path], ...] = ()
    shared: tuple[tuple[str, Path], ...] = ()


def find_layout(path: Path) -> DirectoryLayout:
    """Looks at a file or directory.

    Raises:
        InvalidArgumentError: It is empty, or which file is the model can't be told; the text says what to do.
        OSError: It can't be read.
    """
    if path.is_file():
        usual = usual_name(path.name)
        if not usual:
            raise InvalidArgumentError(f"'{path}' is no model file of a known name: {_ADVICE}")
        return DirectoryLayout(LayoutKind.FILES, path.parent, ((usual, path),))
    entries = {name: found for name, found in list_directory(path).items() if not is_internal(name)}
    versions, others = split_versions(name for name, directory in entries.items() if directory)
    if versions:
        return DirectoryLayout(LayoutKind.MODEL, path)
    if any(_looks_like_model(path / name) for name in others):
        return DirectoryLayout(LayoutKind.REPOSITORY, path)
    if CONFIG_FILE not in entries and not any(map(usual_name, entries)) and _SAVED_MODEL not in entries:
        if others:
            return DirectoryLayout(LayoutKind.REPOSITORY, path)  # the loads say what their models lack
        what = f"has no model file of a known name, only {_names(entries)}" if entries else "is empty"
        raise InvalidArgumentError(f"'{path}' {what}: {_ADVICE}")
    return DirectoryLayout(
        LayoutKind.FILES,
        path,
        tuple(_version_files(path, entries)),
        tuple((name, path / name) for name, directory in sorted(entries.items()) if not directory),
    )


def usual_name(name: str) -> str:
    """The name that Triton expects of a model file or folder of this name; empty if it is none."""
    if name in _EXACT:
        return name
    return _SUFFIXES.get(Path(name).suffix.lower(), "")


def _version_files(path: Path, entries: dict[str, bool]) -> Iterator[tuple[str, Path]]:
    """All entries for a version directory, and the model file under its usual name."""
    if _SAVED_MODEL in entries:
        yield _SAVED_MODEL_FOLDER, path
        return
    for name in sorted(entries):
        if name != CONFIG_FILE:
            yield name, path / name
    usual = {name: usual_name(name) for name in sorted(entries) if usual_name(name)}
    # Names of tree models, such as model.json, are also those of files beside other models.
    models = [name for name in usual if usual[name] in _TRITONS] or list(usual)
    if any(usual[name] == name for name in models):
        return
    if len(models) == 1:
        yield usual[models[0]], path / models[0]
    elif models and CONFIG_FILE not in entries:  # a config can name the file
        raise InvalidArgumentError(
            f"'{path}' has several files that could be the model, {_names(models)}: name one of them, as in "
            f"'{path / models[0]}', or {_ADVICE}"
        )


def _names(names: object) -> str:
    shown = sorted(names)  # type: ignore[call-overload]
    more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return ", ".join(f"'{name}'" for name in shown[:_MOST_SHOWN]) + more


def _looks_like_model(directory: Path) -> bool:
    try:
        entries = list_directory(directory)
    except OSError:
        return False
    versions, _ = split_versions(name for name, is_directory in entries.items() if is_directory)
    return CONFIG_FILE in entries or bool(versions)
