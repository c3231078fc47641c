"""Limits of the models in memory. Imports little: `conch config` reads them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from conch.settings.option import FlagError, option
from conch.settings.value_types import DURATION, INTERVAL, NATURAL, TEXT, ValueType

_UNITS = {"": 1, "MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}


def _memory(text: str) -> int | str:
    """Bytes, or a percentage of the memory that the process may use, which is looked up later."""
    if text.endswith("%"):
        percent = text[:-1]
        if not (percent.isascii() and percent.isdecimal() and 1 <= int(percent) <= 100):
            raise argparse.ArgumentTypeError(f"must be bytes, or from 1% to 100%, got '{text}'")
        return text
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"must be bytes above 0, or a percentage such as 80%, got '{text}'")
    return int(text)


def _gpu_memory(texts: Iterable[str]) -> Mapping[int, int]:
    """Budgets by GPU. Raises FlagError: one is malformed."""
    budgets: dict[int, int] = {}
    for text in texts:
        found = re.fullmatch(r"([0-9]{1,3}):([0-9]{1,15})([A-Za-z]*)", text)
        size = 0 if found is None else int(found[2]) * _UNITS.get(found[3], 0)
        if found is None or not size:
            raise FlagError(
                f"--resident-gpu-memory must be <gpu>:<size>, such as 0:60GB, with a size above 0 in bytes, "
                f"MB, GB, MiB or GiB, got '{text}'"
            )
        if int(found[1]) in budgets:
            raise FlagError(f"--resident-gpu-memory has two sizes for GPU {int(found[1])}: give one")
        budgets[int(found[1])] = size
    return budgets


@dataclass(frozen=True, slots=True)
class ResidencyOptions:
    """Limits of the models in memory in on-demand mode.

    Attributes:
        memory: Memory of all models in bytes, or a percentage of what the process may use.
        gpu_memory: Memory of all models on some GPUs in bytes, by the GPU's number; others have no limit.
        models: Most models in memory; 0 for no limit.
        cold_start: ``wait``: requests wait for a load; ``reject``: they are refused, and have it done.
        cold_start_timeout_s: Longest wait of a request for a load.
        cold_queue_size: Most requests that wait for one model; 0 for no limit.
        cold_queue_bytes: Most bytes of these requests; 0 for no limit.
        idle_s: Time without use after which a model is evicted; 0 for never.
        min_resident_s: Least time from a model's load to its eviction.
    """

    GROUP: ClassVar = "residency on demand"

    memory: int | str = option(
        "--resident-memory",
        ValueType("bytes or percentage", _memory, "int | str"),
        "80%",
        "memory of all models together; a percentage is of the memory that the server may use",
    )
    gpu_memory: Mapping[int, int] = option(
        "--resident-gpu-memory",
        TEXT,
        help="<gpu>:<size>, such as 0:60GB: memory of all models together on a GPU; sizes are in bytes, or "
        "with MB, GB, MiB or GiB",
        repeatable=True,
        convert=_gpu_memory,
    )
    models: int = option("--resident-models", NATURAL, 0, "most models in memory, 0 for no limit")
    cold_start: str = option(
        "--cold-start",
        TEXT,
        "wait",
        "wait: requests for a model that is not in memory wait until it is loaded; reject: they fail with "
        "UNAVAILABLE, and have it loaded",
        choices=("wait", "reject"),
    )
    cold_start_timeout_s: float = option(
        "--cold-start-timeout",
        INTERVAL,
        30.0,
        "longest time that a request waits for its model to be loaded",
        unit="seconds",
    )
    cold_queue_size: int = option(
        "--cold-queue-size",
        NATURAL,
        1024,
        "requests that may wait for the load of a model, 0 for no limit",
    )
    cold_queue_bytes: int = option(
        "--cold-queue-bytes",
        NATURAL,
        64 << 20,
        "bytes of the requests that may wait for the load of a model, 0 for no limit",
        unit="bytes",
    )
    idle_s: float = option(
        "--idle-timeout",
        DURATION,
        0.0,
        "time without requests after which a model is evicted, 0 for never",
        unit="seconds",
    )
    min_resident_s: float = option(
        "--min-resident-secs",
        DURATION,
        10.0,
        "least time from the load of a model to its eviction",
        unit="seconds",
    )

    def budget(self, available: int) -> int:
        """Memory of all models in bytes, of so many that the process may use."""
        if isinstance(self.memory, str):
            return available * int(self.memory[:-1]) // 100
        return self.memory
