"""Sends each element of IN back in a response of its own, after the milliseconds that DELAY has for it.

It answers from a thread: `execute` returns after WAIT milliseconds, whether or not all responses have been
sent.
"""

from __future__ import annotations

import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.lock = threading.Lock()
        self.answering: set[threading.Thread] = set()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            arrays = [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "DELAY")]
            wait = pb_utils.get_input_tensor_by_name(request, "WAIT").as_numpy()
            sender = request.get_response_sender()
            if len(arrays[0]) != len(arrays[1]):
                refusal = pb_utils.TritonError(
                    "IN and DELAY differ in length", pb_utils.TritonError.INVALID_ARG
                )
                sender.send(
                    pb_utils.InferenceResponse(error=refusal),
                    flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
                )
                continue
            thread = threading.Thread(target=self.answer, args=(sender, *arrays))
            with self.lock:
                self.answering.add(thread)
            thread.start()
            thread.join(int(wait[0]) / 1000)

    def answer(self, sender: pb_utils.ResponseSender, values: np.ndarray, delays: np.ndarray) -> None:
        pause = threading.Event()
        try:
            for index, (value, delay) in enumerate(zip(values, delays, strict=True)):
                pause.wait(int(delay) / 1000)
                if sender.is_cancelled():
                    break
                tensors = [
                    pb_utils.Tensor("OUT", np.array([value], np.int32)),
                    pb_utils.Tensor("IDX", np.array([index], np.uint32)),
                ]
                sender.send(pb_utils.InferenceResponse(tensors))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        finally:
            with self.lock:
                self.answering.discard(threading.current_thread())

    def finalize(self) -> None:
        for thread in list(self.answering):
            thread.join()
