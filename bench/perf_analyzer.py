"""The load of Triton's perf_analyzer, a check of `conch perf`."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import tempfile
from pathlib import Path

from bench.measurement import STABILITY_PERCENT, TRIALS, Figures, MeasurementError, UnstableError
from bench.scenes import Scene
from bench.servers import BenchServer, peers_home

TIMEOUT_S = 120.0


def version() -> str:
    """The version it prints.

    Raises:
        MeasurementError: it is not installed.
    """
    done = _run(["--version"], 10.0)
    return (done.stdout + done.stderr).strip().partition(" (")[0]


def measure(scene: Scene, model: str, server: BenchServer, requests: int) -> Figures:
    """Put the scene's load on the server.

    Raises:
        UnstableError: the windows differed too much.
        MeasurementError: perf_analyzer failed.
    """
    with tempfile.TemporaryDirectory(prefix="conch-bench-") as folder:
        report = Path(folder, "report.csv")
        done = _run(_arguments(scene, model, server, requests, report), TIMEOUT_S)
        output = done.stdout + done.stderr
        if "Failed to obtain stable measurement" in output:
            raise UnstableError
        if not report.exists():
            lines = [line.strip() for line in output.splitlines() if line.strip()]
            raise MeasurementError(
                f"perf_analyzer failed with exit status {done.returncode}: {' | '.join(lines[-3:])}"
            )
        with report.open(newline="") as rows:
            row = list(csv.DictReader(rows))[-1]
    average = re.search(r"Avg latency: (\d+) usec", output)  # the report lacks it
    return Figures(
        throughput=float(row["Inferences/Second"]),
        average=float(average[1]) if average else float("nan"),
        **{name: float(row[f"{name} latency"]) for name in ("p50", "p90", "p95", "p99")},
    )


def _run(arguments: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    home = peers_home()
    executable = home / "perf" / "bin" / "perf_analyzer"
    if not executable.exists():
        raise MeasurementError("perf_analyzer is not installed; run make bench-setup")
    try:
        return subprocess.run(
            [str(executable), *arguments],
            env={**os.environ, "LD_LIBRARY_PATH": str(home / "lib")},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,  # the caller tells unstable windows from failures
        )
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"perf_analyzer did not end within {timeout_s:.0f} s") from error


def _arguments(scene: Scene, model: str, server: BenchServer, requests: int, report: Path) -> list[str]:
    shape = ",".join(map(str, scene.shape))
    address = server.address if scene.protocol == "grpc" else server.http
    arguments = ["-m", model, "-i", scene.protocol, "-u", address, "--shape", f"INPUT0:{shape}"]
    arguments += ["--concurrency-range", f"{scene.concurrency}:{scene.concurrency}"]
    arguments += ["--measurement-mode", "count_windows", "--measurement-request-count", str(requests)]
    arguments += ["-s", str(STABILITY_PERCENT), "-r", str(TRIALS), "-f", str(report)]
    return [*arguments, "--streaming"] if scene.streaming else arguments
