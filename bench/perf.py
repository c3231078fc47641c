"""One measurement: perf_analyzer's load on one server, and the server's CPU time for it."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from bench.protocol import Probe
from bench.scenes import Scene
from bench.servers import Server, peers_home

WINDOWS = 3  # perf_analyzer's own number: the last three have to agree
TRIALS = 8  # windows until it gives up on that
STABILITY_PERCENT = 50
TIMEOUT = 120.0


class MeasurementError(RuntimeError):
    """No figure came out of a measurement; the text says why."""


class UnstableError(MeasurementError):
    """The windows did not agree, so perf_analyzer reports nothing; the server is well."""


@dataclass(frozen=True)
class Measurement:
    """What one run of perf_analyzer saw, latencies in microseconds."""

    throughput: float
    average: float
    p50: float
    p90: float
    p95: float
    p99: float
    requests: int
    cpu_per_request: float


def perf_analyzer(arguments: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run the load generator that setup_peers.sh installed.

    Raises:
        MeasurementError: it is not installed or did not end in time.
    """
    home = peers_home()
    executable = home / "perf" / "bin" / "perf_analyzer"
    if not executable.exists():
        raise MeasurementError("perf_analyzer is not installed; run make bench-setup")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(home / "lib")}
    try:
        return subprocess.run(
            [str(executable), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,  # the caller tells unstable windows from failures
        )
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"perf_analyzer did not end within {timeout:.0f} s") from error


def perf_analyzer_version() -> str:
    """The version it prints."""
    done = perf_analyzer(["--version"], 10.0)
    return (done.stdout + done.stderr).strip().partition(" (")[0]


def measure(scene: Scene, model: str, server: Server, requests: int) -> Measurement:
    """Put the scene's load on the server.

    The CPU time is that of the whole run, and so is the number of requests that it is divided by: both
    include perf_analyzer's start before its first window.

    Raises:
        UnstableError: the windows differed too much.
        MeasurementError: the server went away, or perf_analyzer failed.
        ServerError: the scene needs HTTP, and the server does not speak it.
    """
    if scene.protocol == "http":
        server.wait_for_http()
    with Probe(server.address) as probe, tempfile.TemporaryDirectory(prefix="conch-bench-") as folder:
        report = Path(folder, "report.csv")
        try:
            requests_before = probe.successes(model)
            cpu_before = server.cpu_seconds()
            done = perf_analyzer(_arguments(scene, model, server, requests, report), TIMEOUT)
            cpu = server.cpu_seconds() - cpu_before
            completed = probe.successes(model) - requests_before
        except grpc.RpcError as error:
            raise MeasurementError(f"no statistics from {server.name}: {error}") from error
        if "Failed to obtain stable measurement" in done.stdout + done.stderr:
            raise UnstableError(f"no {WINDOWS} of {TRIALS} windows within {STABILITY_PERCENT} %")
        if not report.exists() or not completed:
            raise MeasurementError(f"perf_analyzer failed: {_last_words(done)}")
        return _parse(report, done.stdout + done.stderr, completed, cpu)


@dataclass(frozen=True)
class Window:
    """What perf_analyzer saw in a span of time, whatever happened in it; latencies in microseconds."""

    throughput: float
    p50: float
    p99: float


def measure_window(model: str, server: Server, clients: int, seconds: float) -> Window:
    """Keeps a model busy for some seconds, and measures all of it.

    Raises:
        MeasurementError: a request failed, which ends perf_analyzer, or the server went away.
    """
    with tempfile.TemporaryDirectory(prefix="conch-bench-") as folder:
        report = Path(folder, "report.csv")
        # With a version named, it needs none whose statistics have grown: a reload begins them anew.
        arguments = ["-m", model, "-x", "1", "-i", "grpc", "-u", server.address]
        arguments += ["--concurrency-range", f"{clients}:{clients}", "-f", str(report)]
        # As many windows as have to agree, and all of them do: the figures are those of the whole span.
        arguments += ["--measurement-mode", "time_windows", "-s", "999", "-r", str(WINDOWS)]
        arguments += ["--measurement-interval", str(round(seconds * 1000 / WINDOWS))]
        done = perf_analyzer(arguments, TIMEOUT + seconds)
        if not report.exists():
            raise MeasurementError(f"perf_analyzer failed: {_last_words(done)}")
        with report.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        if not rows:
            raise MeasurementError("perf_analyzer wrote an empty report")
        row = rows[-1]
        return Window(float(row["Inferences/Second"]), float(row["p50 latency"]), float(row["p99 latency"]))


def _arguments(scene: Scene, model: str, server: Server, requests: int, report: Path) -> list[str]:
    shape = ",".join(map(str, scene.shape))
    address = server.address if scene.protocol == "grpc" else server.http
    arguments = ["-m", model, "-i", scene.protocol, "-u", address, "--shape", f"INPUT0:{shape}"]
    if scene.tensors == "json":
        arguments += ["--input-tensor-format", "json", "--output-tensor-format", "json"]
        # By default it sends random bits, some of them NaN, which are no JSON and no client's usual tensor.
        arguments += ["--input-data", str(_write_numbers(report.with_suffix(".json"), scene.shape))]
    if scene.shared_memory != "none":
        # Outputs of variable shape get regions of this size; the models answer with what they were sent.
        size = math.prod(scene.shape) * 4
        arguments += ["--shared-memory", scene.shared_memory, "--output-shared-memory-size", str(size)]
    arguments += ["--concurrency-range", f"{scene.concurrency}:{scene.concurrency}"]
    arguments += ["--measurement-mode", "count_windows", "--measurement-request-count", str(requests)]
    arguments += ["-s", str(STABILITY_PERCENT), "-r", str(TRIALS), "-f", str(report)]
    return [*arguments, "--streaming"] if scene.streaming else arguments


def _write_numbers(path: Path, shape: Sequence[int]) -> Path:
    """Writes a tensor of numbers between -1 and 1, as clients have them, for perf_analyzer to send."""
    chance = random.Random(1)
    numbers = [chance.uniform(-1, 1) for _ in range(math.prod(shape))]
    path.write_text(json.dumps({"data": [{"INPUT0": {"content": numbers, "shape": list(shape)}}]}))
    return path


def _parse(report: Path, output: str, completed: int, cpu: float) -> Measurement:
    with report.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    if not rows:
        raise MeasurementError("perf_analyzer wrote an empty report")
    row = rows[-1]
    average = re.search(r"Avg latency: (\d+) usec", output)  # the report lacks it
    return Measurement(
        throughput=float(row["Inferences/Second"]),
        average=float(average[1]) if average else float("nan"),
        p50=float(row["p50 latency"]),
        p90=float(row["p90 latency"]),
        p95=float(row["p95 latency"]),
        p99=float(row["p99 latency"]),
        requests=completed,
        cpu_per_request=cpu / completed * 1e6,
    )


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return f"exit status {done.returncode}: {' | '.join(lines[-3:])}"
