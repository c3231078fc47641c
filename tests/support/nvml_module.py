"""A stand-in for the module ``pynvml``, put before a server: one GPU that tells everything."""

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """Error of the real module."""


def nvmlInit() -> Any:
    """Nothing to begin."""


def nvmlShutdown() -> Any:
    """Nothing to end."""


def nvmlDeviceGetCount() -> Any:
    """One GPU."""
    return 1


def nvmlDeviceGetHandleByIndex(number: int) -> Any:
    """Its number."""
    return number


def nvmlDeviceGetUUID(gpu: int) -> Any:
    """Its name."""
    return "GPU-1"


def nvmlDeviceGetUtilizationRates(gpu: int) -> Any:
    """In percent."""
    return SimpleNamespace(gpu=50)


def nvmlDeviceGetMemoryInfo(gpu: int) -> Any:
    """In bytes."""
    return SimpleNamespace(total=1 << 30, used=1 << 20)


def nvmlDeviceGetPowerUsage(gpu: int) -> Any:
    """In milliwatts."""
    return 50_000


def nvmlDeviceGetEnforcedPowerLimit(gpu: int) -> Any:
    """In milliwatts."""
    return 300_000


def nvmlDeviceGetTotalEnergyConsumption(gpu: int) -> Any:
    """In millijoules."""
    return 1_000
