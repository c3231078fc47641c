"""The example with sequences: its client against a server of its model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.servers import ROOT, WAIT_S, client_of, copy_example, serving_process

CLIENT = ROOT / "examples" / "clients" / "anomaly.py"


def run(address: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(CLIENT), f"--url={address}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)


def test_anomalies_are_found(tmp_path: Path) -> None:
    copy_example(tmp_path, "anomaly")
    with serving_process(tmp_path) as server:
        for _ in range(2):  # sequences of the same names begin anew
            result = run(server.address)
            assert (result.returncode, result.stderr) == (0, "")
            header, *faults, last = result.stdout.splitlines()
            assert header.split() == ["step", "sensor", "value", "expected", "score"]
            assert {tuple(line.split()[:2]) for line in faults} == {
                ("75", "fridge"),
                ("120", "boiler"),
                ("160", "hall"),
            }
            assert last == "200 values of 3 sensors, every fault found and no other"
        with client_of(server) as client:
            metadata = client.get_model_metadata("anomaly")
            assert [each.name for each in metadata.inputs] == ["value"]
            assert [each.name for each in metadata.outputs] == ["score", "expected"]
            (stats,) = client.get_inference_statistics("anomaly").model_stats
            assert stats.inference_count == 1200
            assert stats.execution_count < 1200, "sensors share batches"


def test_without_a_server_the_client_says_so(tmp_path: Path) -> None:
    result = run("127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr.startswith("error: no server answers at 127.0.0.1:1: ")
