"""conch behind Ray Serve's gRPC proxy against conch's own port: ``python -m bench.ray_proxy [seconds]``.

The same Python model, in the server's process, in `conch serve` and in one replica of a local Ray, made by
`tests/setup_ray.sh`. The two take turns; each connection has one request in flight. Prints medians over the
rounds, with the smallest and largest.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import grpc
from tests.support.ray_cluster import local_ray
from tests.support.servers import serving_process

from bench.facts import machine
from conch.protocol import inference_pb2 as pb

METHOD = "/inference.GRPCInferenceService/ModelInfer"
CONNECTIONS = (1, 8)
ROUNDS = 5
WARM_UP = 50
MODEL = """
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
CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 16 ] }
dynamic_batching { }
"""


Metadata = tuple[tuple[str, str], ...]


class Window(NamedTuple):
    """Requests per second, and their median time in milliseconds."""

    per_s: float
    p50_ms: float


def window(
    target: str, message: bytes, metadata: tuple[tuple[str, str], ...], count: int, seconds: float
) -> Window:
    """Keeps one request in flight on each of some connections."""
    times: list[float] = []
    begin = threading.Barrier(count)

    def ask() -> None:
        own = []
        with grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            infer = channel.unary_unary(METHOD)
            for _ in range(WARM_UP):
                infer(message, metadata=metadata, timeout=30)
            begin.wait()
            end = time.perf_counter() + seconds
            while (sent := time.perf_counter()) < end:
                infer(message, metadata=metadata, timeout=30)
                own.append(time.perf_counter() - sent)
        times.extend(own)

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Window(len(times) / seconds, median(times) * 1e3)


def main(seconds: float) -> None:
    """Measures and prints a table."""
    message = pb.ModelInferRequest(model_name="identity")
    message.inputs.add(name="IN", datatype="FP32", shape=[1, 16]).contents.fp32_contents.extend(range(16))
    encoded = message.SerializeToString()
    with tempfile.TemporaryDirectory() as directory:
        repository = Path(directory)
        (repository / "identity" / "1").mkdir(parents=True)
        (repository / "identity" / "1" / "model.py").write_text(MODEL)
        (repository / "identity" / "config.pbtxt").write_text(CONFIG)
        placement = "python,placement=in_process"
        with (
            serving_process(repository, flags=[f"--backend-config={placement}"]) as server,
            local_ray() as ray,
        ):
            args = {"repositories": [directory], "backend_config": placement}
            ray.deploy("bench", {"num_replicas": 1}, args)
            print("; ".join(f"{name}: {value}" for name, value in machine().items()))
            targets = {"own port": (server.address, ()), "Ray Serve": (ray.url, (("application", "bench"),))}
            for count in CONNECTIONS:
                found: dict[str, list[Window]] = {name: [] for name in targets}
                for _ in range(ROUNDS):
                    for name, (target, metadata) in targets.items():
                        found[name].append(window(target, encoded, metadata, count, seconds))
                for name, windows in found.items():
                    rates, medians = [each.per_s for each in windows], [each.p50_ms for each in windows]
                    print(
                        f"{count} in flight, {name}: {median(rates):.0f} req/s "
                        f"[{min(rates):.0f}-{max(rates):.0f}], p50 {median(medians):.2f} ms "
                        f"[{min(medians):.2f}-{max(medians):.2f}]",
                        flush=True,
                    )


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 5.0)
