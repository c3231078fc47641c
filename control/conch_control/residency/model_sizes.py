"""Memory of models: estimates before a load, measurements after it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.servable import Servable
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.parse import decode_config
from conch_control.control_options import ControlOptions
from conch_control.repository.dependency_graph import config_content
from conch_control.repository.layout import Fingerprint
from conch_control.repository.source import ModelSource

PINNED = "CONCH_PINNED"
MEMORY = "CONCH_MEMORY_MB"
LEAST_BYTES = 1 << 20
"""Least size that a model counts: its session, threads and statistics."""
_WORKER_BYTES = 60_000_000
_MB = 1_000_000
_TRUE, _FALSE = ("true", "1", "on"), ("false", "0", "off", "")
_PROC = Path("/proc")


def is_pinned(name: str, parameters: Mapping[str, str]) -> bool:
    """Whether a model's config pins it. Raises InvalidArgumentError: the parameter is no boolean."""
    value = parameters.get(PINNED, "").lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise InvalidArgumentError(f"parameter '{PINNED}' of model '{name}' must be true or false, got '{value}'")


def declared_bytes(name: str, parameters: Mapping[str, str]) -> int:
    """Size that a model's config declares; 0 for none.

    Raises:
        InvalidArgumentError: The parameter is no positive number.
    """
    text = parameters.get(MEMORY)
    if text is None:
        return 0
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = 0.0
    if not 0 < megabytes < 1e12:
        raise InvalidArgumentError(
            f"parameter '{MEMORY}' of model '{name}' must be a number of megabytes above 0, got '{text}'"
        )
    return round(megabytes * _MB)


def read_config_of(source: ModelSource, options: ControlOptions) -> ModelConfig:
    """A model's config as far as it can be read; its load reports what is wrong with it."""
    try:
        content = config_content(source, options.model_config_name)
        return decode_config(content, source.location, options.max_config_bytes)
    except (ConchError, OSError):
        return ModelConfig()


def estimate(state: Fingerprint, config: ModelConfig) -> int:
    """Size of a model that was never measured, by its files."""
    files = sum(size for _, size, _, _ in state)
    workers = 0
    if config.backend == "python" or any(path.endswith("/model.py") for path, *_ in state):
        workers = sum(max(group.count, 1) for group in config.instance_group) or 1
    return max(files * 3 // 2 + workers * _WORKER_BYTES, LEAST_BYTES)


def worker_bytes(models: Iterable[Servable]) -> int:
    """Memory of the worker processes of models, with that of their children."""
    pids = [worker.pid for model in models for worker in model.workers if worker.pid is not None]
    if not pids:
        return 0
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
    return sum(map(_proportional_bytes, seen))


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
