"""Chooses the files of a model among those of a source, and the engine that serves them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from conch_hub.safe_text import safe
from conch_hub.source import PullError, RemoteFile, bytes_text

LLAMA, GENAI, VLLM = "llama_cpp", "openvino_genai", "vllm"
"""The engines, by their backend."""

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_GGUF_BESIDE = ("generation_config.json", "chat_template.jinja")
_GENAI_FOLDER = re.compile(r"openvino_[\w.-]{1,200}\.(xml|bin)|[\w.-]{1,200}\.(json|txt|jinja|model)")
_VLLM_FOLDER = re.compile(r"[\w.-]{1,200}\.(safetensors|json|txt|jinja|model|tiktoken)")
_NO_MODELS = ("mmproj", "imatrix")
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Choice:
    """A model.

    Attributes:
        engine: The backend that serves it.
        files: Its files, by their path in the version directory.
        notes: Sentences for the user.
    """

    engine: str
    files: Mapping[str, RemoteFile]
    notes: Sequence[str] = field(default=())

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.size for each in self.files.values())

    @property
    def needs_config(self) -> bool:
        """True if the server can't tell the engine by the files' names."""
        return next(iter(self.files)) != "model.gguf"

    @property
    def backends(self) -> Sequence[str]:
        """Backends that serve the files, the engine first; one is empty if no config needs to name it."""
        return (self.engine,) if self.needs_config else (self.engine, GENAI, "")


def choose_files(files: Sequence[RemoteFile], pattern: str = "") -> Choice:
    """The files of a model.

    Args:
        files: All files of a source.
        pattern: A path, or a pattern of paths or of file names as in a shell; empty for all.

    Raises:
        PullError: There is no model, or there are several.
    """
    given = list(files)
    if pattern:
        matching = {_whole(each.path) for each in files if _matches(each.path, pattern)}
        given = [each for each in files if _whole(each.path) in matching]
        if not given:
            raise PullError(f"--file: no file is '{pattern}'; there {_are(files)}")
    found = _gguf(given, files)
    if found is not None:
        return found
    names = {each.path: each for each in given}
    if "openvino_model.xml" in names:
        return Choice(GENAI, _folder(names, _GENAI_FOLDER))
    if "config.json" in names and any(name.endswith(".safetensors") and "/" not in name for name in names):
        weights = {f"weights/{name}": each for name, each in _folder(names, _VLLM_FOLDER).items()}
        return Choice(VLLM, weights, ["vLLM needs an environment of its own: see docs/backends/vllm.md"])
    raise PullError(
        f"there is no GGUF file, no folder of OpenVINO GenAI (openvino_model.xml) and none of safetensors "
        f"with a config.json; there {_are(given)}"
    )


def _gguf(given: Sequence[RemoteFile], files: Sequence[RemoteFile]) -> Choice | None:
    """The only model in GGUF files; None without a GGUF file."""
    models: dict[str, list[RemoteFile]] = {}
    left_out = []
    for each in given:
        if not each.path.endswith(".gguf"):
            continue
        if len(given) > 1 and PurePosixPath(each.path).name.lower().startswith(_NO_MODELS):
            left_out.append(each.path)
            continue
        models.setdefault(_PART.sub("", each.path), []).append(each)
    if not models:
        return None
    if len(models) > 1:
        firsts = [parts[0].path for parts in models.values()]
        sizes = [sum(part.size for part in parts) for parts in models.values()]
        rows = [f"{_text(path)} ({bytes_text(size)})" for path, size in zip(firsts, sizes, strict=True)]
        more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        raise PullError(f"there are several models: choose one with --file: {', '.join(rows[:_SHOWN])}{more}")
    (parts,) = models.values()
    notes = [f"left out: {_text(path)}, which is no language model" for path in left_out]
    parts.sort(key=lambda each: each.path)
    found: dict[str, RemoteFile] = {}
    part = _PART.search(parts[0].path)
    if part is None:
        found["model.gguf"] = parts[0]
    else:
        count = int(part[2])
        names = [f"model-{number:05}-of-{count:05}.gguf" for number in range(1, len(parts) + 1)]
        wanted = [f"-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
        if [each.path[-len(part[0]) :] for each in parts] != wanted:
            raise PullError(f"'{_text(parts[0].path)}' has {count} parts, and not all are there")
        found.update(zip(names, parts, strict=True))
    folder = PurePosixPath(parts[0].path).parent
    for each in files:
        path = PurePosixPath(each.path)
        if path.parent == folder and path.name in _GGUF_BESIDE:
            found[path.name] = each
    return Choice(LLAMA, found, notes)


def _folder(names: Mapping[str, RemoteFile], wanted: re.Pattern[str]) -> dict[str, RemoteFile]:
    """The files of a folder that an engine reads: data, and never code."""
    return {name: each for name, each in names.items() if wanted.fullmatch(name)}


def _matches(path: str, pattern: str) -> bool:
    return path == pattern or fnmatchcase(path, pattern) or fnmatchcase(PurePosixPath(path).name, pattern)


def _whole(path: str) -> str:
    """A path, the same for all parts of a file."""
    return _PART.sub(r"-of-\2.gguf", path)


def _are(files: Sequence[RemoteFile]) -> str:
    names = ", ".join(_text(each.path) for each in files[:_SHOWN])
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return f"are {names}{more}" if files else "are none"


def _text(path: str) -> str:
    """A path of a source, safe for terminals."""
    return safe(path)[:200]
