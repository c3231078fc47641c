"""Finds what the dynamic loader would load with a library, and what would be missing; see ld.so(8).

The loader of a worker has loaded the interpreter with its libraries, and conch's ``libtritonserver.so``,
before it opens a backend. What these define is visible to all others.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conch_engines.native.api_names import SINCE
from conch_engines.native.elf import ElfClassError, ElfError, ElfFile, Symbol, read_elf
from conch_engines.native.ld_cache import read_ld_cache

HOST = "libtritonserver.so"
"""Name of the library that conch provides."""

_TOKEN = re.compile(r"\$(?:\{(ORIGIN|LIB|PLATFORM)\}|(ORIGIN|LIB|PLATFORM)\b)")
_TRIPLE = f"{platform.machine()}-linux-gnu"
_DEFAULTS = (f"/lib/{_TRIPLE}", f"/usr/lib/{_TRIPLE}", "/lib64", "/usr/lib64", "/lib", "/usr/lib")


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """Inputs of the dynamic loader's search.

    Attributes:
        program: The program that opens the library.
        library_path: Directories of ``LD_LIBRARY_PATH``.
        cached: Paths of libraries by their names, from ``ld.so.cache``.
        default_directories: Directories that the loader searches last.
    """

    program: Path
    library_path: tuple[str, ...]
    cached: Mapping[str, Sequence[str]]
    default_directories: tuple[str, ...]


def worker_settings(directories: Iterable[Path]) -> LoaderSettings:
    """Settings of a worker on this machine.

    Args:
        directories: The directories in ``LD_LIBRARY_PATH`` before those of the server.
    """
    inherited = re.split("[:;]", os.environ.get("LD_LIBRARY_PATH", ""))
    return LoaderSettings(
        Path(os.path.realpath(sys.executable)),
        tuple(dict.fromkeys([*map(os.path.abspath, directories), *filter(None, inherited)])),
        read_ld_cache(),
        tuple(path for path in _DEFAULTS if os.path.isdir(path)),
    )


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A file that would be loaded; `loader` is the one that needs it first."""

    path: str
    elf: ElfFile
    loader: LoadedFile | None = None


@dataclass(frozen=True, slots=True)
class MissingLibrary:
    """A library that is not found, or that is damaged.

    Attributes:
        needed_by: Path of the first file that needs it.
        searched: Directories that the loader searches for it, in this order.
        damage: Path and damage of the file that it finds; empty if it finds none.
    """

    name: str
    needed_by: str
    searched: tuple[str, ...]
    damage: str = ""


@dataclass(frozen=True, slots=True)
class MissingVersion:
    """A version that the library, which has others, does not define."""

    version: str
    needed_by: str
    library: LoadedFile


@dataclass(frozen=True, slots=True)
class MissingSymbol:
    """A symbol that no file defines."""

    name: str
    version: str
    needed_by: str


@dataclass(frozen=True, slots=True)
class Closure:
    """Files that are loaded with a library, and missing ones.

    Attributes:
        files: The library, and those that it needs, in the order of the search.
        missing_symbols: Undefined symbols; libraries that are missing may define them.
    """

    files: tuple[LoadedFile, ...]
    missing: tuple[MissingLibrary, ...]
    missing_versions: tuple[MissingVersion, ...]
    missing_symbols: tuple[MissingSymbol, ...]


def find_closure(path: Path, elf: ElfFile, settings: LoaderSettings) -> Closure:
    """Finds what is loaded with a library for the machine of the program.

    Raises:
        ElfError: The program is no ELF file.
        OSError: The program can't be read.
    """
    program = LoadedFile(str(settings.program), read_elf(settings.program))
    search = _Search(settings, program)
    before = search.add(program)
    missing_before = len(search.missing)  # reported by its own loader
    library = LoadedFile(os.path.abspath(path), elf)
    files = search.add(library)
    scope = [each.elf for each in (*before, *files)]
    return Closure(
        tuple(files),
        tuple(search.missing[missing_before:]),
        tuple(version for each in files for version in search.missing_versions(each)),
        tuple(
            MissingSymbol(symbol.name, symbol.version, each.path)
            for each in files
            for symbol in each.elf.undefined
            if not (symbol.weak or symbol.name in SINCE or _is_defined(symbol, scope))
        ),
    )


