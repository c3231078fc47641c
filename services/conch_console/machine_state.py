"""Processors, memory and GPUs of the machine and the process, as numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conch.core.clock import Clock, monotonic_ns
from conch.observability.metrics.gpu_metrics import GpuMetrics
from conch.observability.metrics.machine_metrics import CpuTimes, parse_cpu_times, parse_memory

_PROC = Path("/proc")


@dataclass(slots=True)
class _Usage:
    machine: CpuTimes | None
    process_s: float
    at_ns: int


class MachineState:
    """Reads the machine; shares of processors are those since the last reading.

    Args:
        gpus: The GPUs; None for none.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(self, gpus: GpuMetrics | None = None, clock: Clock = monotonic_ns) -> None:
        self._gpus = gpus
        self._clock = clock
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._before = self._usage()

    def read(self) -> dict[str, Any]:
        """Shares from 0 to 1, of one processor for the process and of all for the machine; sizes in bytes."""
        now, before = self._usage(), self._before
        self._before = now
        seconds = (now.at_ns - before.at_ns) / 1e9
        found: dict[str, Any] = {
            "process_cpu": round(max(now.process_s - before.process_s, 0.0) / seconds, 3) if seconds else 0.0,
            "rss": self._resident(),
        }
        if now.machine is not None and before.machine is not None:
            found["cpu"] = round(now.machine.utilization_since(before.machine), 3)
        try:
            total, used = parse_memory((_PROC / "meminfo").read_text())
            found["memory"] = [used, total]
        except (OSError, ValueError):
            pass  # hidden by a container
        if self._gpus is not None:
            found["gpus"] = self._gpus.loads()
        return found

    def _usage(self) -> _Usage:
        times = os.times()
        try:
            machine = parse_cpu_times((_PROC / "stat").read_text())
        except (OSError, ValueError):
            machine = None
        return _Usage(machine, times.user + times.system, self._clock())

    def _resident(self) -> int:
        try:
            return int((_PROC / "self" / "statm").read_text().split()[1]) * self._page
        except (OSError, ValueError, IndexError):
            return 0
