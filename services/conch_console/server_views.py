"""The server and its machine as JSON for the console's pages: state, addresses, devices, settings, loads.

Threads and locks: `ServerViews` any thread, without a state of its own; `MachineState` event loop only.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conch.core.clock import Clock, monotonic_ns
from conch.core.server_stage import Stage
from conch.core.server_state import ServerState
from conch.observability.logging.log_settings import LogControl
from conch.observability.metrics.gpu_metrics import GpuMetrics
from conch.observability.metrics.machine_metrics import CpuTimes, parse_cpu_times, parse_memory
from conch.observability.metrics.server_metrics import FrontProcess
from conch.observability.tracing.trace_settings import TraceSettings
from conch.process.endpoint import Endpoint
from conch_console.console_options import ShownFlag

_PROC = Path("/proc")


class ServerViews:
    """Reads the server's state.

    Args:
        core: The server core.
        logs: Log settings.
        traces: Trace settings.
        endpoints: Gives the open ports.
        fronts: Gives the front processes.
        flags: The server's settings.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(
        self,
        core: ServerState,
        logs: LogControl,
        traces: TraceSettings,
        endpoints: Callable[[], Sequence[Endpoint]],
        fronts: Callable[[], Sequence[FrontProcess]],
        flags: Sequence[ShownFlag] = (),
        clock: Clock = monotonic_ns,
    ) -> None:
        self._core = core
        self._logs = logs
        self._traces = traces
        self._endpoints = endpoints
        self._fronts = fronts
        self._flags = flags
        self._clock = clock
        self._began_ns = clock()

    def state(self) -> dict[str, Any]:
        """Stage, readiness and uptime in seconds; cheap."""
        stage = self._core.stages.stage
        return {
            "stage": stage.name,
            "ready": stage is Stage.SERVING and self._core.loaded,
            "uptime": (self._clock() - self._began_ns) // 10**9,
        }

    def about(self) -> dict[str, Any]:
        """Facts that do not change while the server runs: versions, machine, process, endpoints."""
        return {
            "id": self._core.server_id,
            "version": self._core.version,
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
            "pid": os.getpid(),
            "host": platform.node(),
            "endpoints": [
                {"service": each.service, "url": each.url, "address": each.address, "security": each.security}
                for each in self._endpoints()
            ],
        }

    def fronts(self) -> dict[str, Any]:
        """The front processes; `cpu_s` is since the start, over restarts."""
        return {"fronts": [each._asdict() for each in self._fronts()]}

    def settings(self) -> dict[str, Any]:
        """Settings of log and traces, and the flags with where they come from."""
        return {
            "log": self._logs.settings(),
            "log_fixed": self._logs.fixed,
            "trace": {name: list(values) for name, values in self._traces.settings().items()},
            "flags": [each._asdict() for each in self._flags],
        }


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
