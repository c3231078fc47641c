"""Sampling, settings and the tracer: what is traced, and that each traced request is written once."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.servers import eventually
from tests.support.waiting import PATIENCE_S

from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.request import InferenceRequest, RunTimes
from conch.observability.exporters import DropCounter, SpanOptions
from conch.observability.tracing.trace import Trace
from conch.observability.tracing.trace_context import format_traceparent
from conch.observability.tracing.trace_options import TailRules
from conch.observability.tracing.trace_settings import OPENTELEMETRY, TraceSetting, TraceSettings, TraceValues
from conch.observability.tracing.trace_sink import TraceSink
from conch.observability.tracing.tracer import Tracer

ON = TraceValues(timestamps=True, rate=1, file="trace.json")
MODELS = ("a", "b")


class Kept(TraceSink):
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.roots: list[Trace] = []
        self.items: list[object] = []

    def write(self, roots: Sequence[Trace]) -> None:
        self.roots += roots
        self.items += roots

    def replaced(self, setting: TraceSetting) -> None:
        self.items.append(setting)


class From:
    """A call with headers."""

    client = "c"
    access = None
    read_ns = 0
    path = ""

    def __init__(self, **headers: str) -> None:
        self._headers = headers

    def header(self, name: str) -> str:
        return self._headers.get(name, "")

    def add_response_metadata(self, name: str, value: str) -> None:
        """Nothing reads it."""


def request() -> InferenceRequest:
    return InferenceRequest("a", "", {}, lambda *_: None, 1)


def begun(tracer: Tracer, model: str = "a", caller: Any = None) -> Trace | None:
    return tracer.begin(request(), model, "http", caller)


def test_one_of_so_many_is_sampled_until_the_count_is_used_up() -> None:
    tracer = Tracer(TraceSettings(replace(ON, rate=6, count=3)))
    seen = [begun(tracer, model) is not None for model in MODELS * 20]
    assert [place + 1 for place, sampled in enumerate(seen) if sampled] == [6, 12, 18]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("", *MODELS)),
            st.dictionaries(
                st.sampled_from(("trace_level", "trace_rate", "trace_count", "log_frequency")),
                st.integers(0, 3),
                min_size=1,
            ),
        ),
        max_size=12,
    )
)
def test_settings_are_those_of_a_plain_model(changes: list[tuple[str, dict[str, int]]]) -> None:
    """A model's fields come before the global ones, and these before the command line's."""
    values = {
        "trace_level": [(), ("OFF",), ("TIMESTAMPS",), ("TENSORS",)],
        "trace_rate": [(), ("1",), ("7",), ("100",)],
        "trace_count": [(), ("-1",), ("5",), ("9",)],
        "log_frequency": [(), ("0",), ("2",), ("3",)],
    }
    first = {
        "trace_level": ("TIMESTAMPS",),
        "trace_rate": ("1",),
        "trace_count": ("-1",),
        "log_frequency": ("0",),
    }
    made = TraceSettings(ON)
    own: dict[str, dict[str, tuple[str, ...]]] = {"": {}, "a": {}, "b": {}}
    for model, change in changes:
        given_ = {name: values[name][number] for name, number in change.items()}
        made.update(given_, model)
        own[model].update(given_)
        own[model] = {name: value for name, value in own[model].items() if value}
        for each, fields in own.items():
            expected = {**first, **own[""], **fields}
            assert {name: made.settings(each)[name] for name in first} == expected
    levels = [{**first, **own[""], **own[model]}["trace_level"] for model in own]
    assert made.on == any(level != ("OFF",) for level in levels)


@pytest.mark.parametrize(
    ("values", "mode", "change", "reason"),
    [
        (TraceValues(), "triton", {"trace_level": ["TIMESTAMPS"]}, "trace file name is not given"),
        (ON, "triton", {"trace_rate": ["0"]}, "sample rate must be non-zero"),
        (ON, "triton", {"trace_count": ["0"]}, "no traces are left of trace_count; set it, too"),
        (
            ON,
            OPENTELEMETRY,
            {"trace_level": ["TENSORS"]},
            "Tensor level tracing is not supported by the mode",
        ),
    ],
)
def test_settings_that_would_trace_nothing(
    values: TraceValues, mode: str, change: dict[str, list[str]], reason: str
) -> None:
    made = TraceSettings(values, mode)
    before = made.settings()
    with pytest.raises(InvalidArgumentError, match=f"^Attempting to set invalid trace setting :{reason}"):
        made.update(change)
    assert made.settings() == before


def test_models_that_seed_random_repeat_no_id() -> None:
    tracer = Tracer(TraceSettings(ON), spans=SpanOptions(batch_spans=True))
    ids: list[int | str] = []
    for _ in range(2):
        random.seed(7)
        trace, times = begun(tracer), RunTimes(0, 2)
        assert trace is not None
        child = tracer.child(trace, "model-call")
        tracer.join_batch(trace, times)
        assert times.batch is not None
        ids += trace.trace_id, trace.span_id, child.span_id, times.batch.trace_id, times.batch.span_id
    assert len(set(ids)) == len(ids)


def test_callers_decide_in_mode_opentelemetry() -> None:
    made = TraceSettings(replace(ON, rate=2), OPENTELEMETRY)
    sampled, unsampled = (From(traceparent=format_traceparent(5, 6, flag)) for flag in (True, False))
    tracer = Tracer(made, spans=SpanOptions())
    traces = [begun(tracer, caller=caller) for caller in (sampled, None, unsampled, unsampled)]
    assert [trace is not None for trace in traces] == [True, True, False, True]
    assert traces[0] is not None and traces[1] is not None
    assert (traces[0].trace_id, traces[0].caller) == (5, (5, 6, True, ""))
    assert traces[1].caller is None
    follows = SpanOptions(follows_unsampled=True)
    always = Tracer(TraceSettings(replace(ON, rate=0), OPENTELEMETRY), spans=follows)
    assert begun(always, caller=unsampled) is not None
    assert begun(always, caller=From(traceparent="00-x")) is None


def by_ratio(ratio: float, **changes: Any) -> Tracer:
    values = replace(ON, **{"rate": 0, **changes})
    return Tracer(TraceSettings(values, OPENTELEMETRY), spans=SpanOptions(ratio=ratio))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=2), st.integers(1, 2**72 - 1), st.integers(0, 2**56 - 1)
)
def test_a_ratio_samples_that_share_of_trace_ids(ratios: list[float], high: int, first: int) -> None:
    """Whichever server is asked: one with a smaller ratio samples no trace that another one does not."""
    number = 200
    ids = [high << 56 | (first + place * 2**56 // number) % 2**56 for place in range(number)]
    lesser, greater = sorted(ratios)
    sampled = {}
    for ratio in (lesser, greater):
        callers = {id_: From(traceparent=format_traceparent(id_, 6, False)) for id_ in ids}
        tracer = by_ratio(ratio)
        sampled[ratio] = {id_ for id_, caller in callers.items() if begun(tracer, caller=caller)}
        assert abs(len(sampled[ratio]) - ratio * number) <= 1
    assert sampled[lesser] <= sampled[greater]


def test_a_ratio_samples_requests_without_a_caller_by_the_ids_that_they_get() -> None:
    number, ratio = 2000, 0.25
    one, other = by_ratio(ratio), by_ratio(ratio)
    traces = [trace for _ in range(number) if (trace := begun(one)) is not None]
    assert abs(len(traces) - number * ratio) < 6 * (number * ratio * (1 - ratio)) ** 0.5
    for trace in traces:
        assert trace.reason == "sampled"
        assert begun(other, caller=From(traceparent=format_traceparent(trace.trace_id, 6, False)))


def test_what_goes_with_a_ratio() -> None:
    """Callers that sample, a level, a count, a rate of a model, and what is kept after the fact."""
    least, most = (From(traceparent=format_traceparent(1 << 56 | low, 6, False)) for low in (0, 2**56 - 1))
    assert begun(by_ratio(1e-9), caller=From(traceparent=format_traceparent(1 << 56, 6, True)))
    assert not begun(by_ratio(1e-9), caller=least) and begun(by_ratio(1e-9), caller=most)
    assert begun(by_ratio(1.0), caller=least)
    assert not begun(by_ratio(1.0, timestamps=False), caller=most)
    counted = by_ratio(1.0, count=2)
    assert [begun(counted) is not None for _ in range(3)] == [True, True, False]
    own = TraceSettings(replace(ON, rate=0), OPENTELEMETRY)
    own.update({"trace_rate": ["2"]}, "b")
    tracer = Tracer(own, spans=SpanOptions(ratio=1.0))
    assert [begun(tracer, "b") is not None for _ in range(4)] == [False, True, False, True]
    assert begun(tracer)
    unsampled = TraceSettings(replace(ON, rate=0), OPENTELEMETRY)
    tail = Tracer(unsampled, tail=TailRules(failed=True), spans=SpanOptions(ratio=0.5))
    kept = [begun(tail, caller=caller) for caller in (least, most)]
    assert [trace and trace.reason for trace in kept] == ["", "sampled"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=8), st.randoms())
def test_each_traced_request_is_written_once(cases: list[tuple[int, bool, bool]], random: Any) -> None:
    """Whatever subrequests it has, in any order of their ends, and those that never end."""
    kept = Kept()
    tracer = Tracer(TraceSettings(ON), [kept])
    roots, ends = [], []
    for children, failed, lost in cases:
        root = begun(tracer)
        assert root is not None
        root.error = InternalError("no") if failed else None
        made = [tracer.child(root, "ensemble-step") for _ in range(children)]
        roots.append(root)
        ends += [root, *made[:-1]] if lost else [root, *made]
    random.shuffle(ends)
    for trace in ends:
        tracer.end_trace(trace, 9)
    tracer.close(PATIENCE_S)
    assert sorted(kept.roots, key=id) == sorted(roots, key=id)
    numbers = [trace.number for root in roots for trace in (root, *root.children)]
    assert len(set(numbers)) == len(numbers)
    assert {trace.trace_id for root in roots for trace in root.children} <= {root.trace_id for root in roots}


def test_a_tree_waits_for_what_goes_on() -> None:
    kept = Kept()
    tracer = Tracer(TraceSettings(ON), [kept])
    first, second = begun(tracer), begun(tracer)
    assert first is not None and second is not None
    late = tracer.child(first, "model-call")
    now = 10**18  # it has only just ended
    tracer.end_trace(first, now)
    tracer.end_trace(second, now)
    eventually(lambda: kept.roots == [second], "the complete one is written")
    tracer.end_trace(late, now)
    eventually(lambda: kept.roots == [second, first], "the other one, too")
    tracer.close(PATIENCE_S)


def test_slow_and_failed_requests_are_kept() -> None:
    kept, drops = Kept(), DropCounter()
    values = replace(ON, rate=1000)
    tracer = Tracer(TraceSettings(values), [kept], drops, TailRules(slow_ns=100, failed=True, limit=2))
    for error, end_ns in ((None, 50), (InternalError("no"), 50), (None, 5000), (None, 6000)):
        trace = begun(tracer)
        assert trace is not None
        trace.received_ns, trace.error = 1, error
        tracer.end_trace(trace, end_ns)
    tracer.close(PATIENCE_S)
    assert [trace.reason for trace in kept.roots] == ["failed", "slow"]
    assert drops.counts()["limit"] == 1


def test_a_replaced_setting_comes_after_its_traces() -> None:
    kept = Kept()
    made = TraceSettings(ON)
    tracer = Tracer(made, [kept])
    before, setting = begun(tracer), made.of("a")
    assert before is not None
    tracer.end_trace(before, 1)
    made.update({"trace_rate": ["1"], "trace_count": ["5"]})
    after = begun(tracer)
    assert after is not None
    tracer.end_trace(after, 2)
    tracer.close(PATIENCE_S)
    assert kept.items == [before, setting, after]


def test_what_a_queue_does_not_take_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conch.observability.tracing.tracer._MOST_QUEUED", 10)
    drops, blocked, go = DropCounter(), threading.Event(), threading.Event()

    class Slow(Kept):
        def write(self, roots: Sequence[Trace]) -> None:
            blocked.set()
            assert go.wait(PATIENCE_S)
            super().write(roots)

    kept = Slow()
    tracer = Tracer(TraceSettings(ON), [kept], drops)
    number = 0
    while not blocked.is_set() or number < 1000:
        trace = begun(tracer)
        assert trace is not None
        tracer.end_trace(trace, 1)
        number += 1
    go.set()
    tracer.close(PATIENCE_S)
    assert len(kept.roots) + drops.counts()["queue_full"] == number
