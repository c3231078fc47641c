"""The wheel of conch-native, made from its sdist, with the machine's compiler and with PyPI's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tests.support.native_backends import NativeBackends
from tests.support.native_builds import ROOT, compiler

import conch.testing

pytestmark = [pytest.mark.process, pytest.mark.slow]

SOURCES = ROOT / "services/conch_native"


def pip(*arguments: str | Path, **environment: str) -> None:
    """Runs pip; skips if the index lacks what it needs."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if missing := re.search(r"No matching distribution found for (\S+)", done.stdout + done.stderr):
        pytest.skip(f"the package index has no {missing[1]}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    pip("install", "--quiet", "--target", folder / "hatchling", "hatchling")
    environment = {**os.environ, "PYTHONPATH": str(folder / "hatchling")}
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)]
    subprocess.run(command, cwd=SOURCES, env=environment, check=True, capture_output=True)
    (made,) = folder.glob("conch_native-*.tar.gz")
    return made


@pytest.mark.parametrize("by", ["cc", "ziglang"])
def test_a_wheel_runs_backends(by: str, sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler()  # the backend's, in either case
    (tmp_path / "empty").mkdir()
    without = {"PATH": str(tmp_path / "empty"), "CC": "", "ZIG_GLOBAL_CACHE_DIR": str(tmp_path / "zig")}
    chosen = without if by == "ziglang" else {"CC": "cc"}
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, sdist, **chosen)
    (wheel,) = tmp_path.glob("*.whl")
    machine = sysconfig.get_platform().partition("-")[2]
    assert re.search(rf"-py3-none-(linux|musllinux_1_2|manylinux_2_17)_{machine}\.whl$", wheel.name)
    assert ("-py3-none-linux_" in wheel.name) == (by == "cc" and "musl" not in wheel.name)
    packages = tmp_path / "packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    assert not list(packages.rglob("*.c"))

    monkeypatch.syspath_prepend(packages)
    backends = NativeBackends(tmp_path, packages)
    backends.build("probe")
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/config.pbtxt").write_text('backend: "probe"')
    inputs = {"IN": np.frombuffer(b"some", np.uint8)[None]}
    outputs = conch.testing.run(tmp_path / "m", inputs, backend_directory=backends.directory)
    assert outputs["OUT"].tobytes() == b"some"


def test_the_sdist_has_what_a_wheel_is_made_of(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(each.relative_to(SOURCES)) for each in (SOURCES / "conch_native").rglob("*.[ch]")}
    assert {"pyproject.toml", "hatch_build.py", "README.md", *sources} <= names
    assert "conch_native/libtritonserver.so" not in names
