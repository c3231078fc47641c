"""Stands for an engine with continuous batching: each step adds a token to all running streams."""

import json
import queue
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """A decoupled model; the steps run on a thread of their own, as those of an engine do."""

    def initialize(self, args):
        """Starts the engine's thread."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._pace = int(parameters["PACE_MS"]["string_value"]) / 1000
        self._added = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def execute(self, requests):
        """Adds the streams, and returns."""
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "max_tokens")
            count = 128 if tensor is None else int(tensor.as_numpy().reshape(-1)[0])
            self._added.put([request.get_response_sender(), count, request])

    def finalize(self):
        """Ends the thread."""
        self._added.put(None)
        self._thread.join()

    def _run(self):
        running = []
        while True:
            if not running:
                running.append(self._added.get())
            while not self._added.empty():
                running.append(self._added.get())
            if None in running:
                return
            begin = time.perf_counter()
            for stream in running:
                sender, _, _ = stream
                word = pb_utils.Tensor("text_output", np.array([b" token"], dtype=np.object_))
                sender.send(pb_utils.InferenceResponse([word]))
                stream[1] -= 1
            for sender, left, request in running:
                if left == 0 or request.is_cancelled():
                    sender.send(flags=FINAL)
            running = [stream for stream in running if stream[1] > 0 and not stream[2].is_cancelled()]
            rest = begin + self._pace - time.perf_counter()
            if rest > 0:
                time.sleep(rest)
