"""The C host under random batches of a backend that does everything right and wrong, with sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.support.native_builds import BACKENDS, PACKAGE, build_backend, run_compiler, supports

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_each_request_ends_once(tmp_path: Path, sanitizer: str) -> None:
    flags = [f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer"]
    if not supports(tmp_path, *flags):
        pytest.skip(f"the compiler can't make programs with {flags[0]}")
    backend = build_backend(BACKENDS / "chaos.c", tmp_path, *flags)
    program = tmp_path / "driver"
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
    for seed in (1, 2):
        for decoupled in ("0", "1"):
            done = subprocess.run(
                [program, backend, str(seed), "1500", decoupled], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout.endswith(" 0 errors\n")
