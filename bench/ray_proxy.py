"""conch behind Ray Serve's gRPC proxy against conch's own port: ``python -m bench.ray_proxy [seconds]``.

The same Python model, in the server's process, in `conch serve` and in one replica of a local Ray, made by
`tests/setup_ray.sh`. The two take turns; each connection has one request in flight. Prints medians over the
rounds, with the smallest and largest.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

from tests.support.ray_cluster import local_ray
from tests.support.servers import serving_process

from bench.facts import machine
from bench.perf import measure_point
from conch_tools.connection import parse_url
from conch_tools.perf.measure.results import Load
from conch_tools.perf.perf_settings import PerfSettings

CONNECTIONS = (1, 8)
ROUNDS = 5
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


def window(target: str, headers: dict[str, str], count: int, seconds: int) -> tuple[float, float]:
    """Requests/s with so many connections, and the median time in milliseconds."""
    settings = PerfSettings(
        parse_url(f"grpc://{target}", headers),
        "identity",
        loads=[Load("concurrency", count)],
        seconds=seconds,
        warm_up=1,
        connections=count,
        processes=1,
    )
    point = measure_point(settings)
    return point.achieved_rate, point.service.quantile_ns(0.5) / 1e6


def main(seconds: int) -> None:
    """Measures and prints a table."""
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
            targets: dict[str, tuple[str, dict[str, str]]] = {
                "own port": (server.address, {}),
                "Ray Serve": (ray.url, {"application": "bench"}),
            }
            for count in CONNECTIONS:
                found: dict[str, list[tuple[float, float]]] = {name: [] for name in targets}
                for _ in range(ROUNDS):
                    for name, (target, headers) in targets.items():
                        found[name].append(window(target, headers, count, seconds))
                for name, windows in found.items():
                    rates, medians = zip(*windows, strict=True)
                    print(
                        f"{count} in flight, {name}: {median(rates):.0f} req/s "
                        f"[{min(rates):.0f}-{max(rates):.0f}], p50 {median(medians):.2f} ms "
                        f"[{min(medians):.2f}-{max(medians):.2f}]",
                        flush=True,
                    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
