"""Residency on demand: start, hits and cold starts of thousands of models: `python -m bench.residency`.

- *start*: time and CPU time until a server with 10,000 model directories is ready, beside one with a single
  directory, and the memory that each of the others takes.
- *hits*: requests by Zipf's law with exponent 1.1 to 10,000 models, of which 50 fit; how many find their
  model in memory.
- *cold starts*: time of the first request for a model, by backend, one after the other.
- *resident*: latency of a model in memory in mode `none`, in mode `on-demand`, and while models are loaded
  and evicted beside it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from urllib.request import urlopen

import numpy as np
import psutil

from bench import facts
from bench.make_models import ONNX_REPOSITORY
from bench.perf import Window, measure_window
from bench.protocol import Probe
from bench.servers import ROOT, BenchServer, conch_command

MODELS, RESIDENT, EXPONENT = 10_000, 50, 1.1
ON_DEMAND = ("--model-control-mode=on-demand",)
FEW = (*ON_DEMAND, f"--resident-models={RESIDENT}", "--min-resident-secs=0")
INPUT = np.ones((1, 16), np.float32)
HOT = "hot"
PYTHON = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", each)]) for each in values]
"""
CONFIG = """
backend: "python"
max_batch_size: 8
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }} ]
parameters {{ key: "CONCH_PLACEMENT" value {{ string_value: "{placement}" }} }}
"""


def write_onnx_models(repository: Path, names: Sequence[str]) -> Path:
    """Writes models that share one file."""
    first = repository / names[0] / "1" / "model.onnx"
    first.parent.mkdir(parents=True)
    first.write_bytes((ONNX_REPOSITORY / "identity_onnx" / "1" / "model.onnx").read_bytes())
    for name in names[1:]:
        directory = repository / name / "1"
        directory.mkdir(parents=True)
        os.link(first, directory / "model.onnx")
    return repository


def write_python_models(repository: Path, names: Sequence[str], placement: str) -> Path:
    """Writes models that echo."""
    for name in names:
        directory = repository / name / "1"
        directory.mkdir(parents=True)
        (directory / "model.py").write_text(PYTHON)
        (directory.parent / "config.pbtxt").write_text(CONFIG.format(placement=placement))
    return repository


def numbered(count: int) -> list[str]:
    """Names of models."""
    return [f"m{number:05}" for number in range(count)]


@contextmanager
def serving(name: str, repository: Path, flags: Sequence[str]) -> Iterator[BenchServer]:
    """A server with a repository."""
    server = BenchServer(f"residency-{name}", partial(conch_command, repositories=(repository,), flags=flags))
    server.start()
    try:
        yield server
    finally:
        server.stop()


def resident_bytes(server: BenchServer) -> int:
    """Memory of a server's main process."""
    return int(psutil.Process(server.pid).memory_info().rss)


def cpu_seconds(server: BenchServer) -> float:
    """Processor time that a server's main process has used."""
    times = psutil.Process(server.pid).cpu_times()
    return float(times.user + times.system)


