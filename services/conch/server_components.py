"""Builds the components of a server, each from those before it; starts none of them.

1. The access policy, and the guard that all ports ask
2. The registry, the response cache, the agent (the control plane), and the planner if the server follows its
   repositories
3. Tracing
4. The state that front ends share, and what their operations use
5. The parts: ports, and what add-ons bring. A new port is a line in `_open_parts`, or an entry point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from conch import __version__
from conch.access.access_guard import Access
from conch.access.metered_admission import MeteredAdmission
from conch.access.policy_reload import PolicyReload
from conch.caches import open_cache_service
from conch.core.add_ons import load_add_on
from conch.core.admission import Admission, HeldBytes
from conch.core.backend import FindBackend
from conch.core.custom_metrics import CustomFamilies
from conch.core.process_setup import memory_bytes
from conch.core.registry import Registry
from conch.core.server_state import ServerState
from conch.door.local_door import LocalDoor
from conch.door.operation_handlers import Services
from conch.frontends.http.http_loop import HttpLoop
from conch.frontends.http.server_facts import find_fact
from conch.frontends.load_reports import LoadReports
from conch.memory.cuda_regions import cuda_opener
from conch.memory.region_bindings import bind_regions
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
from conch.parts.grpc_part import GrpcPart
from conch.parts.http_part import HttpPart
from conch.parts.metrics_part import MetricsPart
from conch.parts.server_part import (
    ControlPlane,
    Core,
    Observability,
    PartContext,
    Ports,
    ServerPart,
    in_order,
)
from conch.process.forked_sockets import ListeningAddresses
from conch.server_options import PartOptions
from conch_control.lifecycle.access_policy import GuardedAgent
from conch_control.lifecycle.agent import Agent
from conch_control.planner.planner_loop import Planner
from conch_control.repository.source import Repository

_LEAST_HELD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Components:
    """Components of a server.

    Attributes:
        context: The parts, and the objects that they share.
        policy: Rereads the access policy; None without one.
        planner: Loads and unloads models as their repositories change; None unless the server follows them.
    """

    context: PartContext
    policy: PolicyReload | None
    planner: Planner | None


def build_components(
    options: PartOptions,
    logs: LogControl | None,
    access_log: AccessLog | None,
    audit_log: AuditLog | None,
    *,
    get_backend: FindBackend,
    repositories: Iterable[Repository],
    families: CustomFamilies,
    drain: Callable[[], None],
) -> Components:
    """Builds them from the arguments of `Server`; `drain` is what the control port calls.

    Raises:
        ConchError: The options can't work.
    """
    server = options.server
    policy = None if server.access_policy is None else PolicyReload(server.access_policy)
    access = None if policy is None else Access(policy.state, audit_log)

    if options.control_port is not None:
        options.control_port.check()
    control = options.control_with_counts()
    if policy is not None and control.mode != "on-demand":
        policy.refuse_load_limits()
    registry = Registry(lambda: agent.residency.cold)
    # Each meter measures since it was read last.
    meter, shadow_meter = LoadMeter(registry), LoadMeter(registry)
    cache = open_cache_service(server.cache) if server.cache else None
    try:
        agent = Agent(
            control,
            registry,
            get_backend,
            cache,
            drain,
            repositories=repositories,
            families=families,
            saturation=lambda: shadow_meter.read().saturation,
            residency=options.residency,
            passes_blocks=server.front_ends > 0,
            facts=lambda *asked: find_fact(door, metrics, *asked),
        )
    except BaseException:
        if cache is not None:
            cache.close()
        raise
    planner = None if options.planner is None else Planner(agent, agent.repositories, options.planner)

    exemplars = Exemplars()
    ring = TraceRing() if any(each.keeps_traces for each in options.add_ons.values()) else None
    tracing = open_tracing(server.tracing, exemplars, ring)

    regions = Regions(server.allow_client_shm, cuda_opener())
    guarded = GuardedAgent(
        agent,
        control.mode,
        server.allow_model_control,
        control.max_config_bytes,
        access is not None or (options.http is not None and options.http.identifies("model-repository")),
    )
    core = ServerState(
        registry,
        guarded,
        server.server_id,
        __version__,
        agent.ready,
        server.strict_readiness,
        RequestWatches(access_log, tracing.tracer),
        Admission if access is None else partial(MeteredAdmission, access),
        partial(bind_regions, regions),
    )

    services = Services(
        regions,
        LogControl(LogOptions(), None) if logs is None else logs,
        tracing.settings,
        guarded.check_changes,
        guarded.check_rollout_changes,
        agent.archives,
        agent,
    )
    most = server.received_bytes or max(memory_bytes() // 4, _LEAST_HELD_BYTES)
    door = LocalDoor(core, services, HeldBytes(most))
    parts: list[ServerPart] = []
    context = PartContext(
        door,
        access,
        Ports(parts, HttpLoop(), ListeningAddresses(), LoadReports(meter, CustomMetrics(families).snapshot)),
        Observability(services.logs, tracing, ring, exemplars, meter, families),
        Core(core, cache, regions),
        ControlPlane(agent, control, get_backend),
    )
    parts += in_order(_open_parts(options, context))
    metrics = next((part.text for part in parts if isinstance(part, MetricsPart)), None)
    return Components(context, policy, planner)


def _open_parts(options: PartOptions, context: PartContext) -> Iterable[ServerPart]:
    """The parts that are on; metrics first, as other ports serve them too."""
    if options.metrics is not None:
        metrics = MetricsPart(options.metrics, context)
        context = replace(context, ports=replace(context.ports, metrics=metrics.handler))
        yield metrics
    transport, fronts = None, []
    if options.server.front_ends:
        from conch.parts.fronts_part import FrontsPart  # only servers with fronts import their modules

        part = FrontsPart(options.server.front_ends, options.grpc, context)
        context = replace(context, ports=replace(context.ports, http_fronts=part.http))
        transport, fronts = part.transport(), [part]
    if options.grpc is not None:
        yield GrpcPart(options.grpc, context, transport)
    yield from fronts  # behind the gRPC port, with which they start
    if options.http is not None:
        yield HttpPart(options.http, context)
    if options.control_port is not None:
        from conch.parts.control_part import ControlPart  # imports grpcio

        yield ControlPart(options.control_port, context)
    for name, add_on in options.add_ons.items():
        yield from load_add_on("conch.parts", name)(add_on, context)
