"""Halves even numbers and triples odd ones and adds one, until 1 is reached; every step is a response.

A request takes one step per execution and is then put back (rescheduled): requests that come meanwhile join
the next execution instead of waiting for those before them to end, as with models that generate text.
"""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
AGAIN = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.numbers: dict[int, int] = {}  # where each request stands, by its correlation id

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            key = request.correlation_id()
            number = self.numbers.pop(key, None)
            if number is None:
                number = int(pb_utils.get_input_tensor_by_name(request, "START").as_numpy().ravel()[0])
            sender = request.get_response_sender()
            if request.is_cancelled():
                sender.send(flags=FINAL)
                continue
            done = number <= 1
            response = pb_utils.InferenceResponse([pb_utils.Tensor("NUMBER", np.array([[number]], np.int64))])
            sender.send(response, flags=FINAL if done else 0)
            if not done:
                self.numbers[key] = number // 2 if number % 2 == 0 else 3 * number + 1
                request.set_release_flags(AGAIN)
