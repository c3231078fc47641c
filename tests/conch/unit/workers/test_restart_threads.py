"""A worker is started again although the server is short of threads for a while."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.support.servers import eventually

import conch.testing

pytestmark = pytest.mark.process

CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        pid = np.array([os.getpid()], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pid)]) for _ in requests]
"""


@pytest.mark.parametrize("fails", [2, None])
def test_a_restart_whose_thread_can_not_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int | None
) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    inputs = {"IN": np.ones(1, np.float32)}
    start = threading.Thread.start
    tries: list[str] = []

    def start_unless(thread: threading.Thread) -> None:
        if thread.name.endswith("-restart"):
            tries.append(thread.name)
            if fails is None or len(tries) <= fails:
                raise RuntimeError("can't start new thread")
        start(thread)

    with conch.testing.load(version.parent, placement="worker") as model:
        pid = int(model.run(inputs)["OUT"][0])
        monkeypatch.setattr(threading.Thread, "start", start_unless)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(tries) > (fails or 1), "it is tried again")
        if fails is not None:
            eventually(lambda: int(model.run(inputs)["OUT"][0]) != pid, "another one serves")
    # Where it never succeeds, the model can be unloaded all the same.
