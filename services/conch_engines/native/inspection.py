"""Inspection of a backend's library: its exports, its needs, and obstacles to its load; runs no code."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conch.core.file_checks import FileFinding, Severity
from conch_engines.native.api_names import VERSIONS, api_of, least_minors
from conch_engines.native.elf import LIBRARY, MACHINES, ElfError, ElfFile, read_elf
from conch_engines.native.loader_search import (
    Closure,
    LoaderSettings,
    MissingSymbol,
    MissingVersion,
    find_closure,
)

EXECUTE = "TRITONBACKEND_ModelInstanceExecute"
_BATCHER = tuple(
    f"TRITONBACKEND_Model{name}"
    for name in (
        "BatcherInitialize",
        "BatcherFinalize",
        "BatchInitialize",
        "BatchIncludeRequest",
        "BatchFinalize",
    )
)
_OTHER_PLUGINS = {
    "TRITONREPOAGENT_ModelAction": "a repository agent",
    "TRITONCACHE_CacheLookup": "a cache",
}
_PYTHON = re.compile(r"libpython\d.*\.so")
_VERSION = re.compile(r"(?:(.*)_)?(\d+(?:\.\d+)*)")

_MOST_NAMES = 8
_DEMANGLE_S = 10


@dataclass(frozen=True, slots=True)
class Inspection:
    """Result of reading a library.

    Attributes:
        findings: Errors prevent its load on this machine.
        exports: The functions of Triton's API that it defines.
        least_minors: Least minor of each API that it needs, and a function that came with it.
        needed_versions: Versions that it needs by library, such as those of ``libc.so.6``.
    """

    findings: tuple[FileFinding, ...]
    exports: tuple[str, ...] = ()
    least_minors: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    needed_versions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[str, ...]:
        """The texts of the errors."""
        return tuple(each.message for each in self.findings if each.severity == "error")


def inspect_library(path: Path, settings: LoaderSettings) -> Inspection:
    """Reads a library and what would be loaded with it."""
    try:
        elf = read_elf(path)
    except ElfError as error:
        return Inspection((FileFinding("error", f"not a library: {error}", path),))
    except OSError as error:
        return Inspection((FileFinding("error", f"it can't be read: {error.strerror}", path),))
    return Inspection(
        tuple(FileFinding(severity, message, path) for severity, message in _findings(path, elf, settings)),
        tuple(sorted(name for name in elf.defined if api_of(name))),
        least_minors(symbol.name for symbol in elf.undefined),
        elf.needed_versions,
    )


_Found = Iterator[tuple[Severity, str]]


def _findings(path: Path, elf: ElfFile, settings: LoaderSettings) -> _Found:
    if elf.kind != LIBRARY:
        yield "error", f"it is {elf.kind}, not {LIBRARY}"
        return
    yield from _exports(path, elf)
    try:
        program = read_elf(settings.program)
    except (ElfError, OSError):
        yield "error", "backends compiled for Triton run on 64-bit Linux only"
        return
    if elf.machine != program.machine:
        yield "error", f"it is built for {_machine(elf)}, this machine is {_machine(program)}"
        return
    closure = find_closure(path, elf, settings)
    yield from _unknown_functions(closure)
    yield from _missing(closure)
    yield from _hazards(closure)


def _exports(path: Path, elf: ElfFile) -> _Found:
    if EXECUTE not in elf.defined:
        what = next((text for name, text in _OTHER_PLUGINS.items() if name in elf.defined), "")
        yield (
            "error",
            f"unable to find required entrypoint '{EXECUTE}' in shared library: {path}"
            + (f"; it is {what}, not a backend" if what else ""),
        )
    lacking = [name for name in _BATCHER if name not in elf.defined]
    if lacking and len(lacking) < len(_BATCHER):
        yield (
            "warning",
            f"it has only some of the {len(_BATCHER)} functions of a batching strategy, without "
            f"{_listed(lacking)}",
        )


def _machine(elf: ElfFile) -> str:
    return MACHINES.get(elf.machine, f"machine {elf.machine}")


def _unknown_functions(closure: Closure) -> _Found:
    unknown = sorted({symbol.name for symbol in closure.missing_symbols if api_of(symbol.name)})
    if unknown:
        versions = ", ".join(f"{api} {major}.{minor}" for api, (major, minor) in VERSIONS.items())
        yield (
            "error",
            f"it needs {_listed(unknown)}, which conch's API does not have ({versions}): it is built for a "
            f"newer or a changed Triton",
        )


def _missing(closure: Closure) -> _Found:
    for each in closure.missing:
        users = _users(each.name, closure)
        if each.damage:
            yield "error", f"{each.name}, which {users}, can't be loaded: {each.damage}"
        else:
            yield "error", f"{each.name} is missing, which {users}; searched: {', '.join(each.searched)}"
    yield from _missing_versions(closure.missing_versions)
    if not closure.missing:  # they may define the symbols
        yield from _missing_symbols(closure)


def _users(name: str, closure: Closure) -> str:
    """The files that need a library, and the verb."""
    library = closure.files[0]
    users = ["it" if each is library else each.path for each in closure.files if name in each.elf.needed]
    return f"{_listed(users)} {'needs' if len(users) == 1 else 'need'}"


def _missing_versions(missing: Iterable[MissingVersion]) -> _Found:
    """One finding for each file, library and kind of version: the newest."""
    newest: dict[tuple[str, str, str], MissingVersion] = {}
    for each in missing:
        kind, number = _parse_version(each.version)
        key = (each.needed_by, each.library.path, kind if number else each.version)
        if key not in newest or number > _parse_version(newest[key].version)[1]:
            newest[key] = each
    for (needed_by, library, kind), each in newest.items():
        parsed = (_parse_version(version) for version in each.library.elf.defined_versions)
        there = max((number for other, number in parsed if other == kind and number), default=None)
        has = "which this machine does not have" if there is None else f"this machine has {_dotted(there)}"
        yield (
            "error",
            f"{needed_by} is built for {each.version}, {has} ({library}): build it on an older system",
        )


def _parse_version(version: str) -> tuple[str, tuple[int, ...]]:
    """Kind and number of a version such as ``GLIBC_2.38``; no number in others."""
    match = _VERSION.fullmatch(version)
    return (version, ()) if match is None else (match[1] or "", tuple(map(int, match[2].split("."))))


def _dotted(number: Sequence[int]) -> str:
    return ".".join(map(str, number))


def _missing_symbols(closure: Closure) -> _Found:
    by_file: dict[str, list[MissingSymbol]] = defaultdict(list)
    for symbol in closure.missing_symbols:
        if not api_of(symbol.name):
            by_file[symbol.needed_by].append(symbol)
    for path, symbols in by_file.items():
        shown = demangled([symbol.name for symbol in symbols[:_MOST_NAMES]])
        names = [
            f"{name}@{symbol.version}" if symbol.version else name
            for name, symbol in zip(shown, symbols, strict=False)
        ]
        needed = next(each.elf.needed for each in closure.files if each.path == path)
        yield (
            "error",
            f"undefined symbol{'s' if len(symbols) > 1 else ''} of {path}: {_listed(names, len(symbols))}; "
            f"not in {', '.join(needed) or 'any library: it needs none'}",
        )


def _hazards(closure: Closure) -> _Found:
    for each in closure.files:
        python = [name for name in each.elf.needed if _PYTHON.match(name)]
        if python:
            yield (
                "warning",
                f"{each.path} links {python[0]}: its interpreter may clash with that of the worker, a Python "
                f"process",
            )
        if each.elf.executable_stack:
            yield (
                "warning",
                f"{each.path} asks for an executable stack, which glibc refuses since 2.41: link it with -z "
                f"noexecstack",
            )
        if each.elf.text_relocations:
            yield (
                "warning",
                f"{each.path} has text relocations, which SELinux may refuse: compile it with -fPIC",
            )


def _listed(names: Sequence[str], count: int = 0) -> str:
    """The first names, and how many more there are."""
    more = max(count, len(names)) - len(names[:_MOST_NAMES])
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more else "")


def demangled(names: Sequence[str]) -> list[str]:
    """C++ names as c++filt prints them, or as they are without it."""
    tool = shutil.which("c++filt")
    if tool is None or not any(name.startswith("_Z") for name in names):
        return list(names)
    try:
        done = subprocess.run(
            [tool], input="\n".join(names), capture_output=True, text=True, timeout=_DEMANGLE_S, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return list(names)
    lines = done.stdout.splitlines()
    return lines if len(lines) == len(names) else list(names)
