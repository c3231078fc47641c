"""Stages of traces, and their statistics.

The stages of a request follow each other; stages that a trace has no stamps for are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conch.observability.tracing.trace_reader import ReadTrace

STAGES = (
    "total",
    "receive",
    "front end",
    "request",
    "queue",
    "input",
    "infer",
    "output",
    "steps",
    "overhead",
    "send",
)
"""Names of stages, in the order of tables."""

_SPANS = {
    "receive": ("HTTP_RECV_START", "HTTP_RECV_END"),
    "queue": ("QUEUE_START", "COMPUTE_START"),
    "input": ("COMPUTE_START", "COMPUTE_INPUT_END"),
    "infer": ("COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
    "output": ("COMPUTE_OUTPUT_START", "COMPUTE_END"),
}
# Triton's GRPC_WAITREAD_START is long before the request.
_BEGINNINGS = ("HTTP_RECV_START", "GRPC_WAITREAD_END", "REQUEST_START")
_ENDS = ("HTTP_SEND_END", "GRPC_SEND_END", "REQUEST_END")
_NOT_OF_THE_REQUEST = "GRPC_WAITREAD_START"


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of one stage; nanoseconds."""

    count: int
    mean: float
    p50: int
    p99: int
    max: int


Summary = dict[tuple[str, int], dict[str, Statistics]]


def extent(trace: ReadTrace) -> tuple[int, int] | None:
    """Start and end of a trace; None without stamps."""
    own = [ns for name, ns in trace.stamps if name != _NOT_OF_THE_REQUEST]
    if not own:
        return None
    start = next((ns for name in _BEGINNINGS if (ns := trace.first(name)) is not None), own[0])
    end = next((ns for name in _ENDS if (ns := trace.last(name)) is not None), own[-1])
    return start, max(start, end)


def spans(trace: ReadTrace) -> list[tuple[str, int, int]]:
    """The stages of a trace that have a place in time: name, start, end."""
    found = []
    for name, (first, second) in _SPANS.items():
        start, end = trace.first(first), trace.last(second)
        if start is not None and end is not None:
            found.append((name, start, max(start, end)))
    start = None
    for name, ns in trace.stamps:
        if name.endswith("_SEND_START"):
            start = ns
        elif name.endswith("_SEND_END") and start is not None:
            found.append(("send", start, ns))
            start = None
    return found


def stages(trace: ReadTrace) -> dict[str, int]:
    """Nanoseconds of each stage that a trace has.

    ``overhead`` is what is left of the request without queue and computation, or without the steps of an
    ensemble; ``front end`` what is left of the total without receiving, sending and the request.
    """
    whole = extent(trace)
    if whole is None:
        return {}
    found = {"total": whole[1] - whole[0]}
    for name, start, end in spans(trace):
        found[name] = found.get(name, 0) + end - start
    handed, let_go = trace.first("REQUEST_START"), trace.last("REQUEST_END")
    if handed is None or let_go is None:
        return found
    found["request"] = let_go - handed
    if trace.first("HTTP_RECV_START") is not None or trace.first("GRPC_WAITREAD_END") is not None:
        # The core may let go of a request after its response was sent.
        parts = [(start, end) for name, start, end in spans(trace) if name in ("receive", "send")]
        parts = [(start, min(end, whole[1])) for start, end in [*parts, (handed, let_go)]]
        found["front end"] = found["total"] - _covered(parts)
    computed = trace.first("COMPUTE_START"), trace.last("COMPUTE_END")
    if computed[0] is not None and computed[1] is not None:
        within = found.get("queue", 0) + computed[1] - computed[0]
    else:
        within = _covered([span for child in trace.children if (span := extent(child)) is not None])
        if trace.children:
            found["steps"] = within
    found["overhead"] = max(found["request"] - within, 0)
    return found


def _covered(intervals: list[tuple[int, int]]) -> int:
    """Nanoseconds in at least one interval."""
    total, reached = 0, 0
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


def summarize(traces: Iterable[ReadTrace]) -> Summary:
    """Statistics of each stage, by model and version; traces without a model are left out."""
    lengths: dict[tuple[str, int], dict[str, list[int]]] = {}
    for trace in traces:
        if trace.model:
            of_model = lengths.setdefault((trace.model, trace.version), {})
            for name, ns in stages(trace).items():
                of_model.setdefault(name, []).append(ns)
    return {
        key: {name: _statistics(of_model[name]) for name in STAGES if name in of_model}
        for key, of_model in sorted(lengths.items())
    }


def _statistics(lengths: list[int]) -> Statistics:
    lengths.sort()
    count = len(lengths)
    return Statistics(
        count, sum(lengths) / count, _percentile(lengths, 50), _percentile(lengths, 99), lengths[-1]
    )


def _percentile(ordered: Sequence[int], percent: int) -> int:
    """The nearest rank."""
    return ordered[-(-len(ordered) * percent // 100) - 1]


def slowest(traces: Iterable[ReadTrace], number: int) -> list[tuple[ReadTrace, dict[str, int]]]:
    """The clients' requests that took longest, with their stages."""
    found = [(trace, stages(trace)) for trace in traces if trace.model and trace.parent is None]
    found = [(trace, of_trace) for trace, of_trace in found if of_trace]
    found.sort(key=lambda each: -each[1]["total"])
    return found[:number]
