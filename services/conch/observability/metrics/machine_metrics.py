"""Metrics of the machine's processors and memory, from /proc."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from conch.observability.metrics.metric_families import Family, sample

UTILIZATION = Family("nv_cpu_utilization", "gauge", "CPU utilization rate [0.0 - 1.0]")
TOTAL = Family("nv_cpu_memory_total_bytes", "gauge", "CPU total memory (RAM), in bytes")
USED = Family("nv_cpu_memory_used_bytes", "gauge", "CPU used memory (RAM), in bytes")

_T = TypeVar("_T")
_IDLE = slice(3, 5)  # idle and iowait, among the times of the first line
_TIMES = slice(0, 8)  # the times of guests that follow are included in these


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Time of all processors since boot, in ticks."""

    idle: int
    total: int

    def utilization_since(self, before: CpuTimes) -> float:
        """The busy share of the time since `before`; 0 if no time has passed."""
        total = self.total - before.total
        if total <= 0:
            return 0.0
        return min(max(1 - (self.idle - before.idle) / total, 0.0), 1.0)


def parse_cpu_times(stat: str) -> CpuTimes:
    """Parses the first line of ``/proc/stat``; raises ValueError for other text."""
    name, *texts = stat.partition("\n")[0].split()
    if name != "cpu" or len(texts) < 5:
        raise ValueError("no line of times of all processors")
    times = [int(text) for text in texts[_TIMES]]
    return CpuTimes(sum(times[_IDLE]), sum(times))


def parse_memory(meminfo: str) -> tuple[int, int]:
    """Total and used memory in bytes from ``/proc/meminfo``; raises ValueError without them."""
    values = {}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            values[name] = int(rest.split()[0]) * 1024
    if len(values) != 2:
        raise ValueError("no MemTotal or MemAvailable")
    return values["MemTotal"], values["MemTotal"] - values["MemAvailable"]


class MachineMetrics:
    """Reads processors and memory; utilisation is the share since the last read."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._stat = proc / "stat"
        self._meminfo = proc / "meminfo"
        self._before = _if_readable(self._cpu_times)

    def __call__(self) -> list[tuple[Family, list[str]]]:
        """The families with their samples, without unreadable ones."""
        now, memory = _if_readable(self._cpu_times), _if_readable(self._memory)
        found: list[tuple[Family, list[str]]] = []
        if now is not None and self._before is not None:
            value = now.utilization_since(self._before)
            found.append((UTILIZATION, [sample(UTILIZATION.name, value)]))
        self._before = now
        if memory is not None:
            found += [
                (family, [sample(family.name, value)])
                for family, value in zip((TOTAL, USED), memory, strict=True)
            ]
        return found

    def _cpu_times(self) -> CpuTimes:
        return parse_cpu_times(self._stat.read_text())

    def _memory(self) -> tuple[int, int]:
        return parse_memory(self._meminfo.read_text())


def _if_readable(read: Callable[[], _T]) -> _T | None:
    try:
        return read()
    except (OSError, ValueError):
        return None  # another kernel, or hidden by a container
