"""Facts of this machine that a measurement depends on."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_GPUS = Path("/proc/driver/nvidia/gpus")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def machine_facts() -> dict[str, Any]:
    """Processor and its flags, cores, memory, GPUs, governor, load and system; empty where unknown."""
    model, flags = platform.processor(), ""
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        model = value.strip() if key.strip() == "model name" else model
        flags = value.strip() if key.strip() == "flags" else flags
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": model,
        "cores": os.cpu_count() or 0,
        "flags": flags.split(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": [_model_of(each / "information") for each in sorted(_GPUS.glob("*"))],
        "governor": _text(_GOVERNOR).strip(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def overflows_16_bits(flags: Sequence[str]) -> bool:
    """True if a processor with these flags adds products of 8-bit numbers in 16 bits: x86 without VNNI."""
    return bool(flags) and not {"avx512_vnni", "avx_vnni"} & set(flags)


def _model_of(information: Path) -> str:
    found = (line.partition(":") for line in _text(information).splitlines())
    return next((value.strip() for key, _, value in found if key == "Model"), "")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
