"""Finds the machine's GPUs through the CUDA driver, without a framework.

Queries the driver in a child process, which runs this file: a process that has initialised CUDA can't use it
in forked children, and models may fork. Device numbers are the driver's, so ``CUDA_VISIBLE_DEVICES`` holds.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
import uuid

log = logging.getLogger(__name__)

_LIBRARY = "libcuda.so.1"
_TIMEOUT_S = 60.0
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


def find_gpus(min_compute_capability: float, library: str = _LIBRARY) -> tuple[int, ...]:
    """Numbers of the GPUs with at least a compute capability; empty without a working driver."""
    try:
        capabilities = [float(line.partition(" ")[0]) for line in _query(library)]
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


def gpu_uuids(library: str = _LIBRARY) -> tuple[str, ...]:
    """The UUID of each GPU by number, as NVIDIA's tools write it; empty without a working driver."""
    try:
        return tuple(line.partition(" ")[2] for line in _query(library))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the CUDA driver can't be asked for the UUIDs of GPUs: %s", error)
        return ()


def _query(library: str) -> list[str]:
    """A line for each GPU from the child process; empty without a driver."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return []  # the usual case on machines without a GPU: costs one file look-up
    found = subprocess.run(
        [sys.executable, "-I", "-S", __file__, library],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    return found.stdout.splitlines()


def _query_driver(library: str) -> list[str]:
    """Compute capability and UUID of each GPU; empty if the driver does not work. Runs in the child."""
    driver = ctypes.CDLL(library)
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    described = []
    for number in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), number)
        driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
        identity = (ctypes.c_ubyte * 16)()
        known = hasattr(driver, "cuDeviceGetUuid") and not driver.cuDeviceGetUuid(identity, device)
        text = f"GPU-{uuid.UUID(bytes=bytes(identity))}" if known else ""
        described.append(f"{major.value}.{minor.value} {text}")
    return described


if __name__ == "__main__":
    sys.stdout.write("\n".join(_query_driver(sys.argv[1])))
