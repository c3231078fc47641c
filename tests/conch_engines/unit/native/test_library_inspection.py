# ruff: noqa: E501  a case per line
"""Libraries that are read and not run: errors are those of the system's own loader."""

from __future__ import annotations

import platform
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.libraries import EXECUTE, Libraries, make_libraries
from tests.support.profiles import scaled

from conch_engines.native.elf import AARCH64, MACHINES, X86_64, ElfError, read_elf
from conch_engines.native.inspection import Inspection, inspect_library
from conch_engines.native.loader_search import worker_settings


def inspected(path: Path) -> Inspection:
    return inspect_library(path, worker_settings([path.parent]))


def of_severity(path: Path, severity: str) -> list[str]:
    return [each.message for each in inspected(path).findings if each.severity == severity]


Build = Callable[[Libraries], Path]


@dataclass(frozen=True)
class Case:
    """Build of a backend, and a part of each error; none for one that loads."""

    build: Build
    errors: tuple[str, ...] = ()


def plain(libraries: Libraries) -> Path:
    return libraries.backend(
        "b.so", "int TRITONSERVER_LogMessage(void); int f(void) { return TRITONSERVER_LogMessage(); }"
    )


def without_the_host(libraries: Libraries) -> Path:
    return libraries.build(
        "b.so",
        EXECUTE + "int TRITONSERVER_LogMessage(void); int f(void) { return TRITONSERVER_LogMessage(); }",
    )


def missing_library(libraries: Libraries) -> Path:
    gone = libraries.build("elsewhere/libgone.so.7", "int gone(void) { return 0; }")
    return libraries.backend("b.so", "int gone(void); int f(void) { return gone(); }", str(gone))


def library_that_two_miss(libraries: Libraries) -> Path:
    gone = libraries.build("elsewhere/libgone.so", "int gone(void) { return 0; }")
    user = libraries.build("libuser.so", "int gone(void); int user(void) { return gone(); }", str(gone))
    source = "int gone(void), user(void); int f(void) { return gone() + user(); }"
    return libraries.backend("b.so", source, str(gone), str(user))


def library_beside_it(libraries: Libraries) -> Path:
    beside = libraries.build("libbeside.so", "int beside(void) { return 0; }")
    return libraries.backend("b.so", "int beside(void); int f(void) { return beside(); }", str(beside))


def _nested(libraries: Libraries, tag: str) -> Path:
    """A backend that needs lib/libouter.so, which needs lib/libinner.so; only the backend has a path."""
    inner = libraries.build("lib/libinner.so", "int inner(void) { return 0; }")
    outer = libraries.build(
        "lib/libouter.so", "int inner(void); int outer(void) { return inner(); }", str(inner)
    )
    path = ["-Wl,-rpath,$ORIGIN/lib", f"-Wl,--{tag}-new-dtags", f"-Wl,-rpath-link,{inner.parent}"]
    return libraries.backend("b.so", "int outer(void); int f(void) { return outer(); }", str(outer), *path)


def rpath_that_others_inherit(libraries: Libraries) -> Path:
    return _nested(libraries, "disable")


def runpath_that_none_inherits(libraries: Libraries) -> Path:
    return _nested(libraries, "enable")


def undefined_symbol(libraries: Libraries) -> Path:
    return libraries.backend("b.so", "int nothing_has_this(void); int f(void) { return nothing_has_this(); }")


def undefined_symbol_of_a_dependency(libraries: Libraries) -> Path:
    half = libraries.build("libhalf.so", "int other_half(void); int half(void) { return other_half(); }")
    return libraries.backend(
        "b.so",
        "int half(void); int f(void) { return half(); }",
        str(half),
        "-Wl,--unresolved-symbols=ignore-all",
    )


def weak_symbol(libraries: Libraries) -> Path:
    return libraries.backend(
        "b.so", "__attribute__((weak)) int perhaps(void); int f(void) { return perhaps ? perhaps() : 0; }"
    )


def symbol_of_the_interpreter(libraries: Libraries) -> Path:
    return libraries.backend(
        "b.so", "const char *Py_GetVersion(void); const char *f(void) { return Py_GetVersion(); }"
    )


def function_of_a_newer_api(libraries: Libraries) -> Path:
    return libraries.backend(
        "b.so",
        "int TRITONBACKEND_ModelOfTomorrow(void); int f(void) { return TRITONBACKEND_ModelOfTomorrow(); }",
    )


def newer_version_of_a_library(libraries: Libraries) -> Path:
    """Built against a library with THING_1.10, which then is replaced by one with THING_1.9."""
    versions = libraries.directory / "versions"
    libraries.directory.joinpath("b").mkdir(parents=True)

    def thing(*numbers: str) -> Path:
        versions.write_text(
            "".join(f"THING_{number} {{ thing; }};\n" for number in numbers[-1:])
            + "".join(f"THING_{number} {{ }};\n" for number in numbers[:-1])
        )
        return libraries.build(
            "libthing.so", "int thing(void) { return 0; }", f"-Wl,--version-script={versions}"
        )

    new = thing("1.2", "1.10")
    path = libraries.backend("b.so", "int thing(void); int f(void) { return thing(); }", str(new))
    thing("1.2", "1.9")
    return path


