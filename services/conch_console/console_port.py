"""The console's port: connects its pages with the server's parts and serves them. Used by `conch.server`.

It has an event loop of its own, so that pages never hold up requests on the REST port's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from conch.access.access_guard import Access
from conch.backends import backend_names
from conch.core.backend import Backend
from conch.core.process_setup import SMALL_PORT_SHARES, most_descriptors
from conch.core.server_state import ServerState
from conch.frontends.http.http_loop import Listener, LoopThread
from conch.frontends.thread_pool import ThreadPool
from conch.observability.logging.log_settings import LogControl
from conch.observability.metrics.gpu_metrics import open_gpus
from conch.observability.tracing.trace_ring import TraceRing
from conch.observability.tracing.trace_settings import TraceSettings
from conch.process.banner import Endpoint, listening, local_address
from conch_check.model_checks import Rules
from conch_console.config_view import ConfigView
from conch_console.console_access import ConsoleAccess
from conch_console.console_actions import ConsoleActions
from conch_console.console_options import ConsoleOptions
from conch_console.console_routes import ConsoleApp, ConsoleParts
from conch_console.live_counts import LiveCounts
from conch_console.live_feed import LiveFeed
from conch_console.log_ring import LogRing
from conch_console.model_views import ModelViews
from conch_console.server_views import MachineState, ServerViews
from conch_console.static_files import StaticFiles
from conch_console.trace_sampling import TraceSampling
from conch_console.try_route import TryRoute
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.agent import Agent

_READING_THREADS, _CHANGING_THREADS = 4, 8
_MOST_CONNECTIONS = 512


class ConsolePort:
    """Serves the console of one server.

    Args:
        options: Where it listens, and who may do what.
        core: The server core.
        agent: The control plane.
        control: Its options, which models are checked by.
        get_backend: Finds a backend by name.
        logs: Log settings.
        traces: Trace settings.
        ring: The newest traces.
        endpoints: Gives the server's open ports.
        access: The access policy; None for one of the console's own.

    Attributes:
        options: As given.

    Raises:
        InvalidArgumentError: It would be open to everyone.
    """

    def __init__(
        self,
        options: ConsoleOptions,
        core: ServerState,
        agent: Agent,
        control: ControlOptions,
        get_backend: Callable[[str], Backend],
        logs: LogControl,
        traces: TraceSettings,
        ring: TraceRing,
        endpoints: Callable[[], Sequence[Endpoint]],
        access: Access | None = None,
    ) -> None:
        options.check()
        self.options = options
        self._thread = LoopThread("conch-console")
        self._lines = LogRing()
        self._reading = ThreadPool(_READING_THREADS, "conch-console-read")
        self._changing = ThreadPool(_CHANGING_THREADS, "conch-console-change")
        self._gpus = open_gpus()
        sampling = TraceSampling(traces)
        configs = ConfigView(agent.repositories, Rules(control, get_backend, tuple(sorted(backend_names()))))
        server = ServerViews(core, logs, traces, endpoints, options.flags)
        machine = MachineState(self._gpus)
        self._feed = LiveFeed(LiveCounts(core.registry), agent.events, self._lines, machine, server.state)
        self._parts = ConsoleParts(
            options=options,
            access=ConsoleAccess(options, access),
            static=StaticFiles(),
            server=server,
            models=ModelViews(agent, core.registry),
            configs=configs,
            actions=ConsoleActions(core, agent, configs, logs, sampling),
            sampling=sampling,
            feed=self._feed,
            logs=self._lines,
            traces=ring,
            infer=TryRoute(core, self._reading, options.max_input_bytes),
            reading=self._reading,
            changing=self._changing,
        )
        self._listener: Listener | None = None

    def start(self) -> int:
        """Listens; returns the port in use.

        Raises:
            UnavailableError: The address or a certificate can't be used.
        """
        options = self.options
        tls = None if options.tls is None else options.tls.context()
        self._lines.install()
        self._listener = self._thread.listen(
            ConsoleApp(self._parts),
            options.address.strip("[]"),
            options.port,
            tls,
            most_connections=min(_MOST_CONNECTIONS, most_descriptors(SMALL_PORT_SHARES)),
        )
        return self._listener.port

    def endpoint(self, port: int) -> Endpoint:
        """Its line in the table of open ports."""
        options = self.options
        url = f"{'http' if options.tls is None else 'https'}://{local_address(options.address, port)}"
        return Endpoint("Console", url, listening(options.target, port), options.security)

    def stop(self, grace_s: float) -> bool:
        """Ends all streams and stops listening; returns whether all work has ended in time."""
        end = time.monotonic() + grace_s
        ended = True
        if self._listener is not None:
            self._thread.loop.call_soon_threadsafe(self._feed.close)
            ended, self._listener = self._listener.close(grace_s), None
        for pool in (self._reading, self._changing):
            ended = pool.close(max(end - time.monotonic(), 0.0)) and ended
        self._thread.stop()
        self._lines.remove()
        if self._gpus is not None:
            self._gpus.close()
            self._gpus = None
        return ended
