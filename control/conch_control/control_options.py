"""Settings of the control plane, as plain data; the server's flags fill them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from conch.core.execution.placement import Devices
from conch.core.scheduling.resource_scheduler import ResourceLimit

MOST_CONFIG_BYTES = 1 << 20
"""Default of `ControlOptions.max_config_bytes`."""


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """Settings of object stores; None stands for the default directory, 0 bytes for no limit."""

    cache_directory: Path | None = None
    cache_bytes: int = 0
    timeout_s: float = 30.0


ControlMode = Literal["none", "explicit", "poll", "watch"]

WILDCARD = "*"
"""Startup model that stands for all models of the repositories."""

ALL_BACKENDS = ""
"""Backend name of options that hold for every backend."""


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """Settings of the control plane.

    Attributes:
        repositories: Local directories, and URLs of object stores.
        mode: ``none`` loads everything once; ``explicit`` loads what clients and `startup_models` name;
            ``poll`` and ``watch`` load everything and follow the repositories.
        startup_models: Models to load at the start in explicit mode; ``*``, alone, for all.
        strict_model_config: Require complete configs, without completion from the model's files.
        load_threads: Most concurrent loads.
        load_retries: Retries of a version that fails to load.
        max_config_bytes: Largest config of a model, in a file or a load request.
        model_config_name: Use ``configs/<name>.pbtxt`` of a model as its config, where it exists.
        backend_options: Options by backend; those under the empty name apply to all.
        rate_limits: Capacity of rate limiter resources, by default the largest demand; None disables rate
            limits.
        max_queue_size: Default queue limit of a model version; 0 for none.
        namespacing: Allow models of the same name in several repositories.
        model_name: Name of the model of a local path that is one model instead of a repository; empty to take
            all paths for repositories.
        repository_wait_s: Seconds to wait at the start for local paths that are not there yet.
        keep_latencies: Keep latency histograms.
        keep_first_responses: Keep first-response histograms, in Triton's buckets.
        keep_summaries: Keep data for quantiles.
    """

    repositories: tuple[str | Path, ...]
    mode: ControlMode = "none"
    startup_models: tuple[str, ...] = ()
    strict_model_config: bool = False
    load_threads: int = 4
    load_retries: int = 0
    max_config_bytes: int = MOST_CONFIG_BYTES
    model_config_name: str = ""
    backend_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    devices: Devices = field(default_factory=Devices)
    rate_limits: tuple[ResourceLimit, ...] | None = None
    max_queue_size: int = 0
    storage: StorageOptions = field(default_factory=StorageOptions)
    namespacing: bool = False
    model_name: str = ""
    repository_wait_s: float = 0.0
    keep_latencies: bool = False
    keep_first_responses: bool = False
    keep_summaries: bool = False

    def options_of(self, backend: str) -> dict[str, str]:
        """All options that hold for a backend; its own win over the general ones."""
        return {**self.backend_options.get(ALL_BACKENDS, {}), **self.backend_options.get(backend, {})}
