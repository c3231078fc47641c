"""Composes a server from core, control plane and front ends, and starts and stops them in order.

Owns the registry, the agent, the response cache, the regions and the event loop of everything over HTTP.
Threads: `start` and `stop` may run on different threads; a stop also cancels a start.
Used by `conch serve` and `conch.Server`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Protocol

from conch import __version__
from conch.access.access_guard import Access
from conch.access.metered_admission import MeteredAdmission
from conch.access.policy_reload import PolicyReload
from conch.backends import load_backend
from conch.caches import fastest_hash, open_cache
from conch.core.admission import Admission
from conch.core.backend import Backend
from conch.core.custom_metrics import FAMILIES, CustomFamilies
from conch.core.errors import ConchError, InternalError, error_text
from conch.core.model_control import IndexEntry
from conch.core.registry import Registry
from conch.core.response_cache.cache_service import CacheService
from conch.core.server_stage import Stage
from conch.core.server_state import ServerState
from conch.frontends.grpc.grpc_front_end import GrpcFrontEnd, GrpcOptions
from conch.frontends.grpc.grpc_methods import GrpcMethods, MethodOptions
from conch.frontends.http.http_loop import LoopThread
from conch.frontends.http.http_server import HttpFrontEnd, HttpOptions
from conch.frontends.load_reports import LoadReports
from conch.frontends.operations.operation_handlers import Services
from conch.memory.cuda_regions import cuda_opener
from conch.memory.regions import Regions
from conch.observability.logging.access_log import AccessLog
from conch.observability.logging.audit_log import AuditLog
from conch.observability.logging.log_settings import LogControl, LogOptions
from conch.observability.metrics.exemplars import Exemplars
from conch.observability.metrics.load_meter import LoadMeter
from conch.observability.metrics.metrics_options import MetricsOptions
from conch.observability.metrics.server_metrics import CustomMetrics
from conch.observability.request_watch import RequestWatches
from conch.observability.tracing.open_tracing import open_tracing
from conch.observability.tracing.trace_ring import TraceRing
from conch.process.banner import (
    Announcement,
    Endpoint,
    listening,
    local_address,
    security,
    start_announcement,
)
from conch.process.exposure import exposure, open_control_warning
from conch.process.forked_sockets import ListeningAddresses
from conch.process.metrics_port import MetricsPort
from conch.process.start_diagnostics import Address, SlowLoads, cause_line, check_free, repository_hint
from conch.server_options import ServerOptions
from conch_console.console_options import ConsoleOptions
from conch_console.console_port import ConsolePort
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.access_policy import GuardedAgent
from conch_control.lifecycle.agent import Agent, LoadFailure
from conch_control.planner.planner_loop import Planner, PlannerOptions
from conch_control.remote_api.connection_options import ControlPortOptions
from conch_control.remote_api.server import ControlPort
from conch_control.repository.source import Repository

log = logging.getLogger(__name__)

_SEQUENCE_INTERVAL_S = 0.02
_TRACES_S = 5.0  # for traces that wait to be written
_PLANNER_STOP_S = 1.0
_STARTED = {"SageMaker": "Sagemaker ", "Vertex AI": "Vertex AI "}
"""Platforms in Triton's lines of started services."""


