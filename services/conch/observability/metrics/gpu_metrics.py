"""GPU metrics from NVIDIA's management library, if it and `pynvml` are installed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from conch.observability.metrics.metric_families import Family, sample

log = logging.getLogger(__name__)

_UTILIZATION = Family("nv_gpu_utilization", "gauge", "GPU utilization rate [0.0 - 1.0)")
_TOTAL = Family("nv_gpu_memory_total_bytes", "gauge", "GPU total memory, in bytes")
_USED = Family("nv_gpu_memory_used_bytes", "gauge", "GPU used memory, in bytes")
_POWER = Family("nv_gpu_power_usage", "gauge", "GPU power usage in watts")
_LIMIT = Family("nv_gpu_power_limit", "gauge", "GPU power management limit in watts")
_ENERGY = Family(
    "nv_energy_consumption", "counter", "GPU energy consumption in joules since the Triton Server started"
)
GPU_FAMILIES = (_UTILIZATION, _TOTAL, _USED, _POWER, _LIMIT, _ENERGY)


class GpuMetrics:
    """Reads all GPUs through an initialised binding; leaves out values that a GPU does not give."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._gpus = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        self._uuids = [_text(nvml.nvmlDeviceGetUUID(gpu)) for gpu in self._gpus]
        self._energy_before = [self._value(self._joules, gpu) for gpu in self._gpus]

    def __call__(self) -> list[tuple[Family, list[str]]]:
        """The families with their samples."""
        found: dict[Family, list[str]] = {family: [] for family in GPU_FAMILIES}
        for gpu, uuid, energy_before in zip(self._gpus, self._uuids, self._energy_before, strict=True):
            memory = self._value(self._memory, gpu)
            energy = self._value(self._joules, gpu)
            values = {
                _UTILIZATION: self._value(self._utilization, gpu),
                _TOTAL: None if memory is None else memory[0],
                _USED: None if memory is None else memory[1],
                _POWER: self._value(self._watts, gpu),
                _LIMIT: self._value(self._watts_allowed, gpu),
                _ENERGY: None if energy is None or energy_before is None else energy - energy_before,
            }
            for family, value in values.items():
                if value is not None:
                    found[family].append(sample(family.name, value, {"gpu_uuid": uuid}))
        return list(found.items())

    def loads(self) -> list[dict[str, Any]]:
        """UUID, utilisation (0 to 1), used and total memory in bytes of each GPU; None where unknown."""
        found = []
        for gpu, uuid in zip(self._gpus, self._uuids, strict=True):
            total, used = self._value(self._memory, gpu) or (None, None)
            found.append(
                {"uuid": uuid, "use": self._value(self._utilization, gpu), "used": used, "total": total}
            )
        return found

    def close(self) -> None:
        """Closes the library."""
        self._nvml.nvmlShutdown()

    def _value(self, read: Callable[[Any], Any], gpu: Any) -> Any:
        try:
            return read(gpu)
        except self._nvml.NVMLError:
            return None  # this GPU does not support it

    def _utilization(self, gpu: Any) -> float:
        return float(self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100)

    def _memory(self, gpu: Any) -> tuple[int, int]:
        info = self._nvml.nvmlDeviceGetMemoryInfo(gpu)
        return info.total, info.used

    def _watts(self, gpu: Any) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(gpu) / 1000)

    def _watts_allowed(self, gpu: Any) -> float:
        return float(self._nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000)

    def _joules(self, gpu: Any) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000)


def open_gpus() -> GpuMetrics | None:
    """The GPUs of this machine; None without the binding, the library or a GPU."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        log.debug("no metrics of GPUs: there is no module pynvml")
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.debug("no metrics of GPUs: %s", error)
        return None
    try:
        return GpuMetrics(nvml)
    except nvml.NVMLError as error:
        log.warning("no metrics of GPUs: %s", error)
        nvml.nvmlShutdown()
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # older bindings return bytes
