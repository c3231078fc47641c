"""Cost of requests with front processes: `python -m bench.fronts`, see docs/internals/cores.md.

CPU time by process, requests per second and the median of each load, with none, one and two fronts. A round
has a server for each number of fronts. The load generator is h2load with one thread, or else `conch perf`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import psutil

from bench import facts
from bench.perf import measure_window
from bench.protocol import SERVICE, Probe
from bench.servers import COMMON, FRONT, BenchServer, baseline_command, conch_command
from conch.protocol import inference_pb2 as messages

FRONTS = (0, 1, 2)
MODELS = {"process": "identity_fp32", "worker": "identity_worker"}
HEADER = (
    "| load | model in | fronts | core µs | fronts µs | workers µs | generator µs "
    "| requests/s | limit/s | p50 µs |\n"
    "|---|---|" + "---:|" * 8
)


class Load(NamedTuple):
    """A load: `requests` are those of a run; the warm-up has a quarter. `http`: the form of HTTP bodies."""

    name: str
    elements: int
    connections: int
    in_flight: int
    requests: int
    http: str = ""


LOADS = {
    "small": Load("FP32 of 16, 128 in flight", 16, 8, 16, 60_000),
    "4k": Load("FP32 of 1,000 (4 KB), 32 in flight", 1000, 4, 8, 20_000),
    "20k": Load("FP32 of 5,000 (20 KB), 4 in flight", 5000, 4, 1, 10_000),
    "64k": Load("FP32 of 16,000 (64 KB), 4 in flight", 16_000, 4, 1, 6000),
    "600k": Load("FP32 of 150,000 (600 KB), 4 in flight", 150_000, 4, 1, 2000),
    "one": Load("FP32 of 16, one client", 16, 1, 1, 6000),
    "json": Load("HTTP, FP32 of 16 as JSON, 32 in flight", 16, 32, 1, 20_000, "json"),
    "json-1": Load("HTTP, FP32 of 16 as JSON, one client", 16, 1, 1, 4000, "json"),
    "json-5k": Load("HTTP, FP32 of 5,000 as JSON, 4 in flight", 5000, 4, 1, 1500, "json"),
    "gzip-5k": Load("HTTP, FP32 of 5,000 as JSON, gzip, 4 in flight", 5000, 4, 1, 1500, "gzip"),
    "binary-4k": Load("HTTP, FP32 of 1,000 (4 KB), binary, 32 in flight", 1000, 32, 1, 10_000, "binary"),
    "binary-600k": Load("HTTP, FP32 of 150,000 (600 KB), binary, 4 in flight", 150_000, 4, 1, 2000, "binary"),
}
USUAL = ("small", "600k", "one")


class Costs(NamedTuple):
    """CPU in microseconds a request, and what clients saw."""

    core: float
    fronts: float
    workers: float
    generator: float
    rate: float
    p50_us: float

    def limit(self, fronts: int, cores: int) -> float:
        """Requests a second if the generator took nothing of the cores."""
        bounds = [self.core, (self.core + self.fronts + self.workers) / cores, self.workers]
        if fronts:
            bounds.append(self.fronts / fronts)
        return 1e6 / max(bounds)


def _cpu_s(server: BenchServer) -> tuple[float, float, float]:
    """Processor time of the core, of its fronts, and of workers with their templates."""
    core = psutil.Process(server.pid)
    costs = [0.0, 0.0, 0.0]
    for process in (core, *core.children(recursive=True)):
        kind = 0 if process == core else 1 if FRONT in process.cmdline() else 2
        costs[kind] += sum(process.cpu_times()[:2])
    return costs[0], costs[1], costs[2]


def _generator_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _request(load: Load, model: str) -> bytes:
    values = np.arange(load.elements, dtype=np.float32)
    request = messages.ModelInferRequest(model_name=model, raw_input_contents=[values.tobytes()])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, load.elements])
    message = request.SerializeToString()
    return struct.pack(">BI", 0, len(message)) + message


def _http_request(load: Load) -> tuple[list[str], bytes]:
    """Headers and body."""
    values = np.linspace(0, 1, load.elements, dtype=np.float32)
    tensor: dict[str, object] = {"name": "INPUT0", "datatype": "FP32", "shape": [1, load.elements]}
    if load.http == "binary":
        tensor["parameters"] = {"binary_data_size": values.nbytes}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        return [f"inference-header-content-length: {len(head)}"], head + values.tobytes()
    body = json.dumps({"inputs": [{**tensor, "data": values.tolist()}]}).encode()
    if load.http == "gzip":
        return ["content-encoding: gzip", "accept-encoding: gzip"], gzip.compress(body)
    return [], body


def _h2load(server: BenchServer, load: Load, model: str, requests: int) -> tuple[float, float]:
    """Requests a second and the median in microseconds."""
    if load.http:
        headers, body = _http_request(load)
        url, protocol = f"http://{server.http}/v2/models/{model}/infer", ["--h1"]
    else:
        headers, body = ["content-type: application/grpc", "te: trailers"], _request(load, model)
        url, protocol = f"http://{server.address}{SERVICE}ModelInfer", ["-w30", "-W30"]
    with (
        tempfile.NamedTemporaryFile(prefix="conch-h2load-") as times,
        tempfile.NamedTemporaryFile(prefix="conch-body-") as file,
    ):
        file.write(body)
        file.flush()
        command = ["h2load", f"-n{requests}", f"-c{load.connections}", f"-m{load.in_flight}", "-t1"]
        command += [
            *protocol,
            f"-d{file.name}",
            f"--log-file={times.name}",
            *[f"-H{each}" for each in headers],
        ]
        command.append(url)
        started = time.monotonic()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        took_s = time.monotonic() - started
        if f"{requests} succeeded" not in done.stdout:
            raise SystemExit(f"bench.fronts: requests failed:\n{done.stdout}")
        lines = Path(times.name).read_text().splitlines()
    return requests / took_s, median(int(line.split("\t")[2]) for line in lines)


def _perf(server: BenchServer, load: Load, model: str, requests: int) -> tuple[float, float]:
    shapes = {"INPUT0": (1, load.elements)}
    window = measure_window(model, server, load.connections * load.in_flight, requests / 10_000, shapes)
    return window.throughput, window.p50


def measure(server: BenchServer, load: Load, model: str) -> Costs:
    """Runs a load after its warm-up."""
    has_h2load = shutil.which("h2load") is not None
    if load.http and not has_h2load:
        raise SystemExit("bench.fronts: loads over HTTP need h2load")

    def run(requests: int) -> tuple[float, float]:
        if has_h2load:
            return _h2load(server, load, model, requests)
        return _perf(server, load, model, requests)

    run(load.requests // 4)
    with Probe(server.address) as probe:
        before, generator, counted = _cpu_s(server), _generator_s(), probe.successes(model)
        rate, p50_us = run(load.requests)
        spent = [after - then for after, then in zip(_cpu_s(server), before, strict=True)]
        generator = _generator_s() - generator
        requests = probe.successes(model) - counted
    if has_h2load and requests != load.requests:  # it looks at the HTTP status only
        raise SystemExit(f"bench.fronts: {load.requests - requests} of {load.requests} requests failed")
    core, fronts, workers, generator = [1e6 * each / requests for each in (*spent, generator)]
    return Costs(core, fronts, workers, generator, rate, p50_us)


def _round(
    fronts: int, loads: Sequence[str], models: Sequence[str], baseline: Path | None
) -> dict[str, Costs]:
    flags = [f"--front-ends={fronts}", "--model-control-mode=explicit"]
    flags += [f"--load-model={MODELS[each]}" for each in models]

    command = partial(conch_command, repositories=COMMON, flags=flags)
    server = BenchServer("fronts", command if baseline is None else baseline_command(baseline, COMMON, flags))
    found = {}
    server.start()
    try:
        for name in loads:
            for model in models:
                found[f"{name} {model}"] = measure(server, LOADS[name], MODELS[model])
    finally:
        server.stop()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.fronts", description=__doc__.split("\n")[0])
    parser.add_argument("--loads", default=",".join(USUAL), help=f"of {', '.join(LOADS)} (%(default)s)")
    parser.add_argument("--models", default=",".join(MODELS), help="where the model runs (%(default)s)")
    parser.add_argument(
        "--fronts", default=",".join(map(str, FRONTS)), help="numbers of fronts (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds; medians are shown (%(default)s)")
    parser.add_argument("--baseline", type=Path, help="measures another checkout instead")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped
    loads, models = chosen.loads.split(","), chosen.models.split(",")
    fronts = [int(each) for each in chosen.fronts.split(",")]
    cores = len(os.sched_getaffinity(0))
    print("; ".join(f"{name} {value}" for name, value in facts.machine().items()), end="\n\n")
    print(HEADER)
    rounds: list[dict[int, dict[str, Costs]]] = []
    for _ in range(chosen.repeats):
        rounds.append({count: _round(count, loads, models, chosen.baseline) for count in fronts})
    for name in loads:
        for model in models:
            for count in fronts:
                seen = [each[count][f"{name} {model}"] for each in rounds]
                costs = Costs(*(median(column) for column in zip(*seen, strict=True)))
                figures = (
                    f"{costs.core:.1f} | {costs.fronts:.1f} | {costs.workers:.1f} | {costs.generator:.1f}"
                )
                speed = f"{costs.rate:,.0f} | {costs.limit(count, cores):,.0f} | {costs.p50_us:,.0f}"
                print(f"| {LOADS[name].name} | {model} | {count} | {figures} | {speed} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
