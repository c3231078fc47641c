"""Requests per second of a model whose inputs are profiled: `python -m bench.profiles`.

Two models do the same, with 16 columns of numbers and 4 of texts; the inputs of *profiled* are profiled,
those of *plain* are not. They take turns under load, in an order that changes with each round; ratios are of
the same round. With `--rows` a request has several rows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from urllib.request import urlopen

from bench import facts
from bench.perf import measure_point
from bench.protocol import Probe
from bench.servers import ROOT, BenchServer, conch_command
from conch_tools.connection import parse_url
from conch_tools.perf.measure.results import Load
from conch_tools.perf.perf_settings import PerfSettings

MODELS = {"plain": "false", "profiled": "true"}
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(request, "n0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each)]) for each in values]
"""
CLIENTS = 8


def config(profile: str) -> str:
    """The config of a model."""
    numbers = [(f"n{number}", "FP32") for number in range(16)]
    columns = [*numbers, *((f"t{number}", "STRING") for number in range(4))]
    inputs = [f'input {{ name: "{name}" data_type: TYPE_{kind} dims: [ 1 ] }}' for name, kind in columns]
    return "\n".join(
        [
            'backend: "python" max_batch_size: 1024',
            *inputs,
            'output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }',
            'parameters { key: "CONCH_PLACEMENT" value { string_value: "in_process" } }',
            f'parameters {{ key: "CONCH_PROFILE" value {{ string_value: "{profile}" }} }}',
        ]
    )


@dataclass(frozen=True)
class Figures:
    """Throughput, latencies at the clients and processor time of the server, times in microseconds."""

    throughput: float
    p50: float
    p99: float
    cpu: float


def measure(model: str, server: BenchServer, rows: int, seconds: int) -> Figures:
    """A load on a model; the processor time is that of the warm-up too."""
    settings = PerfSettings(
        parse_url(f"grpc://{server.address}"),
        model,
        loads=[Load("concurrency", CLIENTS)],
        seconds=seconds,
        warm_up=1,
        batch=rows,
        text_length=8,
        reuse_data=True,
    )
    with Probe(server.address) as probe:
        requests, cpu = probe.successes(model), server.cpu_seconds()
        point = measure_point(settings)
        cpu, requests = server.cpu_seconds() - cpu, probe.successes(model) - requests
    p50, p99 = (point.service.quantile_ns(share) / 1e3 for share in (0.5, 0.99))
    return Figures(point.achieved_rate, p50, p99, cpu / requests * 1e6)


def table(windows: dict[str, list[Figures]]) -> str:
    """The figures of both models; ratios are medians, with their quartiles."""
    lines = [
        "| model | requests/s | p50 µs | p99 µs | CPU µs | beside plain | CPU |",
        "|---" + "|--:" * 6 + "|",
    ]
    for model, found in windows.items():
        pairs = list(zip(found, windows["plain"], strict=True))
        shown = [f"{median(each):,.0f}" for each in zip(*map(astuple, found), strict=True)]
        for ratios in ([a.throughput / b.throughput for a, b in pairs], [a.cpu / b.cpu for a, b in pairs]):
            low, middle, high = quantiles(ratios, n=4, method="inclusive")
            shown.append(f"{middle:.3f} ({low:.3f} - {high:.3f})")
        lines.append(f"| {model} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=int, default=4, help="length of a window")
    parser.add_argument("--rows", type=int, default=1, help="rows of a request")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        for model, profile in MODELS.items():
            (repository / model / "1").mkdir(parents=True)
            (repository / model / "1" / "model.py").write_text(MODEL)
            (repository / model / "config.pbtxt").write_text(config(profile))
        server = BenchServer("profiles", partial(conch_command, repositories=(repository,)))
        server.start()
        try:
            windows: dict[str, list[Figures]] = {model: [] for model in MODELS}
            for number in range(options.rounds + 1):
                for model in list(windows) if number % 2 else reversed(windows):
                    window = measure(model, server, options.rows, options.seconds if number else 1)
                    if number:  # the first round warms up
                        windows[model].append(window)
            with urlopen(f"http://{server.http}/v2/models/profiled/profile") as answer:
                profile = json.load(answer)
            print("\n".join(f"{name}: {value}" for name, value in facts.machine().items()))
            print(f"revision: {facts.revision(ROOT)}\n\n{table(windows)}")
            print(f"\n{profile['requests']:,} requests of {profile['rows']:,} rows were counted")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
