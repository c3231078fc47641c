"""Budgets of GPUs: measurements of loads, and an agent whose models take memory of a stand-in for a GPU."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from tests.support.servers import eventually
from tests.support.sites import CONFIG, WAIT_S
from tests.support.waiting import PATIENCE_S

from conch.core.cold_models import resident
from conch.core.errors import ModelMemoryError
from conch.core.execution.placement import Devices
from conch_control.lifecycle.residency import ResidencyKind
from conch_residency.gpu_memory import GpuUse
from conch_residency.gpu_meter import GpuMeter
from conch_residency.residency import OnDemandResidency
from conch_residency.residency_options import ResidencyOptions

if TYPE_CHECKING:
    from tests.support.sites import Site

    from conch.core.registry import Registry
    from conch_control.control_options import ControlOptions
    from conch_control.lifecycle.resident_loads import ResidentLoads
    from conch_control.repository.repositories import Repositories

MB = 1_000_000
OWN, WORKER, OTHER = os.getpid(), 1_000_001, 1_000_002
GPU_MODEL = """
    instance_group {{ kind: KIND_GPU gpus: 0 count: 1 }}
    parameters {{ key: "CONCH_GPU_MEMORY_MB" value {{ string_value: "{0}" }} }}
"""


class FakeGpu:
    """A GPU whose use the test sets."""

    def __init__(self) -> None:
        self.use = GpuUse(500 * MB, {OTHER: 400 * MB})
        self.closed = False

    def read(self, device: int) -> GpuUse:
        return self.use

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class WithGpu(ResidencyKind):
    """A residency that measures a stand-in."""

    gpu: FakeGpu

    def open(
        self, options: ControlOptions, registry: Registry, repositories: Repositories, loads: ResidentLoads
    ) -> OnDemandResidency:
        own = ResidencyOptions(gpu_memory={0: 100 * MB}, min_resident_s=0.0, cold_start_timeout_s=PATIENCE_S)
        return OnDemandResidency(options, own, registry, repositories, loads, gpu_memory=self.gpu)


def test_a_load_has_taken_what_its_processes_have_more() -> None:
    gpu = FakeGpu()
    meter = GpuMeter((0,), gpu)
    gpu.use = GpuUse(600, {OTHER: 400, OWN: 50})
    load = meter.begin()
    gpu.use = GpuUse(900, {OTHER: 500, OWN: 70, WORKER: 30})
    assert meter.end(load, {WORKER}) == (50,)
    first, second = meter.begin(), meter.begin()
    gpu.use = GpuUse(900, {OTHER: 500, OWN: 70, WORKER: 40})
    assert meter.end(first, {WORKER}) == (40,), "workers are exact, though another load overlaps"
    gpu.use = GpuUse(900, {OTHER: 500, OWN: 90})
    assert meter.end(second, ()) == (None,)
    assert (meter.of_workers({OTHER}), meter.own()) == ((500,), (90,))


def test_without_processes_the_device_is_measured() -> None:
    gpu = FakeGpu()
    meter = GpuMeter((0,), gpu)
    gpu.use = GpuUse(600)
    load = meter.begin()
    gpu.use = GpuUse(640)
    assert meter.end(load, ()) == (40,)
    first, second = meter.begin(), meter.begin()
    assert (meter.end(first, ()), meter.end(second, ())) == ((None,), (None,))
    load, gpu.use = meter.begin(), GpuUse(0)  # the driver does not answer
    assert meter.end(load, ()) == (None,)


def test_models_of_a_gpu_stay_within_its_budget(site: Site) -> None:
    """Each takes 30 MB, though its config says 10: of 100 MB four are too many, as a measurement shows."""
    measuring = threading.Event()

    class Growing(FakeGpu):
        def read(self, device: int) -> GpuUse:
            loaded = [spec.name for spec in site.backend.loaded if spec.name != "host"]
            taken = 30 * MB * (len(loaded) - len(site.backend.closed))
            if closing:
                after.append(taken)
            elif residency.counts().evictions and not measuring.is_set():
                measuring.set()
                eventually(lambda: closing and not closing[0].is_alive(), "the model goes meanwhile")
            return GpuUse(500 * MB + taken, {OTHER: 400 * MB, OWN: taken})

    class Closed(list[str]):
        def append(self, label: str) -> None:
            assert label != "a:1" or measuring.wait(PATIENCE_S)
            super().append(label)
            closing.append(threading.current_thread())

    closing: list[threading.Thread] = []
    after: list[int] = []
    gpu, site.backend.closed = Growing(), Closed()
    for name in "abcd":
        site.model(name, config=CONFIG + GPU_MODEL.format(10))
    site.model("large", config=CONFIG + GPU_MODEL.format(101))
    site.model("host")
    agent = site.agent("on-demand", residency=WithGpu(gpu), devices=Devices((0,)))
    assert isinstance(agent.residency, OnDemandResidency)
    residency = agent.residency
    assert agent.start() == []
    for name in ("host", "a", "b", "c"):
        assert resident(lambda name=name: site.send(name)).error() is None  # type: ignore[misc]
    assert sum(each.bytes["gpu:0"] for each in residency.counts().models.values()) == 90 * MB
    assert resident(lambda: site.send("d")).error() is None
    eventually(lambda: len(after) > 1, "one has gone, and measurements have followed")
    assert residency.counts().evictions == {"memory": 1}
    assert {name for name, entry in site.registry.entries.items() if entry.ready} == {"host", "b", "c", "d"}
    assert resident(lambda: site.send("a")).error() is None  # its size is known now
    assert residency.counts().evictions == {"memory": 1, "room": 1}
    assert sum(each.bytes["gpu:0"] for each in residency.counts().models.values()) == 90 * MB
    with pytest.raises(ModelMemoryError, match=r"'large': it needs 101 MB of GPU 0, .* have 100 MB"):
        resident(lambda: site.send("large"))
    assert agent.close(WAIT_S)
    assert gpu.closed
