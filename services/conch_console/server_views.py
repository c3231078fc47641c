"""The server as JSON for the console's pages: its state, addresses, devices and settings.

Threads and locks: any thread; no state of its own.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

from conch.core.clock import Clock, monotonic_ns
from conch.core.server_stage import Stage
from conch.core.server_state import ServerState
from conch.observability.logging.log_settings import LogControl
from conch.observability.tracing.trace_settings import TraceSettings
from conch.process.banner import Endpoint
from conch_console.console_options import ShownFlag


class ServerViews:
    """Reads the server's state.

    Args:
        core: The server core.
        logs: Log settings.
        traces: Trace settings.
        endpoints: Gives the open ports.
        flags: The server's settings.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(
        self,
        core: ServerState,
        logs: LogControl,
        traces: TraceSettings,
        endpoints: Callable[[], Sequence[Endpoint]],
        flags: Sequence[ShownFlag] = (),
        clock: Clock = monotonic_ns,
    ) -> None:
        self._core = core
        self._logs = logs
        self._traces = traces
        self._endpoints = endpoints
        self._flags = flags
        self._clock = clock
        self._began_ns = clock()

    def state(self) -> dict[str, Any]:
        """The stage, whether it is ready, and for how long it has run; cheap."""
        stage = self._core.stages.stage
        return {
            "stage": stage.name,
            "ready": stage is Stage.SERVING and self._core.loaded,
            "uptime": (self._clock() - self._began_ns) // 10**9,
        }

    def about(self) -> dict[str, Any]:
        """What does not change while it runs."""
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

    def settings(self) -> dict[str, Any]:
        """Settings of log and traces, and the flags with where they come from."""
        return {
            "log": self._logs.settings(),
            "log_fixed": self._logs.fixed,
            "trace": {name: list(values) for name, values in self._traces.settings().items()},
            "flags": [each._asdict() for each in self._flags],
        }
