"""The example with real models on several engines, as its README has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.servers import ROOT, ServerProcess, serving_process

EXAMPLE = ROOT / "examples" / "engines"
TENSORFLOW = Path(os.environ.get("CONCH_TENSORFLOW", Path.home() / ".cache/conch-tests/tensorflow"))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("ai_edge_litert", "openvino", "treelite", "xgboost", "sklearn"):
        pytest.importorskip(package)
    directory = tmp_path_factory.mktemp("engines")
    has_tensorflow = (TENSORFLOW / ".ready").exists()
    arguments = [str(TENSORFLOW)] if has_tensorflow else []
    done = subprocess.run(
        [sys.executable, EXAMPLE / "prepare.py", directory, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if "No matching distribution" in done.stderr or "ConnectionError" in done.stderr:
        pytest.skip("the packages with the models can't be downloaded here")
    assert done.returncode == 0, done.stderr
    if not has_tensorflow:
        shutil.rmtree(directory / "models" / "notes_tensorflow")
    return directory


@pytest.fixture(scope="module")
def server(prepared: Path) -> Iterator[ServerProcess]:
    with serving_process(prepared / "models") as server:
        yield server


@pytest.mark.parametrize(
    ("client", "option", "text"),
    [
        ("notes.py", None, "notes_openvino: A4 C#5 E5"),
        ("voice.py", "--recording=speech_8khz.raw", "sequence 1: ......#####"),
        ("tumours.py", "--held-out=tumours.npz", "114 tumours"),
        ("ocr.py", None, "Invoice 2041 of 7 May\n"),
    ],
)
def test_clients_get_what_they_expect(
    server: ServerProcess, prepared: Path, client: str, option: str | None, text: str
) -> None:
    options = [] if option is None else [option]
    done = subprocess.run(
        [sys.executable, EXAMPLE / "clients" / client, "--url", server.address, *options],
        cwd=prepared,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert text in done.stdout
