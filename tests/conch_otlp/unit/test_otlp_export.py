"""The exporter against collectors that behave, misbehave and come back."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tests.support.otlp_collector import grpc_collector, http_collector
from tests.support.raw_http import DRIPS, dripping
from tests.support.servers import WAIT_S, eventually, free_port
from tests.support.tracing import TraceMaker, setting_of

from conch.core.errors import InvalidArgumentError
from conch.observability.exporters import TRACES, DropCounter
from conch.observability.tracing.trace import Trace, TraceParent
from conch_otlp.otlp_options import otlp_options

SPANS = 3
"""Spans of a request of one model."""


class Exporting:
    """An exporter with its counts."""

    def __init__(self, url: str, *pairs: tuple[str, str]) -> None:
        self.drops = DropCounter()
        given = {"url": url, "bsp_schedule_delay": "10", "timeout": "120000"} | dict(pairs)
        options = otlp_options(TRACES, list(given.items()), {})
        self.exporter = options.open_exporter(self.drops, first_pause_s=0.01)
        self._maker, self._setting = TraceMaker(), setting_of()

    def write(self, number: int, model: str = "m") -> None:
        self.exporter.export([self._maker.root(self._setting, model) for _ in range(number)])

    def lost(self) -> dict[str, int]:
        return {reason: count for reason, count in self.drops.counts().items() if count}

    def settled(self) -> int:
        """Spans whose fate is known."""
        return self.exporter.counts().taken + sum(self.lost().values())

    def close(self, seconds: float = WAIT_S) -> float:
        """Closes the exporter; returns the seconds that it took."""
        start = time.monotonic()
        self.exporter.close(start + seconds)
        return time.monotonic() - start


@contextmanager
def exporting(url: str, *pairs: tuple[str, str]) -> Iterator[Exporting]:
    made = Exporting(url, *pairs)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json", "grpc"])
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_collectors_get_all_spans(protocol: str, compression: str) -> None:
    pairs = [
        ("protocol", protocol),
        ("compression", compression),
        ("resource", "team=ä"),
        ("header", "X-Key=s"),
        ("bsp_max_export_batch_size", "9"),
    ]
    with (grpc_collector if protocol == "grpc" else http_collector)() as collector:
        with exporting(collector.url, *pairs) as made:
            made.write(10)
        assert len({span.span_id for span in collector.spans}) == 10 * SPANS
        for _, headers, request in collector.seen:
            assert {name.lower(): value for name, value in headers.items()}["x-key"] == "s"
            assert sum(len(scope.spans) for scope in request.resource_spans[0].scope_spans) <= 9
            resource = {
                each.key: each.value.string_value for each in request.resource_spans[0].resource.attributes
            }
            assert resource["team"] == "ä"
            assert resource["service.name"] == "conch"
    counts = made.exporter.counts()
    assert (counts.taken, counts.queued, made.lost()) == (10 * SPANS, 0, {})


def test_spans_that_wait_for_no_others_are_sent_alone() -> None:
    with http_collector() as collector:
        with exporting(collector.url, ("bsp_schedule_delay", "0")) as made:
            made.write(2)
        sizes = [
            sum(len(scope.spans) for scope in request.resource_spans[0].scope_spans)
            for _, _, request in collector.seen
        ]
    assert sizes == [1] * (2 * SPANS)


HTTP_TROUBLE: list[tuple[list[Any], int, dict[str, int]]] = [
    ([(503, {}), (429, {"Retry-After": "0"})], SPANS, {}),
    (["close", "close"], SPANS, {}),
    ([(502, {})] * 6, 0, {"export_failed": SPANS}),
    ([(400, {})], 0, {"rejected": SPANS}),
    ([(301, {"Location": "/"})], 0, {"rejected": SPANS}),
    ([2], 1, {"rejected": 2}),
    (["rubbish"], SPANS, {}),
]
"""Answers, the spans that count as taken, and those that count as lost."""


@pytest.mark.parametrize(("answers", "taken", "lost"), HTTP_TROUBLE)
def test_what_a_collector_answers(answers: list[Any], taken: int, lost: dict[str, int]) -> None:
    with http_collector() as collector:
        collector.answers.extend(answers)
        with exporting(collector.url) as made:
            made.write(1)
            collector.wait_seen(len(answers))
            eventually(
                lambda: made.exporter.counts().taken + sum(made.lost().values()) == SPANS, "it is settled"
            )
        assert (made.exporter.counts().taken, made.lost()) == (taken, lost)


def test_an_answer_that_can_not_be_read_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Each answer of 60,000 brackets was a traceback in the log, and its batch was lost."""
    with http_collector() as collector, exporting(collector.url, ("protocol", "http/json")) as made:
        collector.answers.extend(["rubbish", "rubbish"])
        made.write(1)
        eventually(lambda: made.settled() == SPANS, "the first is settled")
        made.write(1)
        eventually(lambda: made.settled() == 2 * SPANS, "the second is settled")
        assert (made.exporter.counts().taken, made.lost()) == (2 * SPANS, {})
    assert [record.levelname for record in caplog.records] == ["WARNING"]


