"""A stand-in for the module ``pynvml``, put before a server: one GPU that tells everything."""

from types import SimpleNamespace


class NVMLError(Exception):
    """What the real one raises."""


def nvmlInit():
    """Nothing to begin."""


def nvmlShutdown():
    """Nothing to end."""


def nvmlDeviceGetCount():
    """One GPU."""
    return 1


def nvmlDeviceGetHandleByIndex(number):
    """Its number."""
    return number


def nvmlDeviceGetUUID(gpu):
    """Its name."""
    return "GPU-1"


def nvmlDeviceGetUtilizationRates(gpu):
    """In percent."""
    return SimpleNamespace(gpu=50)


def nvmlDeviceGetMemoryInfo(gpu):
    """In bytes."""
    return SimpleNamespace(total=1 << 30, used=1 << 20)


def nvmlDeviceGetPowerUsage(gpu):
    """In milliwatts."""
    return 50_000


def nvmlDeviceGetEnforcedPowerLimit(gpu):
    """In milliwatts."""
    return 300_000


def nvmlDeviceGetTotalEnergyConsumption(gpu):
    """In millijoules."""
    return 1_000
