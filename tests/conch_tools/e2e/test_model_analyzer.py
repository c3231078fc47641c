"""Triton's Model Analyzer, unmodified, with conch's `perf_analyzer`."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.servers import copy_example, serving_process

ENVIRONMENT = Path(os.environ.get("CONCH_MODEL_ANALYZER", Path.home() / ".cache/conch-tests/model-analyzer"))
_CONFIG = """
model_repository: {site}/models
triton_launch_mode: remote
client_protocol: grpc
triton_grpc_endpoint: {server.address}
triton_http_endpoint: {server.http_address}
triton_metrics_url: {server.metrics_url}
output_model_repository_path: {site}/variants
export_path: {site}
checkpoint_directory: {site}/checkpoints
run_config_search_mode: quick
run_config_search_max_concurrency: 2
run_config_search_max_model_batch_size: 2
run_config_search_max_instance_count: 1
num_configs_per_model: 1
# A busy machine changes its speed from one second to the next.
perf_analyzer_flags:
  stability-percentage: 10000
profile_models:
  simple:
    cpu_only: true
"""
_REPORT = """
export_path: {site}
checkpoint_directory: {site}/checkpoints
report_model_configs: [simple_config_default]
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(
    not (ENVIRONMENT / ".ready").exists(), reason="tests/setup_model_analyzer.sh makes its environment"
)
def test_quick_search_and_report(tmp_path: Path) -> None:
    copy_example(tmp_path / "models", "simple")
    (tmp_path / "checkpoints").mkdir()
    flags = ["--model-control-mode=explicit", "--http-port=0", "--metrics-port=0"]
    with serving_process(tmp_path / "models", flags=flags) as server:
        _model_analyzer("profile", _CONFIG.format(site=tmp_path, server=server), tmp_path)
    _model_analyzer("report", _REPORT.format(site=tmp_path), tmp_path)
    rows = list(csv.DictReader((tmp_path / "results/metrics-model-inference.csv").read_text().splitlines()))
    configs = {Path(row["Model Config Path"]).name for row in rows}
    assert {"simple_config_default", "simple_config_0"} <= configs
    assert all(float(row["Throughput (infer/sec)"]) > 0 for row in rows)
    assert all(float(row["p99 Latency (ms)"]) > 0 for row in rows)
    assert list((tmp_path / "reports/summaries/simple").iterdir())
    assert list((tmp_path / "reports/detailed/simple_config_default").iterdir())


def _model_analyzer(verb: str, config: str, site: Path) -> None:
    file = site / f"{verb}.yaml"
    file.write_text(config)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [ENVIRONMENT / "bin/model-analyzer", verb, "-f", file],
        cwd=site,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "Failed to obtain stable measurement" not in done.stdout
