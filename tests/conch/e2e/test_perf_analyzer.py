"""Triton's load generator, unmodified."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.support.servers import EXAMPLES, PEERS, serving_process

ANALYZER = PEERS / "perf" / "bin" / "perf_analyzer"


@pytest.mark.peer
@pytest.mark.skipif(
    not ANALYZER.exists(), reason=f"no perf_analyzer in {PEERS}; make bench-setup installs it"
)
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(["grpc"], marks=pytest.mark.slow),
        pytest.param(["grpc", "--streaming"], marks=pytest.mark.slow),
        pytest.param(["grpc", "--async"], marks=pytest.mark.slow),
        ["grpc", "--shared-memory", "system"],
        pytest.param(["grpc", "--shared-memory", "system", "--streaming"], marks=pytest.mark.slow),
        pytest.param(["http"], marks=pytest.mark.slow),
        pytest.param(["http", "--async"], marks=pytest.mark.slow),
        pytest.param(["http", "--shared-memory", "system"], marks=pytest.mark.slow),
        ["http", "--input-tensor-format", "json", "--output-tensor-format", "json"],
    ],
    ids=" ".join,
)
def test_perf_analyzer(mode: list[str], tmp_path: Path) -> None:
    protocol, *more = mode
    with serving_process(EXAMPLES) as server:
        address = server.address if protocol == "grpc" else server.http_address
        result = subprocess.run(
            [
                *(ANALYZER, "-m", "simple", "-i", protocol, "-u", address),
                *("--concurrency-range", "4", "--measurement-mode", "count_windows"),
                *(
                    "--measurement-request-count",
                    "300",
                    "-s",
                    "900",
                    "-r",
                    "10",
                    "-f",
                    tmp_path / "report.csv",
                ),
                *more,
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "LD_LIBRARY_PATH": str(PEERS / "lib")},
        )
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    found = re.search(r"throughput: ([0-9.]+) infer/sec", said)
    assert found, said
    assert float(found[1]) > 0
