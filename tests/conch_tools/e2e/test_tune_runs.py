"""conch tune on a model whose best setting is known; killed in the middle, it goes on where it was."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from tests.support.servers import CONCH, eventually

from conch_tools import tune_command
from conch_tools.tune.trial_server import TrialServer

pytestmark = [pytest.mark.process, pytest.mark.slow]

# An execution takes 5 ms, whatever it has.
MODEL = """
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.005)
        arrays = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in arrays]
"""
CONFIG = """
backend: "python"
max_batch_size: 32
input { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }
"""

COMPLETED = MODEL.replace(
    "    def execute",
    """    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [4]})
        return config

    def execute""",
)


def measurements(path: Path) -> list[dict[str, object]]:
    if not path.exists():
        return []
    found: list[dict[str, object]] = json.loads(path.read_text())["measurements"]
    return found


def ended(process: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True


def children(process: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_a_batcher_that_the_server_has_completed_takes_another_delay(tmp_path: Path) -> None:
    model, folder = tmp_path / "repository" / "auto" / "1", tmp_path / "run"
    model.mkdir(parents=True)
    folder.mkdir()
    (model / "model.py").write_text(COMPLETED)
    server = TrialServer(tmp_path / "repository", "auto", folder, (), (), with_metrics=False)
    try:
        delays = []
        for changes in ({}, {"delay_us": 500}):
            server.load(changes)
            config = server.config()
            assert (config.max_batch_size, config.HasField("dynamic_batching")) == (8, True)
            delays.append(config.dynamic_batching.max_queue_delay_microseconds)
        assert delays == [0, 500]
    finally:
        server.close()


def test_finds_the_batcher_after_a_kill_and_applies_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository, out = tmp_path / "repository", tmp_path / "out"
    (repository / "sleepy" / "1").mkdir(parents=True)
    (repository / "sleepy" / "1" / "model.py").write_text(MODEL)
    config = repository / "sleepy" / "config.pbtxt"
    config.write_text(CONFIG)
    common = ["sleepy", f"--model-repository={repository}", "-o", str(out), "--window=2s", "--pairs=3"]
    fields = ["--search=instances=", "--search=placement=", "--search=delay_us=", "--search=batch=0,32"]
    arguments = [*common, *fields, "--budget=15s"]

    tuner = subprocess.Popen([CONCH, "tune", *arguments], stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: len(measurements(out / "tune.json")) >= 2, "two measurements")
        servers = children(tuner.pid)
    finally:
        tuner.send_signal(signal.SIGKILL)
        tuner.wait()
    eventually(lambda: all(ended(each) for each in servers), "the end of the server")
    kept = measurements(out / "tune.json")

    assert tune_command.run(arguments) == tune_command.DONE
    assert measurements(out / "tune.json")[: len(kept)] == kept
    assert "batch=32 is better than today's" in capsys.readouterr().out
    assert "+dynamic_batching {" in (out / "config.pbtxt.diff").read_text()
    assert "<svg" in (out / "tune.html").read_text()
    assert config.read_text() == CONFIG

    apply = ["apply", str(out / "tune.json"), f"--model-repository={repository}"]
    assert tune_command.run(apply) == tune_command.DONE
    assert "dynamic_batching" in config.read_text()
    assert config.with_name("config.pbtxt.before-tune").read_text() == CONFIG
    # It is not the model that was measured any more.
    assert tune_command.run(apply) == tune_command.REFUSED
    assert tune_command.run(arguments) == tune_command.REFUSED
    assert "--restart" in capsys.readouterr().err
