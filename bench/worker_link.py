"""Times batches that go to a worker process and come back: ``python -m bench.worker_link [seconds]``.

One identity model behind a link, without a server around it: what a worker costs a request at the least.
Prints the median, the tenth and the 99th percentile in microseconds, and responses per second of a stream.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from tests.support.workers import batch_of, model_spec, request_of, worker

from conch.core.backend import BatchOutcome
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import TensorSpec

IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())]
            )
            for request in requests
        ]
"""

STREAM = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(1000):
                tensor = pb_utils.Tensor("OUT", np.array([number], np.float32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

TENSORS = {
    "inputs": (TensorSpec("IN", "FP32", (-1,)),),
    "outputs": (TensorSpec("OUT", "FP32", (-1,)),),
}


def round_trips(nbytes: int, seconds: float) -> None:
    """One batch of one request after the other, each begun where the one before was done."""
    with (
        tempfile.TemporaryDirectory() as directory,
        worker(model_spec(Path(directory), IDENTITY, **TENSORS)) as running,
    ):
        array = np.zeros(nbytes // 4, np.float32)
        times: list[int] = []
        over = threading.Event()
        end = time.monotonic() + seconds
        start = 0

        def begin() -> None:
            nonlocal start
            request, _ = request_of(IN=array)
            start = time.perf_counter_ns()
            running.link.start(batch_of(request), done)

        def done(batch: Batch, outcome: BatchOutcome) -> None:
            times.append(time.perf_counter_ns() - start)
            if time.monotonic() < end:
                begin()
            else:
                over.set()

        begin()
        over.wait()
    times = sorted(times[len(times) // 10 :])
    shown = [times[int(len(times) * share)] / 1000 for share in (0.5, 0.1, 0.99)]
    print(
        f"round trip of {nbytes:>8} bytes: p50 {shown[0]:7.1f}  p10 {shown[1]:7.1f}  p99 {shown[2]:7.1f} us"
    )


def streams(seconds: float) -> None:
    """A thousand small responses to each request."""
    with tempfile.TemporaryDirectory() as directory:
        spec = model_spec(Path(directory), STREAM, decoupled=True, **TENSORS)
        with worker(spec) as running:
            count, start = 0, time.monotonic()
            while time.monotonic() - start < seconds:
                request, answers = request_of(IN=np.zeros(1, np.float32))
                begun = running.start(batch_of(request))
                answers.wait(1)
                begun.result()
                count += 1000
            print(f"a stream: {count / (time.monotonic() - start):.0f} responses/s")


def main() -> None:
    """Times everything once."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0
    for nbytes in (64, 16 * 1024, 64 * 1024, 4 * 1024 * 1024):
        round_trips(nbytes, seconds)
    streams(seconds)


if __name__ == "__main__":
    main()
