"""Times of streamed responses, as the metrics of LLMs are defined."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch_tools.perf.load.calls import LoadCall
from conch_tools.perf.load.ready_requests import ReadyRequest
from conch_tools.perf.load.recorder import Recorder
from conch_tools.perf.measure.results import Generator, Load, Point
from conch_tools.perf.measure.slices import Slice
from conch_tools.perf.measure.slo_search import Limit

_SENT_NS = 1000


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=8))
def test_times_of_a_stream(gaps: list[int]) -> None:
    counts = Slice(0)
    recorder = Recorder(0, counts.add)
    call = LoadCall(ReadyRequest(b""), _SENT_NS)
    call.sent_ns = now = _SENT_NS
    recorder.sent(now, now)
    times = []
    for gap in gaps:
        now += gap
        recorder.responded(call, now)
        call.last_ns, call.responses = now, call.responses + 1
        times.append(now)
    recorder.ended(call, "", now)
    recorder.finish()
    point = Point(Load("concurrency", 1), (counts,), 1.0, 1, Generator(1, 0, 1))
    assert point.token_rate == len(times)
    assert point.first.mean_ns == pytest.approx(times[0] - _SENT_NS, rel=0.01)
    assert point.between.count == len(times) - 1
    several = len(times) > 1
    assert (point.next_one.count, point.token.count) == (several, several)
    if several:
        assert point.next_one.mean_ns == pytest.approx(times[1] - times[0], rel=0.01)
        each = (times[-1] - times[0]) // (len(times) - 1)
        assert point.token.mean_ns == pytest.approx(each, rel=0.01, abs=1)
        assert point.between.mean_ns == pytest.approx(
            sum(b - a for a, b in pairwise(times)) / (len(times) - 1), rel=0.01, abs=1
        )
        limit = Limit.parse("itl_p50=1ms")
        assert limit.found(point) == pytest.approx(each, rel=0.05, abs=2)
