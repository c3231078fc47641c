"""Facts of a results file about the machine and the versions, without places or people."""

from __future__ import annotations

import os
import platform
import subprocess
import timeit
from importlib import metadata
from pathlib import Path

import psutil

from bench.servers import ROOT

PACKAGES = ("grpcio", "protobuf", "numpy", "onnxruntime")


def machine() -> dict[str, str]:
    """The machine: processor, memory, kernel."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return {
        "CPU": f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores usable",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "load average at the start": load,
    }


def versions() -> dict[str, str]:
    """The software on our side of the wire, and the load generator."""
    found = {"Python": f"{platform.python_version()}, {_loop_ns():.0f} ns for a step of a loop"}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return {**found, "load generator": f"conch perf at {revision(ROOT)}"}


def _loop_ns() -> float:
    """Nanoseconds of a loop's step: builds of one version differ by half, as some are not optimised."""
    steps = 100_000
    loop = f"total = 0\nfor step in range({steps}):\n    total += step & 7"
    return min(timeit.repeat(loop, number=1, repeat=20)) / steps * 1e9


def revision(checkout: Path) -> str:
    """The commit that was measured, marked where the working tree differs from it."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
