"""Models that call each other, for tests of traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.servers import write_model

_TENSORS = """
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
_LEAF = """
import time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        number = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
        if number < 0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("negative"))
        if number == 99:
            Path(request.request_id()).touch()
        while number == 99 and not request.is_cancelled():
            time.sleep(0.001)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number + 1], np.int32))])
"""
CALLER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        call = pb_utils.InferenceRequest(
            model_name="ensemble", requested_output_names=["OUT"], inputs=request.inputs()
        )
        return pb_utils.InferenceResponse(call.exec().output_tensors())
"""
_MANY = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])):
                out = pb_utils.Tensor("OUT", np.array([number], np.int32))
                sender.send(pb_utils.InferenceResponse([out]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_STEP = """
{{ model_name: "leaf" model_version: -1
   input_map {{ key: "IN" value: "{0}" }} output_map {{ key: "OUT" value: "{1}" }} }}"""


def write_models(root: Path) -> Path:
    for name, code in (("leaf", _LEAF), ("caller", CALLER)):
        write_model(root, name, f'backend: "python"\n{_TENSORS}', {"model.py": code})
    cached = f'backend: "python"\n{_TENSORS}response_cache {{ enable: true }}\n'
    write_model(root, "cached", cached, {"model.py": _LEAF})
    many = f'backend: "python"\n{_TENSORS}model_transaction_policy {{ decoupled: true }}\n'
    write_model(root, "many", many, {"model.py": _MANY})
    steps = f"{_STEP.format('IN', 'between')},{_STEP.format('between', 'OUT')}"
    write_model(root, "ensemble", f'platform: "ensemble"\n{_TENSORS}ensemble_scheduling {{ step [{steps}] }}')
    return root


def records(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found
