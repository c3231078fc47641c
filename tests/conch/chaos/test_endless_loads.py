"""Loads that would go on for ever: refused where that can be seen, stopped by an unload and by SIGTERM."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.servers import WAIT_S, client_of, eventually, serving_process, write_model
from tritonclient.utils import InferenceServerException

FIELDS = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""
SLOW = """
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        begun = Path(args["model_repository"]).parent.parent / "begun"
        begun.mkdir(exist_ok=True)
        (begun / args["model_instance_name"]).touch()
        time.sleep(0.1)

    def execute(self, requests):
        begun = Path("BEGUN")
        begun.mkdir(exist_ok=True)
        (begun / "warm").touch()
        out = pb_utils.Tensor("OUT", np.zeros(1, np.float32))
        return [pb_utils.InferenceResponse([out]) for _ in requests]
"""
WARM = """
model_warmup { name: "w" batch_size: 1 count: 4000000000
    inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } }
"""


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["in_process", "worker"])
@pytest.mark.parametrize("endless", ["instance_group { count: 1000 }", WARM], ids=["instances", "warm-up"])
def test_they_stop(tmp_path: Path, placement: str, endless: str) -> None:
    repository, begun = tmp_path / "models", tmp_path / "begun"
    write_model(repository, "m", FIELDS + endless, {"model.py": SLOW.replace("BEGUN", str(begun))})
    many = write_model(repository, "many", FIELDS, {"model.py": SLOW})
    (many / "config.pbtxt").write_text(FIELDS + "instance_group { count: 2000000000 }")
    flags = ["--model-control-mode=explicit", f"--backend-config=python,placement={placement}"]
    marker = "warm" if "warm" in endless else "m_0_0"
    with (
        serving_process(repository, flags=flags) as server,
        client_of(server) as client,
        ThreadPoolExecutor() as pool,
    ):
        with pytest.raises(InferenceServerException, match=r"ask for 2000000000 instances, .* at most 1000"):
            client.load_model("many")
        load = pool.submit(client.load_model, "m")
        eventually((begun / marker).exists, "the load has come so far")
        client.unload_model("m")
        with pytest.raises(InferenceServerException, match="current load operation is out-dated"):
            load.result(WAIT_S)
        (begun / marker).unlink()
        load = pool.submit(client.load_model, "m")
        eventually((begun / marker).exists, "the load has come so far again")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.errors
        with pytest.raises(InferenceServerException):
            load.result(WAIT_S)
