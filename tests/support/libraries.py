"""Shared libraries built with the C compiler, and what the system's own loader says of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXECUTE = "void *TRITONBACKEND_ModelInstanceExecute(void) { return 0; }\n"
"""The one function that a backend must have."""

_LOAD = """import ctypes, os, sys
ctypes.CDLL(sys.argv[1], os.RTLD_NOW | os.RTLD_GLOBAL)
try:
    ctypes.CDLL(sys.argv[2], os.RTLD_NOW)
except OSError as error:
    print(error)
"""


class Libraries:
    """Builds libraries in a directory.

    Attributes:
        directory: Directory in which they are built.
        host: A ``libtritonserver.so`` with one function, outside the directory.
    """

    def __init__(self, compiler: str, directory: Path) -> None:
        self._compiler = compiler
        self.directory = directory
        self.host = self.build(
            "../host/libtritonserver.so", "int TRITONSERVER_LogMessage(void) { return 0; }"
        )

    def build(self, name: str, source: str, *options: str) -> Path:
        """Builds a library whose SONAME is its file name; options may give it others."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        soname = f"-Wl,-soname,{path.name}"
        arguments = ["-shared", "-fPIC", soname, "-x", "c", "-", "-x", "none", *options, "-o", str(path)]
        self._compile(source, arguments)
        return path

    def backend(self, name: str, source: str = "", *options: str) -> Path:
        """Builds a backend that needs the host's library, as those of Triton do."""
        return self.build(name, EXECUTE + source, "-Wl,--no-as-needed", str(self.host), *options)

    def compile(self, name: str, source: str, *options: str) -> Path:
        """Compiles something that is no library."""
        path = self.directory / name
        self._compile(source, ["-x", "c", "-", "-x", "none", *options, "-o", str(path)])
        return path

    def load_error(self, path: Path, *library_path: Path) -> str:
        """The loader's error in a process that has loaded the host's library; empty if it loads."""
        environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, library_path))}
        command = [sys.executable, "-c", _LOAD, str(self.host), str(path)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    def _compile(self, source: str, arguments: list[str]) -> None:
        subprocess.run([self._compiler, *arguments], input=source, text=True, check=True, timeout=60)


@pytest.fixture
def libraries(tmp_path: Path) -> Libraries:
    return make_libraries(tmp_path / "built")


def make_libraries(directory: Path) -> Libraries:
    """Skips the test without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build libraries with")
    return Libraries(compiler, directory)
