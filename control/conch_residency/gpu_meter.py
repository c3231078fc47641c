"""Measures the memory that models take on GPUs with a budget.

Workers are measured by what the driver tells of each process. In this process a model has taken what the
process has more after the load, if no other load overlaps. Where the driver lists no processes at all, as in
most containers, a load has taken what the device has more.

Locks: `GpuMeter` has one, inside which the driver is read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from dataclasses import dataclass

from conch_residency.gpu_memory import GpuMemory, GpuUse


@dataclass(slots=True, eq=False)
class GpuMeasurement:
    """State of a measurement."""

    before: list[GpuUse]
    alone: bool


class GpuMeter:
    """The GPUs of one server with a budget.

    Attributes:
        devices: Their numbers; all tuples of sizes are in this order.

    Args:
        memory: Reads the memory of GPUs; None only without devices.
    """

    def __init__(self, devices: Collection[int], memory: GpuMemory | None) -> None:
        self.devices = tuple(devices)
        self._memory = memory
        self._lock = threading.Lock()
        self._open: set[GpuMeasurement] = set()

    def begin(self) -> GpuMeasurement:
        """Starts to measure a load; `end` must follow."""
        with self._lock:
            for other in self._open:
                other.alone = False
            measurement = GpuMeasurement(self._read(), not self._open)
            self._open.add(measurement)
            return measurement

    def end(self, measurement: GpuMeasurement, workers: Collection[int]) -> tuple[int | None, ...]:
        """Memory that a load has taken on each device; None where that is not known.

        Args:
            measurement: The measurement that `begin` has returned.
            workers: Process ids of the model's workers.
        """
        with self._lock:
            self._open.remove(measurement)
            after = self._read()
        return tuple(
            _taken(before, now, workers, measurement.alone)
            for before, now in zip(measurement.before, after, strict=True)
        )

    def of_workers(self, workers: Collection[int]) -> tuple[int, ...]:
        """Memory of processes on each device."""
        with self._lock:
            return tuple(_sum(each, workers) for each in self._read())

    def own(self) -> tuple[int, ...]:
        """Memory of this process on each device."""
        return self.of_workers((os.getpid(),))

    def close(self) -> None:
        """Closes the library."""
        if self._memory is not None:
            self._memory.close()

    def _read(self) -> list[GpuUse]:
        return [] if self._memory is None else [self._memory.read(each) for each in self.devices]


def _sum(use: GpuUse, pids: Collection[int]) -> int:
    return sum(use.processes.get(pid, 0) for pid in pids)


def _taken(before: GpuUse, after: GpuUse, workers: Collection[int], alone: bool) -> int | None:
    if not (before.used and after.used):
        return None  # the driver has not answered
    if not after.processes:
        return max(after.used - before.used, 0) if alone else None
    own_before, own_after = _sum(before, (os.getpid(),)), _sum(after, (os.getpid(),))
    if own_after > own_before and not alone:
        return None
    return _sum(after, workers) + max(own_after - own_before, 0)