class Server:
    """A whole server in this process.

    Options of a part are None if it is off.

    Args:
        platforms: Ports of hosting platforms.
        logs: The log settings; None if logging belongs to the program around the server.
        access_log: Logs requests; None for no log. The caller closes it.
        get_backend: Finds a backend by name.
        repositories: Repositories besides those of `control`.
        families: Receives the metrics that models define while they load.
        audit_log: Logs what the access policy refuses and allows; None for no log. The caller closes it.

    Attributes:
        failures: The startup models that failed to load, set by `start`.
        exposure: A sentence on what is open to which clients.
        models_at_failure: The index of a start that failed because of models; else empty.
        grpc_port: The port in use, None while it is not open; so are `metrics_port`, `console_port` and
            `control_port`.

    Raises:
        ConchError: The options can't work, such as a repository that is not a directory.
    """

    grpc_port: int | None = None
    metrics_port: int | None = None
    console_port: int | None = None
    control_port: int | None = None

    def __init__(
        self,
        options: ServerOptions,
        control: ControlOptions,
        grpc: GrpcOptions | None,
        planner: PlannerOptions | None = None,
        control_port: ControlPortOptions | None = None,
        logs: LogControl | None = None,
        access_log: AccessLog | None = None,
        http: HttpOptions | None = None,
        *,
        metrics: MetricsOptions | None = None,
        platforms: Sequence[HttpOptions] = (),
        console: ConsoleOptions | None = None,
        get_backend: Callable[[str], Backend] = load_backend,
        repositories: Iterable[Repository] = (),
        families: CustomFamilies = FAMILIES,
        audit_log: AuditLog | None = None,
    ) -> None:
        self._policy = None if options.access_policy is None else PolicyReload(options.access_policy)
        access = self._access = None if self._policy is None else Access(self._policy.state, audit_log)
        if control_port is not None:
            control_port.check()
        if console is not None:
            control = replace(control, keep_latencies=True)
        if metrics is not None:
            # Histograms and summaries need these counts.
            control = replace(
                control,
                keep_latencies=True,
                keep_first_responses=metrics.first_responses,
                keep_summaries=bool(metrics.quantiles),
            )
        self._options = options
        self._locations = [] if control.model_name else [str(each) for each in control.repositories]
        self._control_options = control_port
        self._grpc_options = grpc
        self.registry = Registry()
        self._cache = _cache_service(options)
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
            self.failures: list[LoadFailure] = []
            self.models_at_failure: list[IndexEntry] = []
        except BaseException:
            self._close_cache()
            raise
        self._planner = None if planner is None else Planner(self.agent, self.agent.repositories, planner)
        guarded_agent = GuardedAgent(
            self.agent, control.mode, options.allow_model_control, control.max_config_bytes
        )
        self.exposure = exposure(options, control.mode, grpc, http, metrics, control_port, platforms, console)
        self._warning = open_control_warning(options, control.mode, grpc, http)
        strict = options.strict_readiness
        exemplars = Exemplars()
        ring = None if console is None else TraceRing()
        tracing = open_tracing(options.tracing, exemplars, ring)
        self.traces, self._tracer = tracing.settings, tracing.tracer
        self.core = ServerState(
            self.registry,
            guarded_agent,
            options.server_id,
            __version__,
            self.agent.ready,
            strict,
            RequestWatches(access_log, self._tracer),
            Admission if access is None else partial(MeteredAdmission, access),
        )
        self.logs = LogControl(LogOptions(), None) if logs is None else logs
        self.regions = Regions(options.allow_client_shm, cuda_opener())
        meter = LoadMeter(self.registry)
        reports = LoadReports(meter, CustomMetrics(families).snapshot)
        self._grpc = (
            None
            if grpc is None
            else GrpcFrontEnd(
                self.core,
                grpc,
                logs=self.logs,
                traces=self.traces,
                regions=self.regions,
                reports=reports,
                access=access,
            )
        )
        self._loop = LoopThread()  # shared by the HTTP and metrics ports
        self._services = Services(
            self.regions,
            self.logs,
            self.traces,
            guarded_agent.check_changes,
            self.agent.archives,
            lambda: next((each.url for each in self.endpoints if each.service == "Console"), ""),
        )
        self._control = None if control_port is None else ControlPort(self.agent, control_port, access=access)
        self._metrics_options = metrics
        self._addresses = ListeningAddresses()
        self._metrics = (
            None
            if metrics is None
            else MetricsPort(
                metrics,
                self._loop,
                self.core,
                self.agent.loads,
                meter,
                self._cache,
                self.regions,
                families,
                tracing,
                exemplars,
                self.logs.exporter,
                access,
            )
        )
        handler = None if self._metrics is None else self._metrics.handler
        rest = platforms if http is None else (http, *platforms)
        self._rest = [
            (
                each,
                HttpFrontEnd(
                    self.core, each, self._loop, self._services, reports, metrics=handler, access=access
                ),
            )
            for each in rest
        ]
        self.rest_ports: dict[str, int] = {}
        self._console = (
            None
            if console is None or ring is None
            else ConsolePort(
                console,
                self.core,
                self.agent,
                control,
                get_backend,
                self.logs,
                self.traces,
                ring,
                lambda: self.endpoints,
                access,
            )
        )
        self._slow_loads = SlowLoads(self.agent.unfinished)
        self._waiting = threading.Event()  # never set: a stop sleeps on it
        self._start_lock = threading.Lock()  # held during the start

    def start(self) -> None:
        """Loads the startup models, then listens; with `listen_while_loading` the other way round.

        Raises:
            ConchError: A port is taken, a model failed with `exit_on_error`, or the server was stopped.
        """
        with self._start_lock:
            try:
                self._start()
            except BaseException:
                if self.core.stages.stage is not Stage.STOPPING:  # else `stop` closes everything in order
                    self._slow_loads.stop()
                    self._stop_listening(0.0)
                    self.agent.close(0.0)
                    self._stop_control(0.0)
                    self._stop_console(0.0)
                    self._stop_metrics(0.0)
                    self._tracer.close(_TRACES_S)
                    self.regions.close()
                    self._close_cache()
                raise

    def _start(self) -> None:
        self.core.check_running()
        self._start_policy()
        self._slow_loads.start()
        ports: list[Address | None] = [
            self._grpc_options,
            *(each for each, _ in self._rest),
            self._metrics_options,
            None if self._console is None else self._console.options,
        ]
        for port in filter(None, ports):
            check_free(port)
        if self._planner is not None:
            self._planner.remember()
        if self._control is not None:
            # Before the models, so that clients can follow their loads.
            self.control_port = self._control.start()
            self._opened(self._control_options, self.control_port)
        if self._console is not None:
            self.console_port = self._console.start()
            self._opened(self._console.options, self.console_port)
        if self._options.listen_while_loading:
            self._listen()
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
            self._listen()
            return
        self.core.check_running()
        if failures and self._options.exit_on_error:
            self.models_at_failure = self.agent.index(False)  # they are unloaded when this has failed
            failed = InternalError("failed to load all models")
            for line in [*wrong, *(cause_line(each.name, each.reason) for each in failures)]:
                failed.add_note(line)
            raise failed
        self.core.started()
        for _, front_end in self._rest:
            front_end.check()
        self._listen()
        if self._planner is not None:
            self._planner.start({failure.name: failure.error for failure in failures})

    def grpc_methods(self) -> GrpcMethods:
        """Makes handlers of all RPCs for a transport other than the gRPC port; the caller closes them.

        Models run on their own threads: the transport's threads run nothing inline.
        """
        options, access = MethodOptions(), self._access
        return GrpcMethods(self.core, self._services, options, lambda claim: claim.release(), access=access)

    def _start_policy(self) -> None:
        if self._warning:
            log.warning("%s", self._warning)
        if self._policy is not None and self._access is not None:
            self._policy.start(self._access)

    @property
    def http_port(self) -> int | None:
        """The port of REST; None while it is not open."""
        return self.rest_ports.get("HTTP")

    @property
    def endpoints(self) -> list[Endpoint]:
        """The open ports and sockets."""
        found = []
        grpc, metrics, control = self._grpc_options, self._metrics_options, self._control_options
        if grpc is not None and self.grpc_port is not None:
            unix = grpc.address.startswith("unix:")
            url = grpc.target if unix else local_address(grpc.address, self.grpc_port)
            address = grpc.target if unix else listening(grpc.target, self.grpc_port)
            found.append(Endpoint("gRPC", url, address, security(grpc.tls)))
        for each, _ in self._rest:
            port = self.rest_ports.get(each.title)
            if port is not None:
                scheme = "http" if each.tls is None else "https"
                url = f"{scheme}://{local_address(each.address, port)}"
                found.append(Endpoint(each.title, url, listening(each.target, port), security(each.tls)))
        if metrics is not None and self.metrics_port is not None:
            scheme = "http" if metrics.tls is None else "https"
            url = f"{scheme}://{local_address(metrics.address, self.metrics_port)}/metrics"
            address = listening(metrics.target, self.metrics_port)
            found.append(Endpoint("Metrics", url, address, security(metrics.tls)))
        if control is not None and self.control_port is not None:
            unix = control.is_unix
            url = control.target if unix else local_address(control.address, self.control_port)
            address = control.target if unix else listening(control.target, self.control_port)
            found.append(Endpoint("Control", url, address, control.security))
        if self._console is not None and self.console_port is not None:
            found.append(self._console.endpoint(self.console_port))
        return found

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

        def left() -> float:
            return max(end - time.monotonic(), 0.0)

        if self._control is not None:
            self._control.refuse_changes()
        self._slow_loads.stop()
        self.agent.stop_loads()  # else a client's load would use up the time of open requests
        if self._start_lock.locked():
            self.agent.close(left())
        if not self._start_lock.acquire(timeout=left()):
            return False
        self._start_lock.release()
        if self._planner is not None:
            self._planner.stop(0.0)  # starts no more loads; the agent ends running ones
        self._finish_sequences(end)
        ended = self._stop_listening(left())
        if self._metrics is not None:
            self._metrics.finish_export(left())
        ended = self.agent.close(left()) and ended
        if self._planner is not None:
            # A planner that hangs in storage holds nothing to finish.
            self._planner.stop(min(_PLANNER_STOP_S, left()))
        ended = self._stop_control(left()) and ended  # last, so operators can follow the stop
        ended = self._stop_console(left()) and ended
        ended = self._stop_metrics(left()) and ended
        self._tracer.close(min(_TRACES_S, left()))
        self.regions.close()
        self._close_cache()
        return ended

    def _listen(self) -> None:
        if self._grpc is not None and self.grpc_port is None:
            self.grpc_port = self._grpc.start()
            self._opened(self._grpc_options, self.grpc_port, "GRPCInferenceService")
        for options, front_end in self._rest:
            if options.title not in self.rest_ports:
                self.rest_ports[options.title] = port = front_end.start()
                self._opened(options, port, f"{_STARTED.get(options.title, '')}HTTPService")
        if self._metrics is not None and self.metrics_port is None:
            self.metrics_port = self._metrics.start()
            self._opened(self._metrics_options, self.metrics_port, "Metrics Service")

    def _opened(self, options: _Target | None, port: int, service: str = "") -> None:
        """Has forks close the port, and logs Triton's line of the service."""
        assert options is not None
        self._addresses.add(options.target, port)
        if service:
            # Scripts wait for these lines.
            unix = options.target.startswith("unix:")
            log.info("Started %s at %s", service, options.target if unix else listening(options.target, port))

    def _stop_listening(self, grace_s: float) -> bool:
        """Stops all front ends; open HTTP connections are served until all else has ended."""
        end = time.monotonic() + grace_s
        rest = [front_end for _, front_end in self._rest]
        first: list[Callable[[float], bool]] = [each.finish_begun for each in rest]
        if self._grpc is not None and self.grpc_port is not None:
            first.append(self._grpc.stop)
        ended = True
        with ThreadPoolExecutor(max(len(first), 1), "conch-stop") as threads:
            for stops in (first, [each.stop for each in rest]):
                left_s = max(end - time.monotonic(), 0.0)
                ended = all([*threads.map(lambda stop, left_s=left_s: stop(left_s), stops)]) and ended
        return ended

    def _finish_sequences(self, end: float) -> None:
        """Waits for live sequences to end or to become idle; closed connections would break them off."""
        if self.core.sequences:
            self.core.refuse_new()
        while self.core.sequences and time.monotonic() < end:
            self._waiting.wait(_SEQUENCE_INTERVAL_S)

    def _stop_control(self, grace_s: float) -> bool:
        return self._control is None or self._control.stop(grace_s)

    def _stop_console(self, grace_s: float) -> bool:
        return self._console is None or self._console.stop(grace_s)

    def _stop_metrics(self, grace_s: float) -> bool:
        ended = self._metrics is None or self._metrics.stop(grace_s)
        self._loop.stop()
        if self._policy is not None:
            self._policy.stop()
        self._addresses.clear()
        return ended

    def _close_cache(self) -> None:
        if self._cache is not None:
            self._cache.close()


def _cache_service(options: ServerOptions) -> CacheService | None:
    if not options.cache:
        return None
    cache = open_cache(options.cache)
    name, new_hash = fastest_hash()
    log.info("response cache '%s', keys are made with %s", next(iter(options.cache)), name)
    return CacheService(cache, new_hash)


class _Target(Protocol):
    """Options with an address."""

    @property
    def target(self) -> str:
        """Host and port, or ``unix:PATH``."""
