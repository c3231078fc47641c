"""Workers in the other Pythons that they support."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.support.pythons import OTHERS, prefix_of
from tests.support.waiting import PATIENCE_S

import conch
from conch import testing

pytestmark = pytest.mark.process

SERVICES = Path(conch.__file__).parents[1]

SLOW_CHECKS = """
import asyncio, logging, sys, threading
sys.path.insert(0, sys.argv[1])
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from conch.backends.python.runtime.event_loop import EventLoop
from conch.backends.python.runtime.readiness_check import ReadinessCheck

loop, ended = EventLoop("x"), []

async def never():
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(None)

checks = 0
while len(ended) < 2:  # the time may be over before a coroutine has begun
    checks += 1
    check = ReadinessCheck("m", never, loop, 0.05)
    check.start()
    for thread in threading.enumerate():
        if thread.name == "conch-m-ready":
            thread.join()
loop.close()
print(checks)
"""

MODEL = """
import asyncio
import sys

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for name, kind in (("N", "FP32"), ("S", "STRING")):
            config.add_input({"name": name, "data_type": f"TYPE_{kind}", "dims": [-1]})
        for name, kind in (("TWICE", "FP32"), ("SAME", "STRING"), ("PYTHON", "STRING")):
            config.add_output({"name": name, "data_type": f"TYPE_{kind}", "dims": [-1]})
        return config

    def initialize(self, args):
        self.family = pb_utils.MetricFamily("of_other_pythons", "Requests", pb_utils.MetricFamily.COUNTER)
        self.count = self.family.Metric(labels={"python": "other"})

    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        await asyncio.sleep(0)
        self.count.increment(1)
        number = pb_utils.get_input_tensor_by_name(request, "N")
        text = pb_utils.get_input_tensor_by_name(request, "S").as_numpy()
        python = np.array(["%d.%d" % sys.version_info[:2]], object)
        return pb_utils.InferenceResponse([
            pb_utils.Tensor.from_dlpack("TWICE", number.as_numpy() * 2),
            pb_utils.Tensor("SAME", text),
            pb_utils.Tensor("PYTHON", python),
        ])
"""


@pytest.mark.parametrize("version", OTHERS)
def test_checks_of_readiness_that_take_too_long_are_cancelled(version: str) -> None:
    python = prefix_of(version) / "bin" / "python3"
    command = [python, "-B", "-W", "error", "-c", SLOW_CHECKS, SERVICES]
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    lines = done.stdout.splitlines()
    assert lines.count("is_ready of model 'm' failed: it took longer than 0.05 s") == int(lines[-1])


@pytest.mark.parametrize("version", OTHERS)
def test_a_model_runs_in_a_worker(tmp_path: Path, version: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(MODEL)
    path = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{prefix_of(version)}" }} }}'
    (tmp_path / "m" / "config.pbtxt").write_text(path)
    number = np.arange(100_000, dtype=np.float32)  # which goes through shared memory
    with testing.load(tmp_path / "m", placement="worker") as model:
        for array in (number, number[:3]):
            outputs = model.run({"N": array, "S": np.array([b"\xff", "ü".encode()], object)})
            np.testing.assert_array_equal(outputs["TWICE"], array * 2)
            assert outputs["SAME"].tolist() == [b"\xff", "ü".encode()]
            assert outputs["PYTHON"].tolist() == [version.encode()]
