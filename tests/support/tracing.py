"""Trees of traces made by hand, and the rules of Triton's `trace_summary.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import count
from typing import Any

from conch.core.request import RunTimes
from conch.observability.tracing.trace import TensorRecord, Trace
from conch.observability.tracing.trace_settings import TraceSetting, TraceValues

Spans = dict[tuple[str, int], dict[str, list[int]]]

_FRONT_ENDS = {
    "HTTP": ("HTTP_RECV_START", {"receive": ("HTTP_RECV_START", "HTTP_RECV_END")}),
    "GRPC": ("GRPC_WAITREAD_START", {"receive": ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END")}),
}
_CORE = {
    "queue": ("QUEUE_START", "COMPUTE_START"),
    "compute": ("COMPUTE_START", "COMPUTE_END"),
    "input": ("COMPUTE_START", "COMPUTE_INPUT_END"),
    "infer": ("COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
    "output": ("COMPUTE_OUTPUT_START", "COMPUTE_END"),
}


def setting_of(**values: Any) -> TraceSetting:
    """A setting that traces times of each request unless told otherwise."""
    return TraceSetting(TraceValues(**{"timestamps": True, "rate": 1, **values}))


class TraceMaker:
    """Makes traces with numbers that count up, as the tracer does."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def root(
        self, setting: TraceSetting, model: str = "simple", protocol: str = "http", start: int = 1000
    ) -> Trace:
        """A request that ran, with a time every 10 ns."""
        trace = self.bare(setting, None, model, protocol)
        trace.received_ns, trace.read_ns = start, start + 10
        self.run(trace, start + 20)
        trace.sends = [start + 90, start + 100]
        return trace

    def child(self, parent: Trace, model: str = "step", start: int = 1040) -> Trace:
        """A subrequest that ran."""
        return self.run(self.bare(parent.setting, parent, model, "ensemble-step"), start)

    def bare(self, setting: TraceSetting, parent: Trace | None, model: str, protocol: str) -> Trace:
        """A trace without times."""
        number = next(self._numbers)
        trace = Trace(number, setting, parent, protocol, 2**127 + number, 2**63 + number)
        trace.model, trace.version, trace.reason = model, 1, "sampled"
        return trace

    @staticmethod
    def run(trace: Trace, start: int) -> Trace:
        """Gives a trace the times of the core."""
        trace.started_ns, trace.queued_ns = start, start + 10
        trace.times = RunTimes(1, start + 20)
        trace.times.input_end_ns, trace.times.output_start_ns = start + 30, start + 40
        trace.times.end_ns = start + 50
        trace.responded_ns = start + 55
        trace.ended_ns = start + 60
        return trace


def tensor(activity: str, name: str, datatype: str, shape: tuple[int, ...], data: bytes) -> TensorRecord:
    """A record of a tensor that was queued (``in``) or made (``out``)."""
    names = {"in": "TENSOR_QUEUE_INPUT", "out": "TENSOR_BACKEND_OUTPUT"}
    return TensorRecord(names[activity], name, datatype, shape, data)


def triton_summary(records: Iterable[dict[str, Any]], front_end: str) -> Spans:
    """Nanoseconds of each span of each trace of a front end, by model and version.

    The rules of Triton's script: it fails for a span without an end, or with one before its start, and counts
    each name with its last value.
    """
    ordered = sorted(records, key=lambda record: record["id"])
    mark, receive = _FRONT_ENDS[front_end]
    taken: set[int] = set()
    for record in ordered:
        if "parent_id" in record:
            if record["parent_id"] in taken:
                taken.add(record["id"])
        elif any(mark in stamp["name"] for stamp in record.get("timestamps", ())):
            taken.add(record["id"])
    models: dict[int, tuple[str, int]] = {}
    times: dict[int, dict[str, int]] = defaultdict(dict)
    for record in ordered:
        if record["id"] not in taken:
            continue
        if "model_name" in record:
            models[record["id"]] = (record["model_name"], record["model_version"])
        for stamp in record.get("timestamps", ()):
            times[record["id"]][stamp["name"]] = stamp["ns"]
    spans: Spans = defaultdict(lambda: defaultdict(list))
    for number, stamps in times.items():
        if "REQUEST_START" not in stamps or "REQUEST_END" not in stamps:
            continue
        wanted = {"request": ("REQUEST_START", "REQUEST_END")}
        if mark in stamps and f"{front_end}_SEND_END" in stamps:
            wanted |= receive
            wanted["total"] = (mark, f"{front_end}_SEND_END")
            wanted["send"] = (f"{front_end}_SEND_START", f"{front_end}_SEND_END")
        wanted |= {name: ends for name, ends in _CORE.items() if set(ends) <= stamps.keys()}
        for name, (start, end) in wanted.items():
            assert stamps[end] >= stamps[start], f"end timestamp {end} < start timestamp {start}"
            spans[models[number]][name].append(stamps[end] - stamps[start])
    return spans
