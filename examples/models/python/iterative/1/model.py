"""Halves even numbers and triples odd ones and adds one, until 1 is reached; every step is a response.

A request takes one step per execution and is then put back (rescheduled): requests that come meanwhile join
the next execution instead of waiting for those before them to end, as with models that generate text.
"""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
AGAIN = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
FIRST = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
LARGEST_ODD = (2**63 - 2) // 3
MOST = 10_000


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.numbers: dict[int, int] = {}  # where each request stands, by its correlation id

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            key = request.correlation_id()
            number = self.numbers.pop(key, None)
            if number is None or request.flags() & FIRST:
                number = int(pb_utils.get_input_tensor_by_name(request, "START").as_numpy().ravel()[0])
            sender = request.get_response_sender()
            if request.is_cancelled():
                sender.send(flags=FINAL)
                continue
            if number % 2 and number > LARGEST_ODD:
                refusal = pb_utils.TritonError(
                    f"START leads to {number}, whose next is too large", pb_utils.TritonError.INVALID_ARG
                )
                sender.send(pb_utils.InferenceResponse(error=refusal), flags=FINAL)
                continue
            done = number <= 1
            response = pb_utils.InferenceResponse([pb_utils.Tensor("NUMBER", np.array([[number]], np.int64))])
            sender.send(response, flags=FINAL if done else 0)
            if not done:
                self.numbers[key] = number // 2 if number % 2 == 0 else 3 * number + 1
                request.set_release_flags(AGAIN)
        # Requests that are cancelled while they wait are not run again: those that have not been for longest.
        while len(self.numbers) > MOST:
            del self.numbers[next(iter(self.numbers))]
