"""The console's port: connects its pages with the server's parts and serves them.

It has an event loop of its own, so that pages never hold up requests on the REST port's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from conch.backends import backend_names
from conch.core.file_checks import load_file_checks
from conch.core.process_setup import SMALL_PORT_SHARES, most_descriptors
from conch.door.thread_pool import ThreadPool
from conch.frontends.http.http_loop import HttpListener, HttpLoop
from conch.frontends.http.http_pools import Pools
from conch.ipc.loop import SharedLoop
from conch.observability.metrics.gpu_metrics import open_gpus
from conch.parts.server_part import PartContext, Port, ServerPart
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

_READING_THREADS, _CHANGING_THREADS = 4, 8
_MOST_CONNECTIONS = 512


def console_parts(options: ConsoleOptions, context: PartContext) -> Sequence[ServerPart]:
    """The console's port, for the entry-point group ``conch.parts``."""
    return [ConsolePort(options, context)]


class ConsolePort(Port):
    """Serves the console of one server.

    Raises:
        InvalidArgumentError: It would be open to everyone.
    """

    before_models = True
    title = "Console"

    def __init__(self, options: ConsoleOptions, context: PartContext) -> None:
        options.check()
        super().__init__(options, context, options.security, "http://" if options.tls is None else "https://")
        core, agent, observability = context.core.state, context.control.agent, context.observability
        assert observability.ring is not None, "the options ask for traces"
        logs, traces = observability.logs, observability.tracing.settings
        self._options = options
        self._ports = context.ports
        self._thread = HttpLoop(SharedLoop("conch-console"))
        self._lines = LogRing()
        self._reading = ThreadPool(_READING_THREADS, "conch-console-read")
        self._changing = ThreadPool(_CHANGING_THREADS, "conch-console-change")
        self._pools = Pools()
        self._gpus = open_gpus()
        sampling = TraceSampling(traces)
        names = tuple(sorted(backend_names()))
        rules = Rules(
            context.control.options, context.control.get_backend, names, file_checks=load_file_checks()
        )
        configs = ConfigView(agent.repositories, rules)
        server = ServerViews(core, logs, traces, context.ports.endpoints, context.ports.fronts, options.flags)
        machine = MachineState(self._gpus)
        self._feed = LiveFeed(LiveCounts(core.registry), agent.events, self._lines, machine, server.state)
        self._parts = ConsoleParts(
            options=options,
            access=ConsoleAccess(options, context.access),
            static=StaticFiles(),
            server=server,
            models=ModelViews(agent, core.registry),
            configs=configs,
            actions=ConsoleActions(core, agent, configs, logs, sampling, options.identifies),
            sampling=sampling,
            feed=self._feed,
            logs=self._lines,
            traces=observability.ring,
            infer=TryRoute(context.door, self._reading, options.max_input_bytes),
            chat=None,
            reading=self._reading,
            changing=self._changing,
        )
        self._listener: HttpListener | None = None

    def listen(self) -> int:
        """Listens; returns the port in use.

        Raises:
            UnavailableError: The address or a certificate can't be used.
        """
        options = self._options
        tls = None if options.tls is None else options.tls.context()
        chat = self._ports.chat_route(self._pools, options.max_input_bytes)  # of a part behind this one
        self._lines.install()
        self._listener = self._thread.listen(
            ConsoleApp(replace(self._parts, chat=chat)),
            options.address.strip("[]"),
            options.port,
            tls,
            most_connections=min(_MOST_CONNECTIONS, most_descriptors(SMALL_PORT_SHARES)),
        )
        return self._listener.port

    def close(self, grace_s: float) -> bool:
        """Ends all streams and stops listening; returns whether all work has ended in time."""
        end = time.monotonic() + grace_s
        ended = True
        if self._listener is not None:
            self._thread.loop.call_soon_threadsafe(self._feed.close)
            ended, self._listener = self._listener.close(grace_s), None
        for pool in (self._reading, self._changing):
            ended = pool.close(max(end - time.monotonic(), 0.0)) and ended
        ended = self._pools.close(lambda: max(end - time.monotonic(), 0.0)) and ended
        self._thread.stop()
        self._lines.remove()
        if self._gpus is not None:
            self._gpus.close()
            self._gpus = None
        return ended
