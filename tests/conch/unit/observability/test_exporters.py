"""The seam of exporters: any package may take what the server exports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.servers import eventually
from tests.support.waiting import PATIENCE_S

from conch.core.errors import UnavailableError
from conch.core.request import InferenceRequest
from conch.observability import exporters
from conch.observability.exporters import (
    LOGS,
    METRICS,
    TRACES,
    DropCounter,
    ExportCounts,
    ExportOptions,
    LogItem,
    Scrape,
    SpanOptions,
    read_export,
)
from conch.observability.logging.log_handler import LogHandler
from conch.observability.logging.log_settings import LogOptions
from conch.observability.logging.log_sinks import StreamSink
from conch.observability.metrics.metrics_export import MetricsExport
from conch.observability.metrics.server_metrics import export_families, trace_families
from conch.observability.tracing.open_tracing import open_tracing
from conch.observability.tracing.trace_options import trace_options


class Kept:
    """An exporter that keeps what it gets."""

    def __init__(self, drops: DropCounter) -> None:
        self.drops = drops
        self.items: list[Any] = []
        self.closed = False

    def export(self, items: Sequence[Any]) -> None:
        self.items += items

    def counts(self) -> ExportCounts:
        return ExportCounts(len(self.items), {"ok": 1}, 0)

    def close(self, deadline_s: float) -> None:
        self.closed = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptOptions(ExportOptions):
    """Options of `Kept`."""

    settings: Sequence[tuple[str, str]]
    opened: list[Kept] = field(default_factory=list)

    def open_exporter(self, drops: DropCounter) -> Kept:
        self.opened.append(Kept(drops))
        return self.opened[-1]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers functions as entries of the group, in place of the add-on's."""

    def register(*functions: Callable[..., ExportOptions]) -> None:
        def entry_points(group: str, name: str) -> list[Any]:
            assert (group, name) == ("conch.exporters", "otlp")
            return [SimpleNamespace(load=lambda function=function: function) for function in functions]

        monkeypatch.setattr(exporters, "entry_points", entry_points)

    return register


def keep(signal: str, settings: Sequence[tuple[str, str]]) -> KeptOptions:
    return KeptOptions(
        settings=settings, interval_s=0.001, spans=SpanOptions(returns_traceparent=True, shown={"a": ("b",)})
    )


def test_traces_go_to_the_registered_exporter(registered: Callable[..., None]) -> None:
    made: list[KeptOptions] = []

    def read(signal: str, settings: Sequence[tuple[str, str]]) -> KeptOptions:
        assert signal == TRACES
        made.append(keep(signal, settings))
        return made[-1]

    registered(read)
    configs = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=1", "opentelemetry,key=value")
    tracing = open_tracing(trace_options(configs, {}))
    (options,), tracer = made, tracing.tracer
    assert list(options.settings) == [("key", "value")]
    assert tracing.settings.settings()["a"] == ("b",)
    assert tracer.propagates and tracer.returns_traceparent
    trace = tracer.begin(InferenceRequest("m", "", {}, lambda *_: None, 1), "m", "direct", None)
    assert trace is not None
    tracer.end_trace(trace, 2)
    (kept,) = options.opened
    eventually(lambda: kept.items == [trace], "the tracer's thread hands it over")
    assert kept.drops is tracer.drops
    shown = dict(trace_families(tracer.drops, tracing.exporter))
    assert "conch_trace_spans_total 1\n" in [line for lines in shown.values() for line in lines]
    tracer.close(PATIENCE_S)
    assert kept.closed


def test_metrics_go_to_the_registered_exporter() -> None:
    options = keep(METRICS, ())
    export = MetricsExport(options, lambda: "text")
    (kept,) = options.opened
    export.start()
    eventually(lambda: len(kept.items) > 1, "it exports at its interval")
    export.close(PATIENCE_S)
    assert kept.closed
    first, second = kept.items[:2]
    assert isinstance(first, Scrape) and first.text == "text"
    assert first.start_ns == second.start_ns <= first.time_ns <= second.time_ns
    kept.drops.add("queue_full", 3)
    lines = [line for _, lines in export_families({METRICS: kept}) for line in lines]
    assert 'conch_otlp_dropped_total{reason="queue_full",signal="metrics"} 3\n' in lines


def test_lines_of_the_log_go_to_the_registered_exporter() -> None:
    kept = Kept(DropCounter())
    handler = LogHandler(LogOptions(), StreamSink(StringIO()), True, exporter=kept)
    try:
        record = logging.makeLogRecord(
            {"name": "n", "levelno": 30, "levelname": "WARNING", "msg": "a %s", "args": ("b",), "model": "m"}
        )
        handler.emit(record)
        misfit = logging.makeLogRecord({"name": "n", "levelno": 30, "msg": "c %d", "args": ("b",)})
        handler.emit(misfit)
    finally:
        handler.close()
    first, second = kept.items
    assert isinstance(first, LogItem)
    assert (first.level_name, first.logger, first.message, first.trace_id) == ("WARNING", "n", "a b", "")
    assert first.attributes["model"] == "m"
    assert second.message == "c %d", "arguments that do not fit cost no line"


def test_without_an_exporter_nothing_is_exported(registered: Callable[..., None]) -> None:
    registered()
    with pytest.raises(UnavailableError, match="the export of logs needs an add-on"):
        read_export(LOGS, [("url", "http://c")])
