"""Models that call other models, on a real Triton and on conch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tests.contract.test_bls import COROUTINES, SCRIPTS
from tests.support.calling import write_callers
from tests.support.peers import NEEDS_TRITON, compare, serving_both
from tests.support.servers import eventually
from tritonclient.grpc import service_pb2

pytestmark = NEEDS_TRITON

DEADLY = "raised(lambda: pb_utils.load_model('nope'))"
"""Triton 2.51 answers it as we do, but ends in one of a few tries."""


def request(model: str, code: str) -> Any:
    encoded = code.encode()
    made = service_pb2.ModelInferRequest(
        model_name=model, raw_input_contents=[np.uint32(len(encoded)).tobytes() + encoded]
    )
    made.inputs.add(name="IN", datatype="BYTES", shape=[1])
    return made


def test_calls(tmp_path: Path) -> None:
    write_callers(tmp_path)
    with serving_both(tmp_path, "--model-control-mode=explicit", "--load-model=*") as both:
        ready = service_pb2.ModelReadyRequest(name="coroutine")
        eventually(lambda: both.triton("ModelReady", ready).ready, "Triton is ready")
        for code in [script for script in SCRIPTS if script != DEADLY]:
            compare(both, "ModelInfer", request("script", f"result = {code}"))
        for code in COROUTINES:
            compare(both, "ModelInfer", request("coroutine", f"return {code}"))
