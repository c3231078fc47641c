"""Deadlines of calls: from seconds of the wall clock to the core's monotonic nanoseconds."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from conch.frontends.grpc.adapter.grpcio_calls import StreamCall
from conch.frontends.grpc.open_calls import OpenCalls


def call_until(seconds: float) -> StreamCall:
    event = SimpleNamespace(call=None, call_details=SimpleNamespace(deadline=seconds))
    return StreamCall(event, OpenCalls())


@pytest.mark.parametrize("seconds", [float("inf"), 2.0**63])
def test_a_call_without_a_deadline(seconds: float) -> None:
    """The C core was seen to say 2**63 seconds."""
    assert call_until(seconds).deadline_ns(5) is None


@pytest.mark.parametrize("seconds", [-3.0, 0.0, 0.25, 60.0])
def test_a_call_with_one(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_000_000_000)
    deadline = call_until(1_700_000_000 + seconds).deadline_ns(10_000_000_000_000)
    assert deadline == pytest.approx(10_000_000_000_000 + seconds * 1e9, abs=1000)  # as a float has them
