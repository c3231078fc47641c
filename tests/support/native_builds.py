"""Libraries and programs in C, compiled for a test."""

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
_FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]


def compiler() -> list[str]:
    """The C compiler's command; skips the test if there is none."""
    command = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(command[0]) is None:
        pytest.skip("needs a C compiler")
    return command


def run_compiler(*arguments: str) -> None:
    """Compiles with the headers of conch-native."""
    command = [*compiler(), *_FLAGS, f"-I{PACKAGE / 'include'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def build_backend(source: Path, folder: Path, *flags: str, name: str = "") -> Path:
    """Compiles a backend, as ``libtriton_NAME.so`` in a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"libtriton_{name or source.stem}.so"
    run_compiler("-fPIC", "-shared", *flags, "-o", str(library), str(source))
    return library


def supports(folder: Path, *flags: str) -> bool:
    """Whether the compiler can make a program with these flags."""
    source = folder / "supports.c"
    source.write_text("int main(void) { return 0; }\n")
    command = [*compiler(), *flags, "-o", str(folder / "supports"), str(source)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
