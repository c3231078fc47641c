"""Reads what the dynamic loader reads of a 64-bit ELF file; see elf(5) and the gABI.

Everything is found through program headers and the dynamic section, so that files without section headers
are read too. Each table is read on its own: libraries have gigabytes, and one that is cut while it is mapped
would end the process.

Nothing that is kept grows faster than the file: its tables may name one part of the string table as often as
they like, so names are bounded in sum, by twice the size of the string table.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

X86_64, AARCH64 = 62, 183
MACHINES = {
    3: "i386",
    8: "MIPS",
    21: "ppc64",
    22: "s390x",
    40: "ARM",
    X86_64: "x86_64",
    AARCH64: "aarch64",
    243: "riscv64",
    258: "loongarch64",
}
"""Names of machines, as `uname -m` has them."""

_KINDS = {1: "an object file", 2: "a program", 3: "a shared library", 4: "a core dump"}
LIBRARY, PROGRAM = _KINDS[3], _KINDS[2]

_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551  # of program headers
_EXECUTABLE = 1

_NEEDED, _STRTAB, _SYMTAB, _STRSZ, _SONAME, _RPATH, _TEXTREL, _RUNPATH, _FLAGS = (
    1,
    5,
    6,
    10,
    14,
    15,
    22,
    29,
    30,
)
_HASH, _RELA, _RELASZ, _JMPREL, _PLTRELSZ = 4, 7, 8, 23, 2
_GNU_HASH, _VERSYM, _FLAGS_1 = 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFB
_VERDEF, _VERDEFNUM, _VERNEED, _VERNEEDNUM = 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_HAS_TEXTREL, _PIE = 0x4, 0x08000000

_SYMBOL = "IBBHQQ"
_SYMBOL_BYTES, _RELA_BYTES = 24, 24
_LOCAL, _WEAK = 0, 2  # bindings
_VERSION_WEAK = 0x2
_HIDDEN_VERSION = 0x8000
_MOST_VERSIONS = 1 << 16
_MOST_SYMBOLS = 1 << 24
_MOST_LIBRARIES = 4096
_MOST_PATHS = 1024
_LEAST_NAME_BYTES = 1 << 16


class ElfError(ValueError):
    """The file is no ELF file, or is damaged; the text says what of it, subject "it"."""


class ElfClassError(ElfError):
    """An ELF file of another class than 64-bit, which the loader skips in a search."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """An undefined symbol; `version` is empty for any, a weak one may stay undefined."""

    name: str
    version: str
    weak: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ElfFile:
    """Parts of an ELF file that the dynamic loader reads.

    Attributes:
        machine: Number of its machine, a key of `MACHINES` if known.
        kind: Kind of file, in words; `LIBRARY` for one that can be opened.
        soname: Its SONAME; empty without one.
        needed: Names of the libraries that it needs, in their order.
        rpath: Directories of its RPATH as written.
        runpath: Directories of its RUNPATH; None without one, which is not the same as an empty one.
        defined: Versions of each symbol that it defines; an empty version for one without.
        undefined: Symbols that others define for it.
        needed_versions: Versions that it needs, by the name of the library that has them.
        defined_versions: Versions that it defines.
    """

    machine: int
    kind: str
    soname: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...] | None
    defined: Mapping[str, frozenset[str]]
    undefined: tuple[Symbol, ...]
    needed_versions: Mapping[str, tuple[str, ...]]
    defined_versions: frozenset[str]
    executable_stack: bool
    text_relocations: bool


def read_elf(path: Path) -> ElfFile:
    """Reads a file.

    Raises:
        ElfError: It is no 64-bit ELF file, or is damaged.
        OSError: It can't be read.
    """
    with path.open("rb", buffering=0) as file:
        return _Reader(file.fileno()).read()


@dataclass(frozen=True, slots=True)
class _Segment:
    kind: int
    flags: int
    offset: int
    address: int
    size: int


class _Reader:
    """Reads one open file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._order = "<"
        self._segments: list[_Segment] = []
        self._dynamic: dict[int, list[int]] = {}
        self._left: int | None = None  # bytes that names may still have

    def read(self) -> ElfFile:
        machine, kind, headers, count = self._header()
        self._segments = list(self._program_headers(headers, count))
        for segment in [each for each in self._segments if each.kind == _DYNAMIC][-1:]:  # as the loader
            self._read_dynamic(segment)
        # A program that can be loaded anywhere has the type of a library.
        if kind == LIBRARY and self._number(_FLAGS_1) & _PIE:
            kind = PROGRAM
        needed_versions, versions = self._needed_versions()
        defined_versions = self._defined_versions()
        defined, undefined = self._symbols(versions | defined_versions)
        runpath = self._paths(_RUNPATH) if _RUNPATH in self._dynamic else None
        return ElfFile(
            machine=machine,
            kind=kind,
            soname=next(iter(self._strings_of(_SONAME, "SONAME")), ""),
            needed=tuple(self._strings_of(_NEEDED, "NEEDED")),
            rpath=self._paths(_RPATH),
            runpath=runpath,
            defined=defined,
            undefined=undefined,
            needed_versions=needed_versions,
            defined_versions=frozenset(defined_versions.values()),
            executable_stack=self._executable_stack(machine),
            text_relocations=_TEXTREL in self._dynamic or bool(self._number(_FLAGS) & _HAS_TEXTREL),
        )

    def _header(self) -> tuple[int, str, int, int]:
        """Machine, kind, and place and number of the program headers."""
        if self._size == 0:
            raise ElfError("it is empty")
        identity = self._bytes(0, min(16, self._size), "header")
        if identity[:4] != b"\x7fELF":
            raise ElfError("it does not begin with '\\x7fELF'")
        if len(identity) < 16:
            raise ElfError("it is cut in its header")
        if identity[4] == 1:
            raise ElfClassError("it is a 32-bit ELF file")
        if identity[4] != 2:
            raise ElfError(f"it has the unknown class {identity[4]}")
        if identity[5] not in (1, 2):
            raise ElfError(f"it has the unknown byte order {identity[5]}")
        self._order = "<" if identity[5] == 1 else ">"
        kind, machine, _, _, offset, _, _, _, size, count = self._unpack("HHIQQQIHHH", 16, "header")
        if count and size != 56:
            raise ElfError(f"its program headers have {size} bytes each, not 56")
        return machine, _KINDS.get(kind, f"an ELF file of type {kind}"), offset, count

    def _program_headers(self, offset: int, count: int) -> Iterator[_Segment]:
        table = self._bytes(offset, 56 * count, "program headers")
        for kind, flags, start, address, _, size, _, _ in self._rows("IIQQQQQQ", table):
            yield _Segment(kind, flags, start, address, size)

    def _read_dynamic(self, segment: _Segment) -> None:
        table = self._bytes(segment.offset, segment.size, "dynamic section")
        for tag, value in self._rows("qQ", table[: len(table) // 16 * 16]):
            if tag == 0:
                break
            self._dynamic.setdefault(tag, []).append(value)

    def _executable_stack(self, machine: int) -> bool:
        """True if the file asks for an executable stack; without a header, true on x86-64."""
        stacks = [segment.flags for segment in self._segments if segment.kind == _STACK]
        return bool(stacks[-1] & _EXECUTABLE) if stacks else machine == X86_64

    @cached_property
    def _strings(self) -> bytes:
        place = self._place(_STRTAB, "string table")
        return b"" if place is None else self._bytes(place, self._number(_STRSZ), "string table")

    def _string(self, offset: int, what: str) -> str:
        end = self._strings.find(b"\0", offset)
        if end < 0:
            raise ElfError(f"its {what} is outside the string table")
        if self._left is None:
            self._left = max(2 * len(self._strings), _LEAST_NAME_BYTES)
        self._left -= end - offset
        if self._left < 0:
            raise ElfError("its names are longer in sum than twice its string table")
        return os.fsdecode(self._strings[offset:end])

    def _strings_of(self, tag: int, what: str) -> Iterator[str]:
        offsets = self._dynamic.get(tag, ())
        if len(offsets) > _MOST_LIBRARIES:
            raise ElfError(f"it has {len(offsets)} entries {what}")
        for offset in offsets:
            yield self._string(offset, what)

    def _paths(self, tag: int) -> tuple[str, ...]:
        what = "RUNPATH" if tag == _RUNPATH else "RPATH"
        found = tuple(path for text in self._strings_of(tag, what) for path in text.split(":") if path)
        if len(found) > _MOST_PATHS:
            raise ElfError(f"its {what} has {len(found)} directories")
        return found

    def _needed_versions(self) -> tuple[dict[str, tuple[str, ...]], dict[int, str]]:
        """Versions by library, without weak ones, and all by their index."""
        found: dict[str, list[str]] = {}
        by_index: dict[int, str] = {}
        what = "table of needed versions"
        budget = _MOST_VERSIONS
        for place, row in self._chain(_VERNEED, _VERNEEDNUM, "HHIII", what):
            _, count, file, first, _ = row
            names = found.setdefault(self._string(file, what), [])
            entry = place + first
            for _ in range(count):
                budget -= 1
                if not budget:
                    raise ElfError(f"its {what} is too long")
                _, flags, index, name, following = self._unpack("IHHII", entry, what)
                by_index[index] = self._string(name, what)
                if not flags & _VERSION_WEAK:
                    names.append(by_index[index])
                entry += following
                if not following:
                    break
        return {library: tuple(names) for library, names in found.items()}, by_index

    def _defined_versions(self) -> dict[int, str]:
        """Versions by index; the first is the library's own name."""
        found: dict[int, str] = {}
        what = "table of defined versions"
        for place, row in self._chain(_VERDEF, _VERDEFNUM, "HHHHIII", what):
            _, _, index, count, _, first, _ = row
            if count and index & ~_HIDDEN_VERSION > 1:
                (name,) = self._unpack("I", place + first, what)
                found[index & ~_HIDDEN_VERSION] = self._string(name, what)
        return found

    def _chain(self, tag: int, number: int, layout: str, what: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Place and fields of each entry of a list whose entries end with the distance to the next."""
        place = self._place(tag, what)
        for _ in range(min(self._number(number), _MOST_VERSIONS) if place is not None else 0):
            assert place is not None
            row = self._unpack(layout, place, what)
            yield place, row
            if not row[-1]:
                break
            place += row[-1]

    def _symbols(self, versions: Mapping[int, str]) -> tuple[dict[str, frozenset[str]], tuple[Symbol, ...]]:
        what = "symbol table"
        place = self._place(_SYMTAB, what)
        count = 0 if place is None else self._symbol_count()
        if place is None or not count:
            return {}, ()
        rows = self._rows(_SYMBOL, self._bytes(place, count * _SYMBOL_BYTES, what))
        place = self._place(_VERSYM, "table of symbols' versions")
        indices = None
        if place is not None:
            indices = [row[0] for row in self._rows("H", self._bytes(place, 2 * count, "symbols' versions"))]
        alone = {"": frozenset({""}), **{each: frozenset({each}) for each in versions.values()}}
        defined: dict[str, frozenset[str]] = {}
        several: dict[str, set[str]] = {}
        undefined: list[Symbol] = []
        for number, (name, info, _, section, _, _) in enumerate(rows):
            if info >> 4 == _LOCAL or not name:
                continue
            text = self._string(name, "name of a symbol")
            index = 0 if indices is None else indices[number] & ~_HIDDEN_VERSION
            version = versions.get(index, "")
            if section == 0:
                undefined.append(Symbol(text, version, info >> 4 == _WEAK))
            else:
                before = defined.setdefault(text, alone[version])
                if version not in before:
                    several.setdefault(text, set(before)).add(version)
        return {**defined, **{text: frozenset(each) for text, each in several.items()}}, tuple(undefined)

    def _symbol_count(self) -> int:
        """Number of symbols, which only hash tables and relocations tell."""
        place = self._place(_GNU_HASH, "hash table")
        if place is not None:
            count = self._gnu_hash_count(place)
        else:
            place = self._place(_HASH, "hash table")
            count = 0 if place is None else self._unpack("II", place, "hash table")[1]
        # A GNU hash table without entries does not count the undefined symbols.
        count = count or 1 + max(self._relocated_symbols(), default=-1)
        if count > _MOST_SYMBOLS:
            raise ElfError(f"its symbol table has {count} entries")
        return count

    def _gnu_hash_count(self, place: int) -> int:
        what = "hash table"
        buckets, first, bloom, _ = self._unpack("IIII", place, what)
        place += 16 + 8 * bloom
        table = self._bytes(place, 4 * buckets, what)
        last = max((row[0] for row in self._rows("I", table)), default=0)
        if last == 0:
            return 0
        if last < first:
            raise ElfError("its hash table has a symbol before its first one")
        place += 4 * buckets
        while last < _MOST_SYMBOLS and not self._unpack("I", place + 4 * (last - first), what)[0] & 1:
            last += 1
        return last + 1

    def _relocated_symbols(self) -> Iterator[int]:
        for tag, size in ((_RELA, _RELASZ), (_JMPREL, _PLTRELSZ)):
            place = self._place(tag, "relocations")
            if place is not None:
                count = self._number(size) // _RELA_BYTES
                table = self._bytes(place, count * _RELA_BYTES, "relocations")
                for _, info, _ in self._rows("QQq", table):
                    yield info >> 32

    def _number(self, tag: int) -> int:
        """Value of an entry of the dynamic section; 0 without it."""
        return self._dynamic.get(tag, (0,))[-1]

    def _place(self, tag: int, what: str) -> int | None:
        """Place in the file of an entry's address; None without the entry."""
        if tag not in self._dynamic:
            return None
        address = self._number(tag)
        for segment in self._segments:
            if segment.kind == _LOAD and segment.address <= address < segment.address + segment.size:
                return segment.offset + address - segment.address
        raise ElfError(f"its {what} has an address outside the segments of the file")

    def _rows(self, layout: str, table: bytes) -> Iterator[tuple[Any, ...]]:
        return struct.iter_unpack(self._order + layout, table)

    def _unpack(self, layout: str, place: int, what: str) -> tuple[Any, ...]:
        layout = self._order + layout
        return struct.unpack(layout, self._bytes(place, struct.calcsize(layout), what))

    def _bytes(self, place: int, size: int, what: str) -> bytes:
        if place + size > self._size:
            raise ElfError(f"its {what} is outside the file, which has {self._size} bytes")
        data = os.pread(self._descriptor, size, place)
        while len(data) < size:  # Linux reads at most 2 GiB at a time
            more = os.pread(self._descriptor, size - len(data), place + len(data))
            if not more:
                raise ElfError(f"it is cut in its {what}")
            data += more
        return data
