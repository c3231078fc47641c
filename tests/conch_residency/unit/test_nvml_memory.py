"""Memory of GPUs by process, with a stand-in for the module ``pynvml``."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from conch.core.errors import InvalidArgumentError
from conch_residency import nvml_memory
from conch_residency.gpu_memory import GpuUse


class FakeNvml(SimpleNamespace):
    """A library that numbers two GPUs the other way round than CUDA; it can lose the second one."""

    class NVMLError(Exception):
        """Error of the real module."""

    def __init__(self) -> None:
        super().__init__(works=True, open=0, lost=False)

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return {"GPU-a": 1, "GPU-b": 0}[uuid]

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        if self.lost and gpu == 0:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(used=100 + gpu)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> Any:
        return [SimpleNamespace(pid=7, usedGpuMemory=60), SimpleNamespace(pid=8, usedGpuMemory=None)][
            : 1 + gpu
        ]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    library = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(nvml_memory, "gpu_uuids", lambda: ("GPU-a", "GPU-b"))
    return library


def test_gpus_are_read_by_their_number_for_cuda(nvml: FakeNvml) -> None:
    memory = nvml_memory.open_nvml_memory((0, 1))
    assert memory.read(0) == GpuUse(101, {7: 60})
    assert memory.read(1) == GpuUse(100, {7: 60})
    nvml.lost = True
    assert memory.read(1) == GpuUse(0)
    memory.close()
    assert nvml.open == 0


def test_a_budget_needs_the_library_a_driver_and_the_gpu(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgumentError, match="--resident-gpu-memory names GPU 2, and there are 2"):
        nvml_memory.open_nvml_memory((2,))
    assert nvml.open == 0
    nvml.works = False
    with pytest.raises(InvalidArgumentError, match="needs a driver for NVIDIA's GPUs: Driver Not Loaded"):
        nvml_memory.open_nvml_memory((0,))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(InvalidArgumentError, match="pip install nvidia-ml-py"):
        nvml_memory.open_nvml_memory((0,))