def _is_defined(symbol: Symbol, scope: Sequence[ElfFile]) -> bool:
    """True if a file defines the symbol; a version that a whole file lacks is reported as such."""
    return any(
        symbol.version in ("", version) or not version or symbol.version not in elf.defined_versions
        for elf in scope
        for version in elf.defined.get(symbol.name, ())
    )


@dataclass(slots=True)
class _Search:
    """The files loaded so far, by the names that find them again."""

    settings: LoaderSettings
    program: LoadedFile
    missing: list[MissingLibrary] = field(default_factory=list)
    _names: dict[str, LoadedFile] = field(default_factory=dict)
    _identities: dict[tuple[int, int], LoadedFile] = field(default_factory=dict)

    def add(self, first: LoadedFile) -> list[LoadedFile]:
        """Loads a file and what it needs, breadth first; returns the files that were not loaded before."""
        added = [first]
        if first.elf.soname:
            self._names.setdefault(first.elf.soname, first)
        for each in added:
            for name in each.elf.needed:
                if name == HOST or name in self._names or any(name == gap.name for gap in self.missing):
                    continue
                found = self._find(name, each)
                if found is not None:
                    added.append(found)
        return added

    def missing_versions(self, loaded: LoadedFile) -> Iterator[MissingVersion]:
        for name, versions in loaded.elf.needed_versions.items():
            library = self._names.get(name)
            if library is None or not library.elf.defined_versions:
                continue
            for version in versions:
                if version not in library.elf.defined_versions:
                    yield MissingVersion(version, loaded.path, library)

    def _find(self, name: str, loader: LoadedFile) -> LoadedFile | None:
        """The file of a name, if it was not loaded before under another one."""
        candidates = list(self._candidates(name, loader))
        for path, _ in candidates:
            try:
                identity = _identity(path)
                known = self._identities.get(identity)
                elf = read_elf(Path(path)) if known is None else known.elf
            except (OSError, ElfClassError):
                continue
            except ElfError as error:
                self.missing.append(MissingLibrary(name, loader.path, (), f"{path}: {error}"))
                return None
            if elf.machine != self.program.elf.machine:
                continue
            found = known or LoadedFile(path, elf, loader)
            self._identities[identity] = self._names[name] = found
            if elf.soname:
                self._names.setdefault(elf.soname, found)
            return found if known is None else None
        searched = tuple(dict.fromkeys(place for _, place in candidates))
        self.missing.append(MissingLibrary(name, loader.path, searched))
        return None

    def _candidates(self, name: str, loader: LoadedFile) -> Iterator[tuple[str, str]]:
        """Paths that the loader tries, each with the place that it is from."""
        if "/" in name:
            path = _expand(name, loader)
            yield path, path
            return
        for directory, rule in self._directories(loader):
            yield os.path.join(directory, name), f"{directory} ({rule})"
        for path in self.settings.cached.get(name, ("",)):  # named also as a place that has nothing
            yield path, "ld.so.cache"
        for directory in self.settings.default_directories:
            yield os.path.join(directory, name), directory

    def _directories(self, loader: LoadedFile) -> Iterator[tuple[str, str]]:
        if loader.elf.runpath is None:
            above: LoadedFile | None = loader
            while above is not None:
                yield from _own_directories(above)
                above = above.loader
            yield from _own_directories(self.program)
        for directory in self.settings.library_path:
            yield directory, "LD_LIBRARY_PATH"
        for directory in loader.elf.runpath or ():
            yield _expand(directory, loader), "RUNPATH"


def _own_directories(loaded: LoadedFile) -> Iterator[tuple[str, str]]:
    """Directories of a file's RPATH, which has no effect beside a RUNPATH."""
    if loaded.elf.runpath is None:
        for directory in loaded.elf.rpath:
            yield _expand(directory, loaded), "RPATH"


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    if not os.path.isfile(path):
        raise OSError(f"{path} is no file")
    return status.st_dev, status.st_ino


def _expand(text: str, loaded: LoadedFile) -> str:
    """The path with the loader's tokens replaced."""
    values = {
        "ORIGIN": os.path.dirname(loaded.path),
        "LIB": f"lib/{_TRIPLE}" if os.path.isdir(f"/lib/{_TRIPLE}") else "lib64",
        "PLATFORM": platform.machine(),
    }
    return _TOKEN.sub(lambda match: values[match[1] or match[2]], text)
