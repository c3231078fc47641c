"""The wheel, as `make wheel` builds it, away from the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from tests.support.servers import ROOT, START_S, WAIT_S, check_simple, eventually, free_port, simple_inputs


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(directory), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = directory.glob("conch-*.whl")
    return built


def test_building_it_needs_a_bare_environment_only(tmp_path: Path) -> None:
    command = ["make", "--dry-run", "--no-print-directory", f"VENV={tmp_path}", "wheel"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [re.sub(r"^.*python3? -m ", "", line).split()[0] for line in done.stdout.splitlines()] == [
        "venv",
        "pip",
    ]
    assert "pip wheel" in done.stdout and "install" not in done.stdout


@pytest.mark.slow
def test_protos_and_examples_are_in_it(wheel: Path) -> None:
    """All files of the two folders, and none that git ignores, such as clients that have been built."""
    kept = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "proto", "examples"]
    files = subprocess.run(kept, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if name.startswith(("conch/proto/", "conch/examples/"))}
    assert packed == {f"conch/{name}" for name in files}
    assert "conch/docs/index.md" in names and not [name for name in names if "docs/pictures" in name]


@pytest.mark.slow
def test_the_console_is_in_it(wheel: Path) -> None:
    static = ROOT / "services" / "conch_console" / "static"
    files = {path.relative_to(ROOT / "services").as_posix() for path in static.rglob("*") if path.is_file()}
    assert len(files) > 30 and files <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_the_demo_serves_from_it(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(command, check=True)
    port = free_port()
    ports = [f"--grpc-port={port}", "--http-port=0", "--metrics-port=0", f"--console-port={free_port()}"]
    log = tmp_path / "log"
    with log.open("w") as errors:
        server = subprocess.Popen(
            [sys.executable, site / "bin" / "conch", "demo", *ports, "--log-json=false"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site)},
            stderr=errors,
        )
    try:
        eventually(lambda: server.poll() is not None or "Security" in log.read_text(), "it listens", START_S)
        assert server.poll() is None, log.read_text()
        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        check_simple(client.infer("simple", simple_inputs()))
        client.close()
        started = subprocess.run(
            [sys.executable, "-c", "import conch; print(conch.__file__)"],
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert started.stdout.strip() == str(site / "conch" / "__init__.py")
        assert re.search(r"\| word_chain +\| 1 +\| READY", log.read_text())
        server.terminate()
        assert server.wait(WAIT_S) == 0
    finally:
        server.kill()
        server.wait()
