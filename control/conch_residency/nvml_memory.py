"""Reads the memory of GPUs through NVIDIA's management library."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch.process.gpu_discovery import gpu_uuids
from conch_residency.gpu_memory import GpuUse

log = logging.getLogger(__name__)

_FLAG = "--resident-gpu-memory"


class NvmlMemory:
    """A `conch_residency.gpu_memory.GpuMemory`.

    Args:
        nvml: An initialised `pynvml`.
        handles: The GPUs by their number for CUDA.
    """

    def __init__(self, nvml: Any, handles: dict[int, Any]) -> None:
        self._nvml = nvml
        self._handles = handles

    def read(self, device: int) -> GpuUse:
        """Use of a GPU; all zero while the driver does not answer."""
        handle = self._handles[device]
        try:
            used = self._nvml.nvmlDeviceGetMemoryInfo(handle).used
            listed = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._nvml.NVMLError as error:
            log.warning("the memory of GPU %d can't be read: %s", device, error)
            return GpuUse(0)
        # `usedGpuMemory` is None where the driver does not tell it.
        return GpuUse(used, {each.pid: each.usedGpuMemory for each in listed if each.usedGpuMemory})

    def close(self) -> None:
        """Closes the library."""
        self._nvml.nvmlShutdown()


def open_nvml_memory(devices: Collection[int]) -> NvmlMemory:
    """Opens the library for some GPUs, by their numbers for CUDA.

    Raises:
        InvalidArgumentError: There is no binding or driver, or no such GPU.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise InvalidArgumentError(
            f"{_FLAG} needs the module pynvml: pip install nvidia-ml-py, or leave it out"
        ) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise InvalidArgumentError(f"{_FLAG} needs a driver for NVIDIA's GPUs: {error}") from None
    try:
        # CUDA and this library number the GPUs in their own orders.
        uuids = gpu_uuids()
        handles = {}
        for device in devices:
            if device >= len(uuids):
                raise InvalidArgumentError(f"{_FLAG} names GPU {device}, and there are {len(uuids)}")
            handles[device] = nvml.nvmlDeviceGetHandleByUUID(uuids[device])
        return NvmlMemory(nvml, handles)
    except BaseException as error:  # raised again
        nvml.nvmlShutdown()
        if isinstance(error, nvml.NVMLError):
            raise InvalidArgumentError(f"{_FLAG} can't be used: {error}") from None
        raise
