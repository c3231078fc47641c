"""Settings of the control plane, as plain data; the server's flags fill them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from conch.core.execution.placement import Devices
from conch.core.scheduling.resource_scheduler import ResourceLimit
from conch_control.repository.storage.options import StorageOptions

ControlMode = Literal["none", "explicit", "poll", "watch"]

WILDCARD = "*"
"""Startup model that stands for all models of the repositories."""

ALL_BACKENDS = ""
"""Backend name of options that hold for every backend."""


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """What the operator decides about the repository.

    Attributes:
        repositories: Local directories, and URLs of object stores.
        mode: ``none`` loads everything once; ``explicit`` loads what clients and the startup list name; with
            ``poll`` and ``watch`` everything is loaded, and a planner has it follow the repositories.
        startup_models: Models to load at the start in explicit mode; ``*``, alone, for all.
        strict_model_config: Whether configs must be complete: no completion from the model's files.
        load_threads: Most models being loaded at the same time.
        load_retries: How often a version that failed to load is tried again.
        model_config_name: Use ``configs/<name>.pbtxt`` of a model, where it exists, as its config.
        backend_options: Options by backend; those under the empty name hold for all.
        devices: What instances can be placed on.
        rate_limits: How much there is of the resources that instances need, nothing said for as much as the
            neediest one needs; None for no rate limits at all.
        max_queue_size: Most requests that may wait for a model version that does not say so itself; 0 for any
            number.
        storage: Settings of repositories in object stores.
        namespacing: Whether several repositories may have models of one name.
        keep_latencies: Whether models count how long each request takes, for histograms.
        keep_first_responses: Whether they do so for first responses, in Triton's buckets.
        keep_summaries: Whether they keep what quantiles of times are made of.
    """

    repositories: tuple[str | Path, ...]
    mode: ControlMode = "none"
    startup_models: tuple[str, ...] = ()
    strict_model_config: bool = False
    load_threads: int = 4
    load_retries: int = 0
    model_config_name: str = ""
    backend_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    devices: Devices = field(default_factory=Devices)
    rate_limits: tuple[ResourceLimit, ...] | None = None
    max_queue_size: int = 0
    storage: StorageOptions = field(default_factory=StorageOptions)
    namespacing: bool = False
    keep_latencies: bool = False
    keep_first_responses: bool = False
    keep_summaries: bool = False

    def options_of(self, backend: str) -> dict[str, str]:
        """All options that hold for a backend; its own win over the general ones."""
        return {**self.backend_options.get(ALL_BACKENDS, {}), **self.backend_options.get(backend, {})}
