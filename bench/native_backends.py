"""Compares a compiled identity backend with a Python identity model, both in workers.

``python -m bench.native_backends [seconds]`` prints requests per second and, from the kernel, processor time
of the worker and of the server for each request.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.support.native_backends import NativeBackends
from tests.support.native_builds import BACKENDS, build_backend
from tests.support.servers import ServerProcess

from conch_tools.connection import parse_url
from conch_tools.perf.measure.results import Load, PerfResult
from conch_tools.perf.measuring import run_perf
from conch_tools.perf.perf_settings import PerfSettings

CONFIG = """
backend: "{backend}"
max_batch_size: {most}
input {{ name: "IN" data_type: TYPE_FP32 dims: -1 }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: -1 }}
instance_group {{ kind: KIND_CPU count: {instances} }}
"""
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
SPIN_NS = 5_000_000
SCENES = (
    ("16 floats, 1 client", ("python", "native"), 16, 1),
    ("16 floats, 32 clients, batches", ("python_batch", "native_batch"), 16, 32),
    ("600 kB, 4 clients", ("python", "native"), 150_000, 4),
    ("5 ms of work, 4 instances, 8 clients", ("spin",), 16, 8),
)


def write_models(root: Path) -> None:
    """Writes the models of all scenes."""
    for name, backend, most, instances in (
        ("python", "python", 1, 1),
        ("native", "copy", 1, 1),
        ("python_batch", "python", 8, 1),
        ("native_batch", "copy", 8, 1),
        ("spin", "spin", 1, 4),
    ):
        version = root / name / "1"
        version.mkdir(parents=True)
        if backend == "python":
            (version / "model.py").write_text(MODEL)
        text = CONFIG.format(backend=backend, most=most, instances=instances)
        if most > 1:
            text += "dynamic_batching { }\n"
        (root / name / "config.pbtxt").write_text(text)


def processor_s(pid: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def worker_of(model: str) -> int:
    """The worker of a model."""
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            title = (each / "cmdline").read_bytes().rstrip(b"\0").decode()
            if title.removesuffix("_0") in (f"conch worker {model}", f"conch worker {model}_0"):
                return int(each.name)
    raise LookupError(model)


def measure(server: ServerProcess, model: str, floats: int, clients: int, seconds: int) -> tuple[float, ...]:
    """Requests per second, and microseconds of the worker and of the server for each."""
    settings = PerfSettings(
        parse_url(f"grpc://{server.address}"),
        model,
        loads=(Load("concurrency", clients),),
        seconds=seconds,
        warm_up=1,
        shapes={"IN": [floats]},
    )
    worker = worker_of(model)
    before = processor_s(worker), processor_s(server.process.pid)
    result: PerfResult = run_perf(settings)
    after = processor_s(worker), processor_s(server.process.pid)
    (point,) = result.points
    # The warm-up counts in both: requests are taken at the rate that was measured.
    rate = point.answered / point.length_s
    requests = rate * (seconds + 1)
    return rate, *((a - b) / requests * 1e6 for a, b in zip(after, before, strict=True))


def main() -> None:
    """Prints a table."""
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        built = NativeBackends(Path(folder))
        spin = built.directory / "spin"
        build_backend(BACKENDS / "copy.c", spin, f"-DSPIN_NS={SPIN_NS}", name="spin")
        write_models(Path(folder) / "models")
        with built.serving(Path(folder) / "models", "copy") as server:
            print("| scene | model | requests/s | worker µs | server µs |\n|---|---|---|---|---|")
            for scene, models, floats, clients in SCENES:
                for model in models:
                    rate, worker, own = measure(server, model, floats, clients, seconds)
                    print(f"| {scene} | {model} | {rate:.0f} | {worker:.1f} | {own:.1f} |", flush=True)


if __name__ == "__main__":
    main()
