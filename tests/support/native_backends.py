"""The C host and backends in C and C++, compiled once for the tests that serve models with them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.native_builds import BACKENDS, PACKAGE, build_backend, compiler, run_compiler
from tests.support.servers import ServerProcess, serving_process


class NativeBackends:
    """A directory of backends, and conch-native as it would be installed.

    Attributes:
        directory: For ``--backend-directory``.
        packages: Directories for a server's ``PYTHONPATH``.
        host: The C host.
    """

    def __init__(self, folder: Path, packages: Path | None = None) -> None:
        """`packages` has an installed conch-native; without, it is compiled."""
        self.directory = folder / "backends"
        self.packages = packages or folder / "packages"
        package = self.packages / "conch_native"
        self.host = package / "libtritonserver.so"
        if packages is not None:
            return
        shutil.copytree(PACKAGE, package)
        sources = sorted(map(str, (PACKAGE / "host").glob("*.c")))
        run_compiler(
            *(
                "-fPIC",
                "-shared",
                "-fvisibility=hidden",
                f"-Wl,-soname,{self.host.name}",
                "-o",
                str(self.host),
            ),
            *(*sources, "-ldl"),
        )

    def build(self, name: str) -> Path:
        """Compiles a backend of the tests, unless that was done; returns its library."""
        library = self.directory / name / f"libtriton_{name}.so"
        if not library.exists():
            (source,) = BACKENDS.glob(f"{name}.c*")
            build_backend(source, library.parent)
        return library

    @contextmanager
    def serving(self, models: Path, *names: str, flags: tuple[str, ...] = ()) -> Iterator[ServerProcess]:
        """Serves models that need these backends."""
        for name in names:
            self.build(name)
        flags = (f"--backend-directory={self.directory}", *flags)
        with serving_process(models, flags=flags, environment={"PYTHONPATH": str(self.packages)}) as server:
            yield server


@pytest.fixture(scope="session")
def native_backends(tmp_path_factory: pytest.TempPathFactory) -> NativeBackends:
    """The host and its backends; skips without a compiler."""
    compiler()
    return NativeBackends(tmp_path_factory.mktemp("native"))
