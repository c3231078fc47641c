"""Memory of models: estimates before a load, measurements after it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.execution.placement import Devices, filled
from conch.core.servable import Servable
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.instance_groups import read_groups
from conch_control.config.parse import decode_config
from conch_control.control_options import ControlOptions
from conch_control.repository.dependency_graph import config_content
from conch_control.repository.layout import Fingerprint
from conch_control.repository.source import ModelSource

PINNED = "CONCH_PINNED"
KEEP_ALIVE = "CONCH_KEEP_ALIVE_SECONDS"
MEMORY = "CONCH_MEMORY_MB"
GPU_MEMORY = "CONCH_GPU_MEMORY_MB"
LEAST_BYTES = 1 << 20
"""Least size that a model counts: its session, threads and statistics."""
_WORKER_BYTES = 60_000_000
_MB = 1_000_000
_S = 1_000_000_000
_MOST = 1e12
_TRUE, _FALSE = ("true", "1", "on"), ("false", "0", "off", "")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ResidencyParameters:
    """Residency parameters of a model's config.

    Attributes:
        pinned: True if it stays from its first load on.
        idle_ns: Time without use after which it is evicted, 0 for never; None for the server's.
        bytes: Its memory; None if it is to be estimated.
        gpu_bytes: Its memory on each GPU that it uses; None if it is to be estimated.
    """

    pinned: bool = False
    idle_ns: int | None = None
    bytes: int | None = None
    gpu_bytes: int | None = None


def read_parameters(name: str, parameters: Mapping[str, str]) -> ResidencyParameters:
    """Reads the parameters of a model's config. Raises InvalidArgumentError: one is malformed."""
    idle_s = _number(name, parameters, KEEP_ALIVE, "seconds from 0")
    megabytes = _number(name, parameters, MEMORY, "megabytes above 0", positive=True)
    gpu_megabytes = _number(name, parameters, GPU_MEMORY, "megabytes from 0")
    return ResidencyParameters(
        _is_pinned(name, parameters),
        None if idle_s is None else round(idle_s * _S),
        None if megabytes is None else round(megabytes * _MB),
        None if gpu_megabytes is None else round(gpu_megabytes * _MB),
    )


def _is_pinned(name: str, parameters: Mapping[str, str]) -> bool:
    value = parameters.get(PINNED, "").lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise InvalidArgumentError(f"parameter '{PINNED}' of model '{name}' must be true or false, got '{value}'")


def _number(
    name: str, parameters: Mapping[str, str], key: str, wanted: str, positive: bool = False
) -> float | None:
    text = parameters.get(key)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < _MOST or (positive and not number):
        raise InvalidArgumentError(
            f"parameter '{key}' of model '{name}' must be a number of {wanted}, got '{text}'"
        )
    return number


def read_config_of(source: ModelSource, options: ControlOptions) -> ModelConfig:
    """A model's config as far as it can be read; its load reports what is wrong with it."""
    try:
        content = config_content(source, options.model_config_name)
        return decode_config(content, source.location, options.max_config_bytes)
    except (ConchError, OSError):
        return ModelConfig()


def estimate(state: Fingerprint, config: ModelConfig) -> int:
    """Size of a model that was never measured, by its files."""
    workers = 0
    if _has_workers(state, config):
        workers = sum(max(group.count, 1) for group in config.instance_group) or 1
    return max(_file_bytes(state) * 3 // 2 + workers * _WORKER_BYTES, LEAST_BYTES)


def gpu_copies(state: Fingerprint, config: ModelConfig, devices: Devices) -> Mapping[int, int]:
    """Number of copies of a model's memory on each GPU: one, or one for each worker."""
    has_workers = _has_workers(state, config)
    copies: Counter[int] = Counter()
    try:
        groups = filled(config.name, read_groups(config), devices)
    except ValueError:
        return copies  # a kind that does not exist: the load reports it
    for group in groups:
        for device in group.gpus if group.kind == "GPU" else ():
            copies[device] = copies[device] + group.count if has_workers else 1
    return copies


def estimate_on_gpu(state: Fingerprint) -> int:
    """Size of one copy of a model on a GPU, by its files."""
    return _file_bytes(state) * 3 // 2


def _file_bytes(state: Fingerprint) -> int:
    return sum(size for _, size, _, _ in state)


def _has_workers(state: Fingerprint, config: ModelConfig) -> bool:
    return config.backend == "python" or any(path.endswith("/model.py") for path, *_ in state)


def worker_pids(models: Iterable[Servable]) -> set[int]:
    """The worker processes of models, and their children."""
    pids = [worker.pid for model in models for worker in model.workers if worker.pid is not None]
    if not pids:
        return set()
    children: dict[int, list[int]] = {}
    for entry in os.scandir(_PROC):
        if entry.name.isdecimal():
            parent = _parent(int(entry.name))
            children.setdefault(parent, []).append(int(entry.name))
    seen: set[int] = set()
    while pids:
        pid = pids.pop()
        if pid not in seen:
            seen.add(pid)
            pids += children.get(pid, ())
    return seen


def memory_of(pids: Iterable[int]) -> int:
    """Memory of processes."""
    return sum(map(_proportional_bytes, pids))


def _parent(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0  # it has ended


def _proportional_bytes(pid: int) -> int:
    """Memory of a process, with its share of what it has in common with others."""
    try:
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # it has ended, or is another user's
    return 0