def object_file(libraries: Libraries) -> Path:
    return libraries.compile("b.so", EXECUTE, "-c", "-fPIC")


def program(libraries: Libraries) -> Path:
    return libraries.compile("b.so", "int main(void) { return 0; }", "-pie", "-fPIE")


def cut_dependency(libraries: Libraries) -> Path:
    path = library_beside_it(libraries)
    beside = path.with_name("libbeside.so")
    beside.write_bytes(beside.read_bytes()[:40])
    return path


def text_file(libraries: Libraries) -> Path:
    libraries.directory.mkdir(exist_ok=True)
    path = libraries.directory / "b.so"
    path.write_text("INPUT ( libb.so.1 )")
    return path


CASES = (
    Case(plain),
    Case(without_the_host),
    Case(missing_library, ("libgone.so.7 is missing, which it needs; searched: {folder} (LD_LIBRARY_PATH), ",)),
    Case(library_that_two_miss, ("libgone.so is missing, which it, {folder}/libuser.so need; searched: ",)),
    Case(library_beside_it),
    Case(rpath_that_others_inherit),
    Case(runpath_that_none_inherits, ("libinner.so is missing, which {folder}/lib/libouter.so needs",)),
    Case(undefined_symbol, ("undefined symbol of {path}: nothing_has_this; not in libtritonserver.so",)),
    Case(undefined_symbol_of_a_dependency, ("undefined symbol of {folder}/libhalf.so: other_half; not in ",)),
    Case(weak_symbol),
    Case(symbol_of_the_interpreter),
    Case(function_of_a_newer_api, ("needs TRITONBACKEND_ModelOfTomorrow, which conch's API does not have (TRITONBACKEND 1.19,",)),
    Case(newer_version_of_a_library, ("{path} is built for THING_1.10, this machine has 1.9 ({folder}/libthing.so)",)),
    Case(object_file, ("it is an object file, not a shared library",)),
    Case(program, ("it is a program, not a shared library",)),
    Case(cut_dependency, ("libbeside.so, which it needs, can't be loaded: {folder}/libbeside.so: its ",)),
    Case(text_file, ("not a library: it does not begin with '\\x7fELF'",)),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.build.__name__)
def test_it_finds_errors_exactly_where_the_loader_has_one(libraries: Libraries, case: Case) -> None:
    path = case.build(libraries)
    found = inspected(path).errors
    wanted = [text.replace("{path}", str(path)).replace("{folder}", str(path.parent)) for text in case.errors]
    assert len(found) == len(wanted), found
    assert all(text in each for text, each in zip(wanted, found, strict=True)), found
    assert bool(found) == bool(libraries.load_error(path, path.parent))


def test_a_library_that_is_no_backend(libraries: Libraries) -> None:
    path = libraries.build("b.so", "int TRITONREPOAGENT_ModelAction, TRITONBACKEND_ModelBatchFinalize;")
    found = inspected(path)
    assert found.errors == (
        f"unable to find required entrypoint 'TRITONBACKEND_ModelInstanceExecute' in shared library: {path}; it is "
        f"a repository agent, not a backend",
    )
    (warning,) = of_severity(path, "warning")
    assert "only some of the 5 functions of a batching strategy" in warning
    assert found.exports == ("TRITONBACKEND_ModelBatchFinalize", "TRITONREPOAGENT_ModelAction")


def test_a_library_for_another_machine(libraries: Libraries) -> None:
    path = libraries.backend("b.so")
    content = bytearray(path.read_bytes())
    (here,) = struct.unpack_from("<H", content, 18)
    other = AARCH64 if here == X86_64 else X86_64
    struct.pack_into("<H", content, 18, other)
    path.write_bytes(content)
    assert inspected(path).errors == (
        f"it is built for {MACHINES[other]}, this machine is {platform.machine()}",
    )


def test_what_may_harm_is_a_warning(libraries: Libraries) -> None:
    python = libraries.build("libpython3.99.so.1.0", "int python(void) { return 0; }")
    code = '__asm__(".text\\n.quad puts\\n");' if platform.machine() == "x86_64" else ""
    path = libraries.backend("b.so", code, str(python), "-Wl,-z,execstack", "-Wl,-z,notext", "-Wl,-w")
    found = of_severity(path, "warning")
    parts = ["links libpython3.99.so.1.0", "an executable stack", *(["text relocations"] if code else [])]
    assert len(found) == len(parts)
    assert all(part in text for part, text in zip(parts, found, strict=True)), found
    assert not inspected(path).errors


