"""Finds local files and relative paths in a list of packages.

Package files are identified by their contents. Other local paths, such as source directories, are not read:
a list with a relative one depends on its directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_CONTINUED = re.compile(r"\\\r?\n")
_COMMENT = re.compile(r"(?:^|\s)#.*")
_OPTION = re.compile(
    r"(?:-e|-f|-i|--(?:editable|find-links|index-url|extra-index-url|pypi-url))(?:[ \t]+|=)?(?P<place>\S+)"
)
_NAMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*[ \t]*(?:\[[^\]]*\])?[ \t]*@[ \t]*(?P<place>.*)")
_SUFFIX = re.compile(r"\s*;\s|\s+;|\s+--")
"""Start of a marker or option of a requirement."""
_EXTRAS = re.compile(r"\[[^\]]*\]$")
_REMOTE = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*:")
_ARCHIVES = (".whl", ".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


@dataclass(frozen=True, slots=True)
class LocalDependencies:
    """Local dependencies of a list.

    Attributes:
        files: Wheels and other package archives.
        relative: True if anything else is named by a relative path.
    """

    files: tuple[Path, ...] = ()
    relative: bool = False


def named_in_lines(texts: Iterable[str], folder: Path) -> LocalDependencies:
    """Local dependencies of requirements; paths are relative to `folder`, where the tool runs."""
    files: dict[Path, None] = {}
    relative = False
    for text in texts:
        for whole in _CONTINUED.sub("", text).splitlines():
            line = _COMMENT.sub("", whole).strip()
            if option := _OPTION.match(line):
                relative |= is_relative(option["place"])
            elif not line.startswith("-") and (place := _place_of(line)):
                if (path := folder / _local(place)).is_file():
                    files[path] = None
                else:
                    relative |= is_relative(place)
    return LocalDependencies(tuple(files), relative)


def is_relative(place: str) -> bool:
    """True if a path or URL is a relative local path."""
    # A variable may be uv's ${PROJECT_ROOT}.
    return not _REMOTE.match(place) and ("${" in place or not _local(place).startswith("/"))


def relative_in_project(tool: Any) -> bool:
    """True if the table ``tool.uv`` of a ``pyproject.toml`` has a relative path."""
    if not isinstance(tool, dict):
        return False
    places = [tool.get(key, ()) for key in ("find-links", "index-url", "extra-index-url")]
    indexes = [index.get("url") for index in _tables(tool.get("index"))]
    sources = tool.get("sources")
    tables = (
        [table for each in sources.values() for table in _tables(each)] if isinstance(sources, dict) else []
    )
    return (
        any(is_relative(text) for text in (*_strings(places), *_strings(indexes)))
        or any("workspace" in table for table in tables)
        or relative_in_lock(tables)
    )


def relative_in_lock(value: Any) -> bool:
    """True if any ``path`` in a ``pylock.toml`` is relative."""
    if isinstance(value, dict):
        path = value.get("path")
        return (isinstance(path, str) and is_relative(path)) or relative_in_lock(list(value.values()))
    return isinstance(value, list) and any(relative_in_lock(item) for item in value)


def _place_of(requirement: str) -> str:
    """Path or URL of a requirement; empty for a package of an index."""
    start = _SUFFIX.split(requirement, maxsplit=1)[0].strip()
    if named := _NAMED.fullmatch(start):
        return named["place"].partition("#")[0]
    place = _EXTRAS.sub("", start.partition("#")[0])
    if _REMOTE.match(place):
        return ""
    # pip's rule: without a slash it is the name of a package.
    return place if "/" in place or place.startswith((".", "file:")) or place.endswith(_ARCHIVES) else ""


def _local(place: str) -> str:
    """Path of a path or ``file:`` URL."""
    if not place.startswith("file:"):
        return place
    path = unquote(place.removeprefix("file:"))
    if path.startswith("//"):
        host, _, rest = path.removeprefix("//").partition("/")
        return "/" + rest.lstrip("/") if host in ("", "localhost") else f"{host}/{rest}"
    return path


def _tables(value: object) -> list[dict[str, Any]]:
    """The tables of a value: itself, or a list's."""
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]


def _strings(value: object) -> list[str]:
    """All strings of a nested list."""
    if isinstance(value, str):
        return [value]
    return [text for item in value for text in _strings(item)] if isinstance(value, list | tuple) else []
