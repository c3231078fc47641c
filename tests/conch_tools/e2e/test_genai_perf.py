"""GenAI-Perf, unmodified, with conch's `perf_analyzer`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers import ROOT, serving_process, write_model

ENVIRONMENT = Path(os.environ.get("CONCH_GENAI_PERF", Path.home() / ".cache/conch-tests/genai-perf"))
REQUESTS, WORDS = 20, ["one ", "two ", "three ", "four "]
_CONFIG = """
    backend: "python"
    model_transaction_policy { decoupled: true }
    input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
    input { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
    input { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true }
    input { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }
    input { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
    output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
"""
_MODEL = f"""
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            stream = pb_utils.get_input_tensor_by_name(request, "stream")
            words = {WORDS}
            if stream is None or not stream.as_numpy()[0]:
                words = ["".join(words)]
            sender = request.get_response_sender()
            for word in words:
                text = pb_utils.Tensor("text_output", np.array([word.encode()], np.object_))
                sender.send(pb_utils.InferenceResponse([text]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_KSERVE = ["--endpoint-type", "kserve", "--streaming"]
_GENERATE = ["--endpoint-type", "generate"]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(
    not (ENVIRONMENT / ".ready").exists(), reason="tests/setup_genai_perf.sh makes its environment"
)
@pytest.mark.parametrize(
    ("flags", "streams"),
    [
        ([*_KSERVE, "--backend", "vllm"], True),
        ([*_KSERVE, "--backend", "tensorrtllm", "--output-tokens-mean", "7"], True),
        ([*_GENERATE, "--endpoint", "v2/models/llm/generate", "--warmup-request-count", "3"], False),
        ([*_GENERATE, "--endpoint", "v2/models/llm/generate_stream", "--streaming"], True),
    ],
    ids=["vllm", "tensorrtllm", "generate", "generate_stream"],
)
def test_profile(flags: list[str], streams: bool, tmp_path: Path) -> None:
    write_model(tmp_path / "models", "llm", _CONFIG, {"model.py": _MODEL})
    _run([ENVIRONMENT / "bin/python", ROOT / "tests/support/letter_tokenizer.py", tmp_path / "tokenizer"])
    with serving_process(tmp_path / "models", flags=["--http-port=0"]) as server:
        url = server.http_address if "generate" in flags else server.address
        common = ["-m", "llm", "-u", url, "--tokenizer", tmp_path / "tokenizer", "--concurrency", "2"]
        sizes = ["--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", "30"]
        arguments = [*common, *sizes, "--artifact-dir", tmp_path / "artifacts", *flags]
        _run([ENVIRONMENT / "bin/genai-perf", "profile", *arguments])
    (file,) = tmp_path.glob("artifacts/*/profile_export_genai_perf.json")
    found = json.loads(file.read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert found["input_sequence_length"]["avg"] == 30
    assert found["output_sequence_length"]["min"] == len("".join(WORDS).encode())
    assert found["request_latency"]["min"] > 0
    assert ("inter_token_latency" in found) is streams
    if streams:
        first, whole = found["time_to_first_token"]["avg"], found["request_latency"]["avg"]
        assert 0 < first < whole
        assert found["time_to_second_token"]["min"] > 0
    (export,) = tmp_path.glob("artifacts/*/profile_export.json")
    (experiment,) = json.loads(export.read_text())["experiments"]
    begin, end = experiment["window_boundaries"]
    times = [(each["timestamp"], *each["response_timestamps"]) for each in experiment["requests"]]
    assert all(begin <= each[0] and each[-1] <= end and sorted(each) == list(each) for each in times)
    assert {len(each) - 1 for each in times} == {len(WORDS) if streams else 1}


def _run(command: list[Any]) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stdout
