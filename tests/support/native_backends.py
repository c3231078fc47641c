"""The C host and backends in C, compiled once for the tests that run them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = _ROOT / "services/conch_native/conch_native"
_SOURCES = Path(__file__).parent / "native"
_FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE",
    "-g",
    "-O1",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
)


class NativeBackends:
    """Backends in a directory, and the package conch-native as it would be installed.

    Attributes:
        directory: For ``--backend-directory``.
        path: What a server needs in ``PYTHONPATH``.
    """

    def __init__(self, folder: Path, compiler: list[str]) -> None:
        self.directory = folder / "backends"
        self.path = folder / "packages"
        self._compiler = compiler
        self._host = self.path / "conch_native/libtritonserver.so"
        shutil.copytree(_PACKAGE, self._host.parent)
        sources = sorted(map(str, (_PACKAGE / "host").glob("*.c")))
        self._compile(self._host, [*sources, "-Wl,-soname,libtritonserver.so,-z,now", "-ldl"])

    def build(self, name: str) -> Path:
        """Compiles a backend of ``tests/support/native``, unless that was done; returns its library."""
        library = self.directory / name / f"libtriton_{name}.so"
        if not library.exists():
            library.parent.mkdir(parents=True)
            self._compile(library, [str(_SOURCES / f"{name}.c"), str(self._host)])
        return library

    def _compile(self, to: Path, arguments: list[str]) -> None:
        include = f"-I{_PACKAGE / 'include'}"
        subprocess.run([*self._compiler, *_FLAGS, include, "-o", str(to), *arguments], check=True)


@pytest.fixture(scope="session")
def native_backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeBackends]:
    """The host and its backends; skips without a compiler."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"there is no C compiler '{compiler[0]}'")
    yield NativeBackends(tmp_path_factory.mktemp("native"), compiler)
