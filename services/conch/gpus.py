"""Which GPUs the server may use, asked of the CUDA driver itself and of nothing heavier.

The driver is asked in a process of its own: a process that has initialised CUDA can't use it in children
that it forks, and models may fork. The numbers are the driver's, so ``CUDA_VISIBLE_DEVICES`` is respected.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys

log = logging.getLogger(__name__)

_LIBRARY = "libcuda.so.1"
_TIMEOUT_S = 60.0
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


def find_gpus(min_compute_capability: float, library: str = _LIBRARY) -> tuple[int, ...]:
    """Numbers of the GPUs with a compute capability; empty where there is no driver, or none that works.

    Args:
        min_compute_capability: The least one that will do, such as 6.0.
        library: The driver's library.
    """
    try:
        ctypes.CDLL(library)
    except OSError:
        return ()  # most machines without a GPU end here, at the cost of looking for a file
    try:
        found = subprocess.run(
            [sys.executable, "-I", "-S", __file__, library],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        capabilities = [float(line) for line in found.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning("the CUDA driver can't be asked for GPUs, so none are used: %s", error)
        return ()
    gpus: list[int] = []
    for number, capability in enumerate(capabilities):
        if capability >= min_compute_capability:
            gpus.append(number)
        else:
            log.warning(
                "GPU %d is not used: its compute capability is %s, less than %s",
                number,
                capability,
                min_compute_capability,
            )
    return tuple(gpus)


def _capabilities(library: str) -> list[str]:
    """The compute capability of every GPU; empty if the driver does not work."""
    driver = ctypes.CDLL(library)
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    capabilities = []
    for number in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), number)
        driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
        capabilities.append(f"{major.value}.{minor.value}")
    return capabilities


if __name__ == "__main__":
    sys.stdout.write("\n".join(_capabilities(sys.argv[1])))