def measure_start(folder: Path, rounds: int) -> list[str]:
    """The start with one model and with all."""
    counts = (1, MODELS)
    repositories = {count: write_onnx_models(folder / f"start-{count}", numbered(count)) for count in counts}
    taken: dict[int, list[float]] = {count: [] for count in counts}
    used: dict[int, list[float]] = {count: [] for count in counts}
    memory: dict[int, list[int]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            begin = time.monotonic()
            with serving("start", repositories[count], ON_DEMAND) as server:
                taken[count].append(time.monotonic() - begin)
                used[count].append(cpu_seconds(server))
                memory[count].append(resident_bytes(server))
    lines = ["| models | s to ready [min - max] | CPU s [min - max] | RSS MB |", "|---|---|---|---|"]
    for count in counts:
        seconds, cpu = taken[count], used[count]
        lines.append(
            f"| {count:,} | {median(seconds):.2f} [{min(seconds):.2f} - {max(seconds):.2f}] "
            f"| {median(cpu):.2f} [{min(cpu):.2f} - {max(cpu):.2f}] "
            f"| {median(memory[count]) / 1e6:.1f} |"
        )
    delay = median(taken[MODELS]) - median(taken[1])
    each = (median(memory[MODELS]) - median(memory[1])) / MODELS
    work = median(used[MODELS]) - median(used[1])
    return [
        *lines,
        "",
        f"{MODELS:,} models delay the start by {delay:.2f} s, cost {work:.2f} s of CPU time, and take "
        f"{each:.0f} bytes each.",
    ]


def popular(count: int, seed: int) -> list[str]:
    """Requests for models by their popularity."""
    sums = list(itertools.accumulate(rank**-EXPONENT for rank in range(1, MODELS + 1)))
    chance = random.Random(seed)
    names = numbered(MODELS)
    return [names[bisect(sums, chance.random() * sums[-1])] for _ in range(count)]


def measure_hits(folder: Path, requests: int) -> list[str]:
    """The share of requests that find their model in memory."""
    repository = write_onnx_models(folder / "hits", numbered(MODELS))
    with (
        serving("hits", repository, (*FEW, "--allow-metrics=true")) as server,
        Probe(server.address) as probe,
    ):
        begin = time.monotonic()
        for name in popular(requests, 1):
            probe.infer(name, INPUT)
        seconds = time.monotonic() - begin
        loads = cold_starts(server)
    return [
        f"{requests:,} requests, {requests / seconds:,.0f} per second: {1 - loads / requests:.1%} found "
        f"their model in memory. In the simulation 54 % do."
    ]


def cold_starts(server: BenchServer) -> int:
    """Requests that have waited for a load."""
    with urlopen(f"http://{server.metrics}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    start = 'conch_cold_starts_total{result="loaded"} '
    return round(float(next(line for line in lines if line.startswith(start)).removeprefix(start)))


def measure_cold(folder: Path, models: int) -> list[str]:
    """Times of first requests, by backend."""
    names = numbered(models)
    repositories = {
        "onnxruntime": write_onnx_models(folder / "cold-onnx", names),
        "python, in process": write_python_models(folder / "cold-python", names, "in_process"),
        "python, worker": write_python_models(folder / "cold-worker", names, "worker"),
    }
    lines = ["| backend | p50 ms | p99 ms | first ms |", "|---|---|---|---|"]
    for backend, repository in repositories.items():
        taken = []
        with serving("cold", repository, ON_DEMAND) as server, Probe(server.address) as probe:
            for name in names:
                begin = time.perf_counter()
                probe.infer(name, INPUT)
                taken.append((time.perf_counter() - begin) * 1e3)
        first, *others = taken
        p50, p99 = np.percentile(others, (50, 99))
        lines.append(f"| {backend} | {p50:.1f} | {p99:.1f} | {first:.0f} |")
    return [*lines, "", f"{models} models each, one after the other; the first one brings the engine."]


@contextmanager
def cold_requests(server: BenchServer, names: Sequence[str], per_second: float) -> Iterator[None]:
    """Asks for one model after the other while the block runs; none of them is in memory."""
    stop = threading.Event()

    def ask() -> None:
        begin = time.monotonic()
        with Probe(server.address) as probe:
            for number, name in enumerate(itertools.cycle(names), 1):
                probe.infer(name, INPUT)
                if stop.wait(max(begin + number / per_second - time.monotonic(), 0.0)):
                    return

    thread = threading.Thread(target=ask, name="cold")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure_resident(folder: Path, rounds: int, seconds: float, clients: int, per_second: float) -> list[str]:
    """Latency of a model in memory: with all in memory, on demand, and beside cold starts."""
    names = numbered(2 * RESIDENT)
    repository = write_onnx_models(folder / "resident", [HOT, *names])
    windows: dict[str, list[Window]] = {"none": [], "on-demand": [], "beside cold starts": []}
    window = partial(
        measure_window, HOT, clients=clients, seconds=seconds, shapes={"INPUT0": INPUT.shape[1:]}
    )
    with (
        serving("none", repository, ()) as none,
        serving("demand", repository, FEW) as demand,
        Probe(demand.address) as probe,
    ):
        for server in (none, demand):
            window(server=server)  # warms up
        for _ in range(rounds):
            windows["none"].append(window(server=none))
            windows["on-demand"].append(window(server=demand))
            for name in names[-RESIDENT:]:  # so that none of the first are in memory
                probe.infer(name, INPUT)
            with cold_requests(demand, names, per_second):
                windows["beside cold starts"].append(window(server=demand))
    lines = [
        "| mode | req/s | p50 µs | p99 µs [min - max] | p99 ratio to on-demand [min - max] |",
        "|---|---|---|---|---|",
    ]
    for mode, found in windows.items():
        p99 = [each.p99 for each in found]
        ratios = [each.p99 / quiet.p99 for each, quiet in zip(found, windows["on-demand"], strict=True)]
        lines.append(
            f"| {mode} | {median(each.throughput for each in found):,.0f} "
            f"| {median(each.p50 for each in found):,.0f} "
            f"| {median(p99):,.0f} [{min(p99):,.0f} - {max(p99):,.0f}] "
            f"| {median(ratios):.2f} [{min(ratios):.2f} - {max(ratios):.2f}] |"
        )
    return [
        *lines,
        "",
        f"{clients} client(s), {rounds} rounds of windows of {seconds:g} s, in turn; beside them one request "
        f"at a time for models that are not in memory, at most {per_second:g} per second, each with an "
        f"eviction.",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measures, and writes the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.residency", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of starts and of windows (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a window (%(default)s)")
    parser.add_argument("--clients", type=int, default=4, help="of the model in memory (%(default)s)")
    parser.add_argument("--cold-rate", type=float, default=10.0, help="cold starts per second (%(default)s)")
    parser.add_argument("--requests", type=int, default=5000, help="of the hits (%(default)s)")
    parser.add_argument("--cold-models", type=int, default=100, help="for each backend (%(default)s)")
    parser.add_argument("--out", type=Path, help="file for the tables")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    known = {**facts.machine(), **facts.versions(), "revision": facts.revision(ROOT)}
    text = "# Benchmark: residency on demand\n\n| | |\n|---|---|\n"
    text += "".join(f"| {key} | {value} |\n" for key, value in known.items())
    with tempfile.TemporaryDirectory(prefix="conch-residency-") as directory:
        folder = Path(directory)
        parts = {
            "Start": partial(measure_start, folder, options.rounds),
            "Hits": partial(measure_hits, folder, options.requests),
            "Cold starts": partial(measure_cold, folder, options.cold_models),
            "Models in memory": partial(
                measure_resident, folder, options.rounds, options.seconds, options.clients, options.cold_rate
            ),
        }
        for title, measure in parts.items():
            part = "\n".join([f"\n## {title}\n", *measure(), ""])
            print(part, flush=True)
            text += part
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
