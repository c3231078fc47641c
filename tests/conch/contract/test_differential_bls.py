"""Models that call other models, on a real Triton and on conch."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
from tests.conch.contract.test_bls import COROUTINES, NOT_READY, SCRIPTS, UNKNOWN
from tests.support.calling import write_callers
from tests.support.peers import NEEDS_TRITON, Both, outcomes, serving_both
from tests.support.servers import eventually
from tritonclient.grpc import service_pb2

pytestmark = NEEDS_TRITON

DEADLY = "raised(lambda: pb_utils.load_model('nope'))"
"""Triton 2.51 answers it as we do, but ends in one of a few tries."""

NEWER = (NOT_READY.format("nope").encode(), UNKNOWN.encode())
"""A text of Triton 2.51, and what later ones have in its place."""


def request(model: str, code: str) -> Any:
    encoded = code.encode()
    made = service_pb2.ModelInferRequest(
        model_name=model, raw_input_contents=[np.uint32(len(encoded)).tobytes() + encoded]
    )
    made.inputs.add(name="IN", datatype="BYTES", shape=[1])
    return made


def compare_texts(both: Both, message: Any) -> None:
    """Compares the texts that a script gives; conch may say more behind the text of an error."""
    theirs, ours = outcomes(both, message)
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        assert ours == theirs
        return
    texts = [b64decode(answer.pop("raw_output_contents")[0])[4:] for answer in (ours, theirs)]
    assert ours == theirs
    assert texts[0].startswith(texts[1].replace(*NEWER)), message


def test_calls(tmp_path: Path) -> None:
    write_callers(tmp_path)
    with serving_both(tmp_path, "--model-control-mode=explicit", "--load-model=*") as both:
        ready = service_pb2.ModelReadyRequest(name="coroutine")
        eventually(lambda: both.triton("ModelReady", ready).ready, "Triton is ready")
        for code in [script for script in SCRIPTS if script != DEADLY]:
            compare_texts(both, request("script", f"result = {code}"))
        for code in COROUTINES:
            compare_texts(both, request("coroutine", f"return {code}"))
