"""Libraries and programs in C and C++, compiled for a test."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BACKENDS = ROOT / "tests/conch_native/backends"
"""Backends written for tests."""

PACKAGE = ROOT / "services/conch_native/conch_native"
_FLAGS = ["-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]


def compiler(language: str = "c") -> list[str]:
    """The command of the compiler for ``c`` or ``cpp``; skips the test if there is none."""
    variable, usual, standard = ("CC", "cc", "c11") if language == "c" else ("CXX", "c++", "c++17")
    command = shlex.split(os.environ.get(variable, usual))
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs a compiler: {command[0]}")
    return [*command, f"-std={standard}"]


def run_compiler(*arguments: str, language: str = "c") -> None:
    """Compiles with the headers of conch-native."""
    command = [*compiler(language), *_FLAGS, f"-I{PACKAGE / 'include'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def build_backend(source: Path, folder: Path, *flags: str, name: str = "") -> Path:
    """Compiles a backend, as ``libtriton_NAME.so`` in a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"libtriton_{name or source.stem}.so"
    language = source.suffix.lstrip(".")
    run_compiler("-fPIC", "-shared", *flags, "-o", str(library), str(source), language=language)
    return library


def supports(folder: Path, *flags: str) -> bool:
    """True if the compiler can make a program with these flags."""
    source = folder / "supports.c"
    source.write_text("int main(void) { return 0; }\n")
    command = [*compiler(), *flags, "-o", str(folder / "supports"), str(source)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
