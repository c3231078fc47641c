"""YAML files of Model Analyzer as flags: keys that are taken or refused, and flags that replace them."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch_tools.tune.model_analyzer_file import YamlError, flags_of, without_replaced
from conch_tools.tune_command import make_parser

FILE = """
model_repository: models
export_path: out
batch_sizes: 2
latency_budget: 20
run_config_search_max_instance_count: 3
run_config_search_min_model_batch_size: 4
run_config_search_max_model_batch_size: 20
triton_server_flags: {log_verbose: 1}
bls_composing_models: [b, c]
profile_models:
  a:
    parameters: {concurrency: "8"}
    objectives: {perf_throughput: 2, perf_latency_p99: 1}
    constraints: {cpu_used_ram: {max: 900}, perf_throughput: {min: 50}}
    perf_analyzer_flags: {shape: ["X:3,4", "Y:1"], input-data: zero}
    model_config_parameters:
      dynamic_batching:
        max_queue_delay_microseconds: {start: 0, stop: 200, step: 100}
        preferred_batch_size: [[4, 8], [16]]
  other:
    batch_sizes: 9
"""
FLAGS = [
    "--model-repository=models",
    "--output=out",
    "--batch=2",
    "--concurrency=8",
    "--max=p99=20ms",
    "--objective=throughput=2",
    "--objective=p99=1",
    "--max=memory=900MB",
    "--min=throughput=50",
    "--search=instances=1,2,3",
    "--search=batch=4,8,16",
    "--search=delay_us=0,100,200",
    "--search=preferred=4/8,16",
    "--shape=X:3,4",
    "--shape=Y:1",
    "--data=zero",
    "--serve-flag=--log-verbose=1",
    "--load-model=b",
    "--load-model=c",
]


def test_keys_become_flags_that_the_command_takes(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(FILE)
    assert flags_of(file, "a") == ("a", FLAGS)
    make_parser().parse_args(FLAGS)
    with pytest.raises(YamlError, match="has a, other: name one"):
        flags_of(file, "")
    with pytest.raises(YamlError, match="no model 'c'"):
        flags_of(file, "c")
    file.write_text("profile_models: a")
    assert flags_of(file, "") == ("a", [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("checkpoint_directory: x\ngpus: all", "does not follow checkpoint_directory, gpus: remove them"),
        ("objectives: [gpu_utilization]", "objectives.gpu_utilization: remove"),
        ("perf_analyzer_flags: {percentile: 95}", r"perf_analyzer_flags\.percentile: remove"),
        ("model_config_parameters: {instance_group: [{kind: K, count: [1, 2]}]}", r"instance_group\.kind"),
        ("concurrency: 1,2", "concurrency: conch tune measures with one value; choose one of 1, 2"),
        ("concurrency: {begin: 1}", r"concurrency takes 1,2 or \[1, 2\] or"),
        ("constraints: 5", "constraints has keys with values, not 5"),
        ("a: [", "while parsing"),
    ],
)
def test_keys_without_a_counterpart_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{text}\nprofile_models: [m]")
    with pytest.raises(YamlError, match=message):
        flags_of(file, "m")


def test_flags_of_the_command_line_replace_those_of_the_file() -> None:
    flags = ["--concurrency=8", "--batch=2", "--max=p99=1ms", "--seed=1"]
    for given, left in (
        (["-c", "4"], flags[1:]),
        (["-c4", "-b=1"], flags[2:]),
        (["--rate=5"], flags[1:]),
        (["--max", "p99=2ms"], [*flags[:2], *flags[3:]]),
        (["--concurrency-x=1"], flags),
    ):
        assert without_replaced(flags, given) == left
