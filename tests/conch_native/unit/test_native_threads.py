"""Threads that instances of a library share."""

from __future__ import annotations

from conch.core.execution.placement import Placement
from conch.workers.host.native_instances import threads_of


def test_a_blocking_backend_has_a_thread_for_each_gpu() -> None:
    devices = [("CPU", 0), ("GPU", 0), ("GPU", 1), ("GPU", 0), ("CPU", 0), ("GPU", 1)]
    placements = [Placement("m_0", kind, device) for kind, device in devices]
    assert threads_of(placements, {"device_blocking": True}, "m", False) == [0, 1, 2, 1, 4, 2]
