"""The C host under random batches of a backend that does everything right and wrong, with sanitizers and
valgrind."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.native_builds import BACKENDS, PACKAGE, build_backend, run_compiler, supports

pytestmark = [pytest.mark.process, pytest.mark.slow]


def build_driver(folder: Path, *flags: str) -> Path:
    """A program with the host, which runs random batches of chaos.c."""
    program = folder / "driver"
    host = sorted(str(each) for each in (PACKAGE / "host").glob("*.c"))
    run_compiler(
        *flags,
        "-rdynamic",
        f"-I{PACKAGE / 'host'}",
        "-o",
        str(program),
        str(BACKENDS / "random_driver.c"),
        *host,
        "-ldl",
    )
    return program


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_each_request_ends_once(tmp_path: Path, sanitizer: str) -> None:
    flags = [f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer"]
    if not supports(tmp_path, *flags):
        pytest.skip(f"the compiler can't make programs with {flags[0]}")
    backend = build_backend(BACKENDS / "chaos.c", tmp_path, *flags)
    program = build_driver(tmp_path, *flags)
    for seed in (1, 2):
        for decoupled in ("0", "1"):
            done = subprocess.run(
                [program, backend, str(seed), "1500", decoupled], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout.endswith(" 0 errors\n")


@pytest.mark.parametrize("decoupled", ["0", "1"])
def test_valgrind_finds_nothing(tmp_path: Path, decoupled: str) -> None:
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        pytest.skip("needs valgrind")
    backend, program = build_backend(BACKENDS / "chaos.c", tmp_path), build_driver(tmp_path)
    options = ("--error-exitcode=99", "--leak-check=full", "--errors-for-leak-kinds=definite,indirect")
    done = subprocess.run(
        [valgrind, "-q", *options, program, backend, "3", "150", decoupled],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 errors\n")
