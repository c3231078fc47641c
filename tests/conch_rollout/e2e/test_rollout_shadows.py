"""Shadow steps of rollout.toml: a candidate with other numbers is aborted, an equal one is promoted."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.support.loading import model_text, write_number
from tests.support.metrics import scrape
from tests.support.servers import client_of, eventually, serving, tensor

pytestmark = pytest.mark.slow

DECLARATION = """
[rollout]
candidate = "newest"
steps = ["shadow 100% 1s"]
keep = "1s"
[rollout.guard]
requests = 20
mismatch = 0.01
"""
KEY = "key-of-the-client"
# The client asks 50 times a second at most; with its copies it would be above its limit.
POLICY = f"""
[[principal]]
name = "operator"
anonymous = true
control = ["*"]
read = ["*"]

[[principal]]
name = "client"
key_sha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"
infer = ["*"]
requests_per_second = 55
"""
CONFIG = "version_policy { all { } } response_cache { enable: true }"


def test_a_shadow_step_aborts_or_passes(tmp_path: Path) -> None:
    captured = tmp_path / "captured"
    repository = tmp_path / "models"
    directory = write_number(repository, "m", extra=CONFIG, versions=(1,))
    (directory / "rollout.toml").write_text(DECLARATION)
    access, policy = tmp_path / "access", tmp_path / "policy.toml"
    policy.write_text(POLICY)
    flags = [
        f"--access-log={access}",
        f"--access-policy={policy}",
        "--cache-config=local,size=1048576",
        "--model-control-mode=explicit",
        "--load-model=m",
        f"--rollout-capture-directory={captured}",
    ]
    answers: Counter[tuple[str, float]] = Counter()
    stop = threading.Event()

    def add(version: int, number: int) -> None:
        (directory / str(version)).mkdir()
        (directory / str(version) / "model.py").write_text(model_text(number))

    with serving(repository, flags=flags) as server, client_of(server) as client:

        def ask() -> None:
            while not stop.wait(0.02):
                inputs = [tensor("IN", np.ones(1, np.float32))]
                result = client.infer("m", inputs, headers={"authorization": f"Bearer {KEY}"})
                answers[result.get_response().model_version, float(result.as_numpy("OUT")[0])] += 1

        def states() -> dict[str, str]:
            index = client.get_model_repository_index().models
            return {each.version: each.state for each in index if each.name == "m"}

        def counted(name: str, version: str) -> float:
            labels = frozenset({("model", "m"), ("version", version)})
            return scrape(server.metrics_url).get((name, labels), 0.0)

        def rollout() -> Any:
            return httpx.get(f"http://{server.http_address}/v2/repository/models/m/rollout").json()

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            add(2, 5)
            client.load_model("m")
            eventually(lambda: states().get("2") == "READY", "the candidate loads")
            eventually(lambda: counted("conch_shadow_mismatches_total", "2") >= 4, "pairs differ")
            assert len(list(captured.iterdir())) <= 32
            eventually(lambda: rollout()["state"] == "ABORTED", "the rollout is aborted", 60)
            assert set(answers) == {("1", 1.0)}
            assert states()["2"] == "UNAVAILABLE"
            report = rollout()["shadow_report"]
            assert (report["version"], report["active"], report["failures"]) == (2, False, 0)
            assert report["mismatches"] == report["compared"] >= 4, "so many need no 20"
            assert report["worst"][0]["outputs"][0] == {
                **{"output": "OUT", "difference": "values", "max_abs": 4.0},
                **{"within": 0.0, "cosine": pytest.approx(1.0)},
            }
            add(3, 1)
            client.load_model("m")
            eventually(lambda: counted("conch_shadow_compared_total", "3") >= 20, "pairs are compared")
            assert counted("nv_inference_exec_count", "3") >= 20, "the cache has answered copies"
            assert counted("nv_inference_exec_count", "1") == 1, "the cache answers the client"
            eventually(lambda: ("3", 1.0) in answers, "the candidate is promoted", 60)
            assert counted("conch_shadow_mismatches_total", "3") == 0
        finally:
            stop.set()
            asking.join()
    assert set(answers) == {("1", 1.0), ("3", 1.0)}
    lines = [json.loads(line) for line in access.read_text().splitlines()]
    assert len(lines) == answers.total(), "copies have no lines"
    assert {line["version"] for line in lines} == {"1", "3"}
