"""Composes a server from core, control plane and parts, and starts and stops them in order.

Owns the registry, the agent, the response cache, the regions, the event loop of HTTP and the parts
(`conch.parts`): add a port to `_open_parts`, or by an entry point.
Threads: `start` and `stop` may run on different threads; a stop also cancels a start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from conch import __version__
from conch.access.access_guard import Access
from conch.access.metered_admission import MeteredAdmission
from conch.access.policy_reload import PolicyReload
from conch.backends import load_backend
from conch.caches import open_cache_service
from conch.core.add_ons import load_add_on
from conch.core.admission import Admission
from conch.core.backend import Backend
from conch.core.custom_metrics import FAMILIES, CustomFamilies
from conch.core.errors import ConchError, InternalError, error_text
from conch.core.model_control import IndexEntry
from conch.core.registry import Registry
from conch.core.server_stage import Stage
from conch.core.server_state import ServerState
from conch.frontends.grpc.grpc_methods import GrpcMethods, MethodOptions
from conch.frontends.http.http_loop import LoopThread
from conch.frontends.load_reports import LoadReports
from conch.frontends.operations.operation_handlers import Services
from conch.memory.cuda_regions import cuda_opener
from conch.memory.regions import Regions
from conch.observability.logging.access_log import AccessLog
from conch.observability.logging.audit_log import AuditLog
from conch.observability.logging.log_settings import LogControl, LogOptions
from conch.observability.metrics.exemplars import Exemplars
from conch.observability.metrics.load_meter import LoadMeter
from conch.observability.metrics.server_metrics import CustomMetrics
from conch.observability.request_watch import RequestWatches
from conch.observability.tracing.open_tracing import open_tracing
from conch.observability.tracing.trace_ring import TraceRing
from conch.parts.control_part import ControlPart
from conch.parts.grpc_part import GrpcPart
from conch.parts.http_part import HttpPart
from conch.parts.metrics_part import MetricsPart
from conch.parts.server_part import PartContext, ServerPart
from conch.process.banner import Announcement, start_announcement
from conch.process.endpoint import Endpoint
from conch.process.exposure import exposure, open_control_warning
from conch.process.forked_sockets import ListeningAddresses
from conch.process.start_diagnostics import SlowLoads, cause_line, repository_hint
from conch.server_options import PartOptions
from conch_control.lifecycle.access_policy import GuardedAgent
from conch_control.lifecycle.agent import Agent, LoadFailure
from conch_control.planner.planner_loop import Planner
from conch_control.repository.source import Repository

log = logging.getLogger(__name__)

_SEQUENCE_INTERVAL_S = 0.02
_TRACES_S = 5.0  # for traces that wait to be written
_PLANNER_STOP_S = 1.0


class Server:
    """A whole server in this process.

    Args:
        options: The options of all parts.
        logs: The log settings; None if logging belongs to the program around the server.
        access_log: Logs requests; None for no log. The caller closes it.
        audit_log: Logs what the access policy refuses and allows; None for no log. The caller closes it.
        get_backend: Finds a backend by name.
        repositories: Repositories besides those of the options.
        families: Receives the metrics that models define while they load.

    Attributes:
        failures: The startup models that failed to load, set by `start`.
        exposure: A sentence on what is open to which clients.
        models_at_failure: The index of a start that failed because of models; else empty.

    Raises:
        ConchError: The options can't work, such as a malformed location of a repository. Repositories are
            first accessed by `start`.
    """

    def __init__(
        self,
        options: PartOptions,
        logs: LogControl | None = None,
        access_log: AccessLog | None = None,
        audit_log: AuditLog | None = None,
        *,
        get_backend: Callable[[str], Backend] = load_backend,
        repositories: Iterable[Repository] = (),
        families: CustomFamilies = FAMILIES,
    ) -> None:
        self._options = server = options.server
        self._policy = None if server.access_policy is None else PolicyReload(server.access_policy)
        self._access = None if self._policy is None else Access(self._policy.state, audit_log)
        if options.control_port is not None:
            options.control_port.check()
        control = options.control_with_counts()
        self._locations = [] if control.model_name else [str(each) for each in control.repositories]
        self.registry = Registry()
        self._cache = open_cache_service(server.cache) if server.cache else None
        try:
            self.agent = Agent(
                control,
                self.registry,
                get_backend,
                self._cache,
                self.drain,
                repositories=repositories,
                families=families,
            )
        except BaseException:
            self._close_cache()
            raise
        self.failures: list[LoadFailure] = []
        self.models_at_failure: list[IndexEntry] = []
        planner = options.planner
        self._planner = None if planner is None else Planner(self.agent, self.agent.repositories, planner)
        guarded_agent = GuardedAgent(
            self.agent, control.mode, server.allow_model_control, control.max_config_bytes
        )
        self.exposure = exposure(options)
        self._warning = open_control_warning(options)
        exemplars = Exemplars()
        ring = TraceRing() if any(each.keeps_traces for each in options.add_ons.values()) else None
        tracing = open_tracing(server.tracing, exemplars, ring)
        self._tracer = tracing.tracer
        self.core = ServerState(
            self.registry,
            guarded_agent,
            server.server_id,
            __version__,
            self.agent.ready,
            server.strict_readiness,
            RequestWatches(access_log, self._tracer),
            Admission if self._access is None else partial(MeteredAdmission, self._access),
        )
        self._regions = Regions(server.allow_client_shm, cuda_opener())
        self._services = Services(
            self._regions,
            LogControl(LogOptions(), None) if logs is None else logs,
            tracing.settings,
            guarded_agent.check_changes,
            self.agent.archives,
            console_url=lambda: self.url("Console"),
        )
        self._loop = LoopThread()
        self._addresses = ListeningAddresses()
        self._parts: list[ServerPart] = []
        meter = LoadMeter(self.registry)
        context = PartContext(
            core=self.core,
            agent=self.agent,
            control=control,
            services=self._services,
            access=self._access,
            loop=self._loop,
            addresses=self._addresses,
            parts=self._parts,
            reports=LoadReports(meter, CustomMetrics(families).snapshot),
            meter=meter,
            families=families,
            tracing=tracing,
            exemplars=exemplars,
            ring=ring,
            cache=self._cache,
            get_backend=get_backend,
        )
        self._parts += sorted(_open_parts(options, context), key=lambda part: not part.for_clients)
        self._slow_loads = SlowLoads(self.agent.unfinished)
        self._waiting = threading.Event()  # never set: a stop sleeps on it
        self._start_lock = threading.Lock()  # held during the start

    def start(self) -> None:
        """Starts the parts that come before the models, loads these, then starts the rest.

        With `listen_while_loading` all parts start before the models.

        Raises:
            ConchError: A port is taken, a repository can't be read with `exit_without_repository`, a model
                failed with `exit_on_error`, or the server was stopped.
        """
        with self._start_lock:
            try:
                self._start()
            except BaseException:
                if self.core.stages.stage is not Stage.STOPPING:  # else `stop` closes everything in order
                    self._slow_loads.stop()
                    self._close(time.monotonic())
                raise

    def _start(self) -> None:
        self.core.check_running()
        if self._warning:
            log.warning("%s", self._warning)
        if self._policy is not None and self._access is not None:  # both or neither
            self._policy.start(self._access)
        self._slow_loads.start()
        for part in self._parts:
            part.check()
        if self._planner is not None:
            self._planner.remember()
        for part in self._parts:
            if part.before_models or self._options.listen_while_loading:
                part.start()
        wrong = list(filter(None, map(repository_hint, self._locations)))
        for hint in wrong:
            log.warning("%s", hint)
        try:
            failures = self.failures = self.agent.start()
        except ConchError as error:
            self.core.check_running()
            if self._options.exit_without_repository:
                raise
            log.error("%s", error_text(error))
            self.core.failed()
            self._start_parts()
            return
        self.core.check_running()
        if failures and self._options.exit_on_error:
            self.models_at_failure = self.agent.index(False)  # they are unloaded when this has failed
            failed = InternalError("failed to load all models")
            for line in [*wrong, *(cause_line(each.name, each.reason) for each in failures)]:
                failed.add_note(line)
            raise failed
        self.core.started()
        for part in self._parts:
            part.check_models()
        self._start_parts()
        if self._planner is not None:
            self._planner.start({failure.name: failure.error for failure in failures})

    def _start_parts(self) -> None:
        for part in self._parts:
            part.start()

    @property
    def endpoints(self) -> list[Endpoint]:
        """The open ports and sockets."""
        return [each for part in self._parts for each in part.endpoints()]

    def port(self, service: str) -> int | None:
        """The port in use of a service such as ``gRPC``; None while it is not open."""
        return next((each.port for each in self.endpoints if each.service == service), None)

    def url(self, service: str) -> str:
        """The address of a service for clients on this machine; empty while it is not open."""
        return next((each.url for each in self.endpoints if each.service == service), "")

    def grpc_methods(self) -> GrpcMethods:
        """Makes handlers of all RPCs for a transport other than the gRPC port; the caller closes them.

        Models run on their own threads: the transport's threads run nothing inline.
        """
        options, access = MethodOptions(), self._access
        return GrpcMethods(self.core, self._services, options, lambda claim: claim.release(), access=access)

    def announcement(self) -> Announcement:
        """The loaded models and the endpoints."""
        return start_announcement(self.agent.index(False), self.endpoints, self.exposure)

    def drain(self) -> None:
        """Makes the server not ready; it goes on answering requests."""
        if self.core.drain():
            log.info("the server is draining: it is not ready any more, and goes on answering")
            self.agent.draining_began()

    def stop(self) -> bool:
        """Drains, finishes open requests within the exit timeout, unloads; also cancels a start.

        Returns:
            Whether all open requests were finished in time.
        """
        stages = self.core.stages
        if stages.stage is not Stage.STARTING:
            self.drain()
            self._waiting.wait(max(self._options.drain_delay_s - stages.seconds_in(Stage.DRAINING), 0.0))
        log.info("Waiting for in-flight requests to complete.")
        self.core.stopping()
        end = time.monotonic() + self._options.exit_timeout_s
        for part in self._parts:
            part.refuse_changes()
        self._slow_loads.stop()
        self.agent.stop_loads()  # else a client's load would use up the time of open requests
        # `start` holds the lock while it runs. Its loads are stopped by now; `agent.close` waits for them
        # and unloads. `_start` then raises at its next `check_running`, or, past the last one, starts the
        # parts. `start` closes nothing, as the stage is STOPPING, and frees the lock. `_close` closes the
        # agent a second time, with nothing left to unload.
        if self._start_lock.locked():
            self.agent.close(_left(end))
        if not self._start_lock.acquire(timeout=_left(end)):
            return False  # the start hangs, such as in storage, and may still use what would be closed
        self._start_lock.release()
        if self._planner is not None:
            self._planner.stop(0.0)  # starts no more loads; the agent ends running ones
        # Closed connections would break live sequences off: they end first, or become idle.
        if self.core.sequences:
            self.core.refuse_new()
        while self.core.sequences and time.monotonic() < end:
            self._waiting.wait(_SEQUENCE_INTERVAL_S)
        return self._close(end)

    def _close(self, end: float) -> bool:
        """Ends all parts, unloads the models and closes what is left; returns whether all ended in time."""
        ended = self._together(lambda part, left_s: part.drain(left_s), end)
        ended = self._together(lambda part, left_s: part.disconnect(left_s), end) and ended
        for part in self._parts:
            part.flush(_left(end))
        ended = self.agent.close(_left(end)) and ended
        if self._planner is not None:
            # A planner that hangs in storage holds nothing to finish.
            self._planner.stop(min(_PLANNER_STOP_S, _left(end)))
        for part in self._parts:
            ended = part.close(_left(end)) and ended
        self._loop.stop()
        if self._policy is not None:
            self._policy.stop()
        self._addresses.clear()
        self._tracer.close(min(_TRACES_S, _left(end)))
        self._regions.close()
        self._close_cache()
        return ended

    def _together(self, stage: Callable[[ServerPart, float], bool], end: float) -> bool:
        """Runs a stage of the stop for all parts at once."""
        with ThreadPoolExecutor(max(len(self._parts), 1), "conch-stop") as threads:
            return all([*threads.map(lambda part: stage(part, _left(end)), self._parts)])

    def _close_cache(self) -> None:
        if self._cache is not None:
            self._cache.close()


def _open_parts(options: PartOptions, context: PartContext) -> Iterable[ServerPart]:
    """The parts that are on, those of add-ons last."""
    if options.metrics is not None:
        metrics = MetricsPart(options.metrics, context)
        context = replace(context, metrics=metrics.handler)
        yield metrics
    if options.grpc is not None:
        yield GrpcPart(options.grpc, context)
    if options.http is not None:
        yield HttpPart(options.http, context)
    if options.control_port is not None:
        yield ControlPart(options.control_port, context)
    for name, add_on in options.add_ons.items():
        yield from load_add_on("conch.parts", name)(add_on, context)


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.0)
