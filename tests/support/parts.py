"""A decoupled model whose requests say how many responses there are, and how large each is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tests.support.servers import write_model
from tritonclient.grpc import service_pb2

_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            first, count, width = request.inputs()[0].as_numpy().tolist()
            sender = request.get_response_sender()
            for number in range(first, first + count):
                out = pb_utils.Tensor("OUT", np.full(width, number, np.int32))
                sender.send(pb_utils.InferenceResponse([out]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_INT32 dims: [ 3 ] }
    output { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }
    model_transaction_policy { decoupled: true }
"""


def write_parts(repository: Path) -> None:
    """Writes the model, `parts`."""
    write_model(repository, "parts", _CONFIG, {"model.py": _MODEL})


def parts_request(first: int, count: int, width: int) -> Any:
    """A request for responses of a number each, one more than the one before, `width` times."""
    content = np.array([first, count, width], np.int32).tobytes()
    request = service_pb2.ModelInferRequest(model_name="parts", raw_input_contents=[content])
    request.inputs.add(name="IN", datatype="INT32", shape=[3])
    return request


def part_of(response: Any) -> tuple[int | None, int]:
    """The number of a response of a stream, and how often it has it; None for several numbers."""
    assert not response.error_message, response.error_message
    values = np.frombuffer(response.infer_response.raw_output_contents[0], np.int32)
    numbers = set(values.tolist())
    return (numbers.pop() if len(numbers) == 1 else None), values.size