def test_names_of_cpp_are_readable(libraries: Libraries) -> None:
    source = 'int g(int) __asm__("_ZN2ns3fooEi"); int f(void) { return g(1); }'
    (error,) = inspected(libraries.backend("b.so", source)).errors
    assert ("ns::foo(int)" if shutil.which("c++filt") else "_ZN2ns3fooEi") in error


def test_the_least_api_that_it_needs(libraries: Libraries) -> None:
    source = "int TRITONBACKEND_StateNew(void), TRITONBACKEND_ModelName(void); int f(void) { return TRITONBACKEND_StateNew() + TRITONBACKEND_ModelName(); }"
    found = inspected(libraries.backend("b.so", source))
    assert found.least_minors == {"TRITONBACKEND": (6, "TRITONBACKEND_StateNew")}
    assert found.errors == ()


def test_files_without_section_headers_are_read_alike(libraries: Libraries) -> None:
    path = plain(libraries)
    whole = read_elf(path)
    assert whole.soname == "b.so"
    assert whole.needed[0] == "libtritonserver.so"
    content = bytearray(path.read_bytes())
    struct.pack_into("<Q", content, 40, 0)  # e_shoff
    struct.pack_into("<HHH", content, 58, 0, 0, 0)  # e_shentsize, e_shnum, e_shstrndx
    path.write_bytes(content)
    assert read_elf(path) == whole


def test_undefined_symbols_of_a_library_that_defines_none(libraries: Libraries) -> None:
    source = 'int puts(const char *); __attribute__((constructor, visibility("hidden"))) void f(void) { puts(""); }'
    path = libraries.build("b.so", source, "-Wl,--hash-style=gnu")
    found = read_elf(path)
    assert found.defined == {}
    assert "puts" in {symbol.name for symbol in found.undefined}


def made_of(names: list[int], strings: bytes, needed: int = 0, dynamics: int = 1) -> bytes:
    """A library with symbols at these places of its string table."""
    heads = 64 + 56 * (1 + dynamics)
    tags = 16 * (needed + 6)
    symbols = heads + tags + 8
    table = symbols + 24 * len(names)
    whole = table + len(strings)
    entries = [(1, 0)] * needed + [(4, heads + tags), (5, table), (6, symbols), (10, len(strings)), (11, 24)]
    return b"".join(
        (
            b"\x7fELF\x02\x01\x01".ljust(16, b"\0"),
            struct.pack("<HHIQQQIHHHHHH", 3, X86_64, 1, 0, 64, 0, 0, 64, 56, 1 + dynamics, 0, 0, 0),
            struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, whole, whole, 4096),
            struct.pack("<IIQQQQQQ", 2, 4, heads, heads, heads, tags, tags, 8) * dynamics,
            b"".join(struct.pack("<qQ", *each) for each in (*entries, (0, 0))),
            struct.pack("<II", 1, len(names)),
            b"".join(struct.pack("<IBBHQQ", name, 1 << 4, 0, 1, 0, 0) for name in names),
            strings,
        )
    )


def test_what_is_kept_of_a_file_does_not_grow_faster_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "made.so"
    strings = b"\0" + b"x" * 100_000 + b"\0"
    # Names may share their ends, as linkers have them do.
    path.write_bytes(made_of([1, 50_000, 99_000], strings, needed=1, dynamics=500))
    found = read_elf(path)
    assert [len(name) for name in found.defined] == [100_000, 50_001, 1001] and found.needed == ("",)
    path.write_bytes(made_of([*range(1, 100)], strings))
    with pytest.raises(ElfError, match="its names are longer in sum than twice its string table"):
        read_elf(path)
    path.write_bytes(made_of([], strings, needed=5000))
    with pytest.raises(ElfError, match="it has 5000 entries NEEDED"):
        read_elf(path)


@pytest.mark.process
def test_damaged_files_have_errors_of_the_reader_only(tmp_path: Path) -> None:
    path = newer_version_of_a_library(make_libraries(tmp_path / "built"))
    whole = path.read_bytes()
    damaged = tmp_path / "damaged.so"
    # Most of the file is code, or empty: the tables are in the first pages and around the dynamic section.
    (dynamic,) = (
        offset
        for kind, _, offset in (
            struct.unpack_from("<IIQ", whole, 64 + 56 * number) for number in range(whole[56])
        )
        if kind == 2
    )
    places = st.integers(0, 0x700) | st.integers(dynamic, dynamic + 0x200)
    changes = st.lists(st.tuples(places, st.integers(0, 255)), max_size=8)

    @given(changes, st.none() | st.integers(0, len(whole)))
    @settings(max_examples=scaled(2000))
    def check(changes: list[tuple[int, int]], end: int | None) -> None:
        content = bytearray(whole)
        for place, byte in changes:
            content[place] = byte
        damaged.write_bytes(content[:end])
        with suppress(ElfError):
            read_elf(damaged)

    check()
