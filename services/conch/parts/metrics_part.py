"""The metrics port: connects the sources of metrics and serves them over HTTP."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from conch.access.access_guard import AccessGuard
from conch.access.principals import EVERY_MODEL, READS
from conch.core.errors import ConchError
from conch.core.process_setup import SMALL_PORT_SHARES, most_descriptors
from conch.frontends.http.http_connection import Handler
from conch.frontends.http.http_exchange import HttpExchange
from conch.frontends.http.http_loop import HttpListener
from conch.frontends.http.http_routing import admit
from conch.frontends.http.json_body import error_reply
from conch.memory.regions import Regions
from conch.observability.exporters import LOGS, METRICS, Exporter
from conch.observability.metrics.access_metrics import access_families
from conch.observability.metrics.gpu_metrics import open_gpus
from conch.observability.metrics.machine_metrics import MachineMetrics
from conch.observability.metrics.metrics_app import OPEN_PATHS, MetricsApp
from conch.observability.metrics.metrics_export import MetricsExport
from conch.observability.metrics.metrics_exposition import Exposition, Polled, Source
from conch.observability.metrics.metrics_options import MetricsOptions
from conch.observability.metrics.model_metrics import ModelMetrics
from conch.observability.metrics.server_metrics import (
    CustomMetrics,
    RegionSizes,
    StateMetrics,
    export_families,
    trace_families,
)
from conch.parts.server_part import PartContext, Port
from conch.process.endpoint import Endpoint, security
from conch.process.gpu_discovery import gpu_uuids

_NS_PER_MS = 1_000_000
_EXPORT_S = 5.0  # for a last export


class MetricsPart(Port):
    """Serves the server's metrics on a port of their own."""

    title = "Metrics"
    service = "Metrics Service"

    def __init__(self, options: MetricsOptions, context: PartContext) -> None:
        super().__init__(
            options, context, security(options.tls), "http://" if options.tls is None else "https://"
        )
        self._options = options
        self._loop = context.ports.loop
        core, access, observability = context.core.state, context.access, context.observability
        agent, cache, tracing = context.control.agent, context.core.cache, observability.tracing
        loads, log_exporter = agent.loads, observability.logs.exporter
        registry = core.registry

        def ready() -> bool:
            return core.loaded

        local = None if cache is None else cache.local_statistics
        sources: list[Source] = [
            StateMetrics(
                registry,
                loads.snapshot,
                local,
                _sizes_of(context.core.regions),
                ready,
            ),
            CustomMetrics(observability.families),
            partial(trace_families, tracing.tracer.drops, tracing.exporter),
        ]
        sources.append(lambda: [each for part in context.ports.parts for each in part.families()])
        if access is not None:
            sources.append(lambda: access_families(access.counts()))
        interval_ns = options.interval_ms * _NS_PER_MS
        if options.cpu:
            sources.append(Polled(MachineMetrics(), interval_ns))
        self._gpus = open_gpus() if options.gpu else None
        if self._gpus is not None:
            sources.append(Polled(self._gpus, interval_ns))
        uuids = gpu_uuids() if self._gpus is not None else ()
        models = ModelMetrics(
            registry,
            loads.snapshot,
            observability.meter,
            options.latencies.counters,
            options.latencies.quantiles,
            gpu_uuids=uuids,
            exemplars=observability.exemplars,
        )
        self._app = MetricsApp(Exposition(models, sources).render, lambda: core.alive, ready)
        self._handler: Handler = self._app
        if access is not None:
            self._handler = _guarded(self._app, AccessGuard(access, "metrics"))
        self._export: MetricsExport | None = None
        exporters: dict[str, Exporter[Any]] = {} if log_exporter is None else {LOGS: log_exporter}
        if options.export is not None:
            self._export = MetricsExport(options.export, self._app.text)
            exporters[METRICS] = self._export.exporter
        if exporters:
            sources.append(partial(export_families, exporters))
        self._listener: HttpListener | None = None

    @property
    def handler(self) -> Handler:
        """The handler of ``GET /metrics``, for other ports of the same event loop."""
        return self._handler

    def text(self) -> str:
        """The metrics as Prometheus' text; blocks."""
        return self._app.text()

    def endpoints(self) -> Sequence[Endpoint]:
        """The port, with the path of the metrics."""
        return [replace(each, url=f"{each.url}/metrics") for each in super().endpoints()]

    def listen(self) -> int:
        """Listens; returns the port in use.

        Raises:
            UnavailableError: The address or a certificate can't be used.
        """
        options = self._options
        tls = None if options.tls is None else options.tls()
        self._listener = self._loop.listen(
            self._handler,
            options.address.strip("[]"),
            options.port,
            tls,
            most_connections=most_descriptors(SMALL_PORT_SHARES),
        )
        if self._export is not None:
            self._export.start()
        return self._listener.port

    def flush(self, grace_s: float) -> None:
        """Exports the last numbers, if metrics are exported; before the models are unloaded."""
        if self._export is not None:
            self._export.finish(min(_EXPORT_S, grace_s))

    def close(self, grace_s: float) -> bool:
        """Stops listening; True if all scrapes were answered in time."""
        ended = True
        if self._listener is not None:
            ended, self._listener = self._listener.close(grace_s), None
        if self._export is not None:
            self._export.close(time.monotonic() + min(_EXPORT_S, grace_s))
        self._app.close()
        if self._gpus is not None:
            self._gpus.close()
            self._gpus = None
        return ended


def _guarded(handler: Handler, guard: AccessGuard) -> Handler:
    def handle(exchange: HttpExchange) -> Coroutine[Any, Any, None] | None:
        if exchange.path not in OPEN_PATHS:
            try:
                admit(exchange, guard, READS, "metrics", EVERY_MODEL)  # the text has all models
            except ConchError as error:
                exchange.respond(*error_reply(error))
                return None
        return handler(exchange)

    return handle


def _sizes_of(regions: Regions) -> RegionSizes:
    def sizes() -> dict[str, list[int]]:
        return {
            "system": [region.byte_size for region in regions.system_regions()],
            "cuda": [region.byte_size for region in regions.cuda_regions()],
        }

    return sizes