GRPC_TROUBLE = [
    ([(grpc.StatusCode.UNAVAILABLE, {})], SPANS, {}),
    ([(grpc.StatusCode.RESOURCE_EXHAUSTED, {})], 0, {"rejected": SPANS}),
    ([(grpc.StatusCode.INVALID_ARGUMENT, {})], 0, {"rejected": SPANS}),
    ([1], 2, {"rejected": 1}),
]


@pytest.mark.parametrize(("answers", "taken", "lost"), GRPC_TROUBLE)
def test_what_a_collector_answers_over_grpc(answers: list[Any], taken: int, lost: dict[str, int]) -> None:
    with grpc_collector() as collector:
        collector.answers.extend(answers)
        with exporting(collector.url, ("protocol", "grpc")) as made:
            made.write(1)
            eventually(
                lambda: made.exporter.counts().taken + sum(made.lost().values()) == SPANS, "it is settled"
            )
        assert (made.exporter.counts().taken, made.lost()) == (taken, lost)


def test_a_pause_that_the_collector_asks_for_is_kept() -> None:
    with http_collector() as collector:
        collector.answers.append((429, {"Retry-After": "1"}))
        with exporting(collector.url) as made:
            start = time.monotonic()
            made.write(1)
            collector.wait_spans(SPANS)
            assert time.monotonic() - start >= 1


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_collector_that_hangs_holds_up_nothing(protocol: str) -> None:
    """10^5 traces for a queue of 10 spans: each span is counted once, and memory stays flat."""
    traces = 100_000
    with (grpc_collector if protocol == "grpc" else http_collector)() as collector:
        collector.answers.append("hang")
        made = Exporting(
            collector.url,
            ("protocol", protocol),
            ("bsp_max_queue_size", "10"),
            ("bsp_max_export_batch_size", "3"),
            ("timeout", "600000"),
        )
        made.write(1)
        collector.wait_seen(1)
        roots = [TraceMaker().root(setting_of()) for _ in range(100)]
        tracemalloc.start()
        try:
            made.exporter.export(roots)
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(traces // len(roots) - 1):
                made.exporter.export(roots)
            after, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert max(after, peak) - before < 100_000
        assert made.close(0.3) < WAIT_S
        counts, lost = made.exporter.counts(), made.lost()
        assert lost["queue_full"] == (traces - 3) * SPANS, "three traces of three spans fit"
        assert counts.taken + sum(lost.values()) == (traces + 1) * SPANS
        assert counts.queued == 0


@pytest.mark.parametrize("part", DRIPS)
def test_a_collector_that_drips_is_too_late(part: str) -> None:
    """Each byte of its answer comes in time, the answer does not: the exporter goes on."""
    with dripping(DRIPS[part]) as address:
        made = Exporting(f"http://{address}/v1/traces", ("timeout", "300"))
        made.write(1)
        eventually(lambda: made.exporter.counts().exports["retried"] > 0, "the try is given up")
        made.close(0.1)


def test_a_collector_that_goes_and_comes_back() -> None:
    port = free_port()
    made = Exporting(f"http://127.0.0.1:{port}/v1/traces")
    with http_collector(port) as collector:
        made.write(1)
        collector.wait_spans(SPANS)
    made.write(2)
    eventually(lambda: made.exporter.counts().exports["retried"] > 0, "it has tried")
    with http_collector(port) as collector:
        collector.wait_spans(2 * SPANS)
        made.close()
    assert made.exporter.counts().taken == 3 * SPANS
    assert made.lost() == {}


def trees() -> dict[str, Trace]:
    """A request of each kind."""
    maker, setting = TraceMaker(), setting_of()
    found = {"base": maker.root(setting, protocol="grpc")}
    for name in ("ensemble", "nested"):
        root = found[name] = maker.root(setting)
        root.times = None
        for _ in range(2):
            maker.child(root)
    inner = found["nested"].children[0]
    inner.times = None
    maker.child(inner)
    caller = found["caller"] = maker.root(setting, "caller")
    maker.child(caller)
    cancelled = found["cancelled"] = maker.root(setting)
    cancelled.cancelled = True
    refused = found["refused"] = maker.bare(setting, None, "m", "http")
    refused.received_ns, refused.read_ns, refused.ended_ns = 1000, 1010, 1020
    refused.error = InvalidArgumentError("no such input")
    failed = found["failed"] = maker.root(setting, protocol="grpc")
    failed.error = InvalidArgumentError("x" * 5000 + "\ud800")
    many = found["decoupled"] = maker.root(setting, protocol="grpc-stream")
    many.sends = [1090, 1092, 1093, 1095]
    continued = found["continued"] = maker.root(setting)
    continued.trace_id, continued.caller = 5, TraceParent(5, 6, True, "a=b")
    direct = found["direct"] = maker.root(setting, protocol="direct")
    direct.received_ns = direct.read_ns = 0
    direct.sends = []
    return found


def exported(layout: str, roots: Sequence[Trace]) -> Sequence[Sequence[Span]]:
    """The spans of each tree."""
    with http_collector() as collector, exporting(collector.url, ("layout", layout)) as made:
        found = []
        for root in roots:
            before = len(collector.spans)
            made.exporter.export([root])
            eventually(lambda: made.exporter.counts().queued == 0, "it is sent")
            eventually(lambda before=before: len(collector.spans) > before, "it is there")  # type: ignore[misc]
            found.append(collector.spans[before:])
        return found


SHAPES = {
    "base": ["InferRequest", "simple<InferRequest", "compute<simple"],
    "ensemble": ["InferRequest", "simple<InferRequest", *["step<simple", "compute<step"] * 2],
    "nested": [
        *("InferRequest", "simple<InferRequest"),
        *("step<simple", "step<step", "compute<step", "step<simple", "compute<step"),
    ],
    "caller": ["InferRequest", "caller<InferRequest", "compute<caller", "step<caller", "compute<step"],
    "refused": ["InferRequest"],
}


@pytest.mark.parametrize("layout", ["triton", "semconv"])
def test_spans_of_each_kind_of_request(layout: str) -> None:
    made = trees()
    for (name, root), spans in zip(made.items(), exported(layout, list(made.values())), strict=True):
        by_id = {span.span_id: span for span in spans}
        top = spans[0]
        assert len(by_id) == len(spans)
        assert {span.trace_id for span in spans} == {root.trace_id.to_bytes(16, "big")}
        assert top.parent_span_id == (b"" if root.caller is None else root.caller.span_id.to_bytes(8, "big"))
        assert {span.trace_state for span in spans} == {"a=b" if name == "continued" else ""}
        shape = [
            span.name if span is top else f"{span.name}<{by_id[span.parent_span_id].name}" for span in spans
        ]
        if layout == "triton":
            assert shape == SHAPES.get(name, SHAPES["base"]), name
            assert {span.kind for span in spans} == {Span.SPAN_KIND_SERVER}
        else:
            assert [span.kind for span in spans[1:]] == [Span.SPAN_KIND_INTERNAL] * (len(spans) - 1)
        for span in spans:
            times = [event.time_unix_nano for event in span.events]
            assert times == sorted(times)
            assert span.start_time_unix_nano <= min(times, default=span.start_time_unix_nano)
            assert max(times, default=span.end_time_unix_nano) <= span.end_time_unix_nano
        attributes = {each.key: each.value for each in top.attributes}
        failed = root.error is not None
        assert ("error.type" in attributes) == (failed or root.cancelled)
        faults = {"triton": failed, "semconv": False}  # both errors are the client's
        assert (top.status.code == Status.STATUS_CODE_ERROR) == faults[layout]
        if name == "refused":
            assert attributes["conch.error.stage"].string_value == "admission"
            assert attributes["http.response.status_code"].int_value == 400
        if name == "failed":
            assert attributes["rpc.response.status_code"].string_value == "INVALID_ARGUMENT"
            assert len(top.status.message) <= 2048
        if name == "decoupled":
            assert [event.name for event in top.events].count("GRPC_SEND_START") == 2


def test_a_trace_larger_than_a_request_is_split() -> None:
    maker, setting = TraceMaker(), setting_of()
    root = maker.root(setting)
    for _ in range(2000):
        maker.child(root, "s" * 500)
    with http_collector() as collector:
        with exporting(
            collector.url, ("bsp_max_queue_size", "10000"), ("bsp_max_export_batch_size", "5000")
        ) as made:
            made.exporter.export([root])
        assert len(collector.spans) == SPANS + 4000
        assert all(request.ByteSize() <= 4 * 2**20 for _, _, request in collector.seen)
