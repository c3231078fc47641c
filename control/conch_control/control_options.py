"""Options of the control plane and of its planner, as plain data; the server's settings fill them in.

Imports little: `conch config` and `conch health` read settings without the planes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from conch.settings.option import SECRET_OPTION, FlagError, nested, option
from conch.settings.value_types import (
    BOOL,
    DIRECTORY,
    DURATION,
    INTERVAL,
    NATURAL,
    POSITIVE,
    TEXT,
    ValueType,
)

if TYPE_CHECKING:
    from conch.core.execution.placement import Devices
    from conch.core.scheduling.resource_scheduler import ResourceLimit

MOST_CONFIG_BYTES = 1 << 20
"""Default of `ControlOptions.max_config_bytes`."""

ControlMode = Literal["none", "explicit", "poll", "watch", "on-demand"]

WILDCARD = "*"
"""Startup model that stands for all models of the repositories."""

ALL_BACKENDS = ""
"""Backend name of options that hold for every backend."""

_CONTROL, _LOADING = "model control", "model loading"
_SECRET_URL = re.compile(r".*?://[^/@:]*:(?=[^/@]+@)")
"""Scheme and user of a URL with a password; the rest is hidden."""


_POLICY_VALUES = {
    "cpu-cores": (re.compile(r"\d+-\d+"), "the first and the last one, such as 0-3"),
    "numa-node": (re.compile(r"\d+"), "a number"),
}
"""Forms of values of host policies, and a description; others are for backends."""


def _repository(text: str) -> str | Path:
    return text if "://" in text else Path(text)  # a Path merges the two slashes


def _config_name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("Error: empty argument for --model-config-name")
    return text


def _no_devices() -> Devices:
    from conch.core.execution.placement import Devices

    return Devices()


def backend_options(specifications: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
    """Parses ``<backend>,<key>=<value>`` options; the key ``""`` has those without a backend.

    Raises:
        FlagError: One is malformed.
    """
    options: dict[str, dict[str, str]] = {}
    for specification in specifications:
        backend, comma, setting = specification.rpartition(",")
        key, equals, value = setting.partition("=")
        if not equals or not key or (comma and not backend):
            raise FlagError(
                f"--backend-config: '{specification}' is not of the form '<backend>,<setting>=<value>' or "
                f"'<setting>=<value>'"
            )
        options.setdefault(backend, {})[key] = value
    return options


def host_policies(specifications: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
    """Parses ``<policy>,<setting>=<value>`` options.

    Raises:
        FlagError: One is malformed.
    """
    policies: dict[str, dict[str, str]] = {}
    for specification in specifications:
        policy, _, setting = specification.partition(",")
        key, equals, value = setting.partition("=")
        if not (policy and key and equals):
            raise FlagError(
                f"--host-policy: '{specification}' is not of the form '<policy>,<setting>=<value>'"
            )
        form, example = _POLICY_VALUES.get(key, (None, ""))
        if form is not None and form.fullmatch(value) is None:
            raise FlagError(f"--host-policy: {key} of '{policy}' is '{value}', expected {example}")
        policies.setdefault(policy, {})[key] = value
    return policies


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """Settings of object stores; None stands for the default directory, 0 bytes for no limit.

    Attributes:
        kinds: Settings of other packages' kinds of repositories, by their entry point in ``conch.options``.
    """

    GROUP: ClassVar = "model repositories"

    cache_directory: Path | None = option(
        "--model-cache-directory",
        DIRECTORY,
        None,
        "directory for models fetched from object stores; without it ~/.cache/conch/models",
    )
    cache_bytes: int = option(
        "--model-cache-byte-size", NATURAL, 0, "maximum size of that directory; 0 for no limit", unit="bytes"
    )
    timeout_s: float = option(
        "--storage-timeout-secs",
        POSITIVE,
        30,
        "time after which an object store that does not answer has failed",
        unit="seconds",
    )
    data_only: bool = option(
        "--storage-data-only",
        BOOL,
        False,
        "refuse models of object stores that are more than data, for stores that others may write to: code, "
        "SavedModels, and settings that are not known to be harmless",
    )
    kinds: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """Settings of the control plane.

    Attributes:
        repositories: Local directories, and URLs of object stores.
        mode: ``none`` loads everything once; ``explicit`` loads what clients and `startup_models` name;
            ``poll`` and ``watch`` load everything and follow the repositories; ``on-demand`` loads a model
            for its first request and evicts others.
        startup_models: Models to load at the start in explicit and on-demand mode; ``*``, alone, for all.
        development: Follow the repositories, and reload soon after a file is saved.
        strict_model_config: Require complete configs, without completion from the model's files.
        load_threads: Most concurrent loads.
        load_retries: Retries of a version that fails to load.
        max_config_bytes: Largest config of a model, in a file or a load request.
        model_config_name: Use ``configs/<name>.pbtxt`` of a model as its config, where it exists.
        backend_directory: Directory of backends that are not installed; None for Triton's.
        repoagent_directory: Directory of compiled repository agents.
        host_policies: Settings of host policies, by name.
        backend_options: Options by backend; those under the empty name apply to all.
        rate_limits: Capacity of rate limiter resources, by default the largest demand; None disables rate
            limits.
        max_queue_size: Default queue limit of a model version; 0 for none.
        state_directory: Keeps what a restart must know; None for nothing.
        rollout_capture_directory: Keeps tensors of shadow pairs that differ; None for none.
        namespacing: Allow models of the same name in several repositories.
        model_name: Name of the model of a local path that is one model instead of a repository; empty to take
            all paths for repositories.
        repository_wait_s: Seconds to wait at the start for local paths that are not there yet.
        keep_latencies: Keep latency histograms.
        keep_first_responses: Keep first-response histograms, in Triton's buckets.
        keep_summaries: Keep data for quantiles.
    """

    GROUP: ClassVar = "model repositories"

    repositories: tuple[str | Path, ...] = option(
        "--model-repository",
        ValueType("location", _repository, "Path | str"),
        help="directory of models, or s3://, gs:// or as:// URL of one, or mlflow:// URL of a registry",
        repeatable=True,
        secret=_SECRET_URL,
        alias="--model-store",
    )
    mode: ControlMode = option(
        "--model-control-mode",
        TEXT,
        "none",
        "none: load all models at the start; explicit: load the models that clients name; poll: load all "
        "models and look for changes at intervals; watch: load all models and follow file-system events; "
        "on-demand: load a model for its first request, and evict others to make room",
        choices=("none", "explicit", "poll", "watch", "on-demand"),
        group=_CONTROL,
    )
    startup_models: tuple[str, ...] = option(
        "--load-model",
        TEXT,
        help="model to load at the start in explicit mode, or '*' for all; in on-demand mode it is pinned",
        repeatable=True,
        group=_CONTROL,
    )
    development: bool = option(
        "--reload",
        BOOL,
        False,
        "for development: reload a model soon after one of its files is saved; the version that serves goes "
        "on if the reload fails",
        group=_CONTROL,
    )
    model_name: str = option(
        "--model-name",
        TEXT,
        "",
        "name of the model, if a local --model-repository is the directory of one model or a model's file; a "
        "repository of models may be there as well, and is served as it is",
        optional=True,
    )
    repository_wait_s: float = option(
        "--repository-wait-secs",
        DURATION,
        0.0,
        "time to wait at the start for a local --model-repository that is not there yet",
        unit="seconds",
    )
    state_directory: Path | None = option(
        "--state-directory",
        DIRECTORY,
        None,
        "directory for what a restart must know, one for each server: progress of rollouts, labels, which "
        "models were resident; without it a restart begins anew",
        group=_CONTROL,
    )
    rollout_capture_directory: Path | None = option(
        "--rollout-capture-directory",
        DIRECTORY,
        None,
        "directory for inputs and outputs of the 32 worst shadow pairs of each rollout, which are data of "
        "clients, in files that only the server's user can read",
        group=_CONTROL,
    )
    namespacing: bool = option(
        "--model-namespacing",
        BOOL,
        False,
        "let several repositories have models of one name, for ensembles of the same repository",
    )
    storage: StorageOptions = nested(StorageOptions)
    load_threads: int = option(
        "--model-load-thread-count", POSITIVE, 4, "models loaded at the same time", group=_LOADING
    )
    load_retries: int = option(
        "--model-load-retry-count",
        NATURAL,
        0,
        "retries of a version that failed to load",
        group=_LOADING,
    )
    max_queue_size: int = option(
        "--max-queue-size",
        NATURAL,
        16384,
        "requests that may wait for a model version, 0 for no limit; a model's parameter "
        "CONCH_MAX_QUEUE_SIZE wins",
        group=_LOADING,
    )
    max_config_bytes: int = option(
        "--max-model-config-size",
        POSITIVE,
        MOST_CONFIG_BYTES,
        "maximum size of a model's config, in a file or a load request; larger ones fail the load",
        unit="bytes",
        group=_LOADING,
    )
    model_config_name: str = option(
        "--model-config-name",
        ValueType("text", _config_name),
        "",
        "use configs/<name>.pbtxt of a model where it exists",
        group=_LOADING,
    )
    strict_model_config: bool = option(
        "--disable-auto-complete-config",
        BOOL,
        False,
        "do not complete model configs",
        group=_LOADING,
        alias="--strict-model-config",
    )
    backend_directory: Path | None = option(
        "--backend-directory",
        DIRECTORY,
        None,
        "directory of backends: <name>/model.py or <name>/libtriton_<name>.so runs models whose backend "
        "is <name>",
        group=_LOADING,
    )
    repoagent_directory: Path | None = option(
        "--repoagent-directory",
        DIRECTORY,
        None,
        "directory of compiled repository agents: <name>/libtritonrepoagent_<name>.so",
        group=_LOADING,
    )
    backend_options: Mapping[str, Mapping[str, str]] = option(
        "--backend-config",
        TEXT,
        help="<backend>,<setting>=<value>",
        repeatable=True,
        secret=SECRET_OPTION,
        group=_LOADING,
        convert=backend_options,
    )
    host_policies: Mapping[str, Mapping[str, str]] = option(
        "--host-policy",
        TEXT,
        help="<policy>,<setting>=<value>, such as cpu,cpu-cores=0-3 or gpu_0,numa-node=0: where instances of "
        "backends compiled for Triton run",
        repeatable=True,
        group=_LOADING,
        convert=host_policies,
    )
    devices: Devices = field(default_factory=_no_devices)
    rate_limits: tuple[ResourceLimit, ...] | None = None
    keep_latencies: bool = False
    keep_first_responses: bool = False
    keep_summaries: bool = False

    @property
    def loads_by_name(self) -> bool:
        """True if clients may load and unload models."""
        return self.mode in ("explicit", "on-demand")

    @property
    def told(self) -> dict[str, str]:
        """Facts of the server for backends that are compiled for Triton."""
        return {
            "auto-complete-config": "false" if self.strict_model_config else "true",
            "min-compute-capability": f"{self.devices.min_compute_capability:.6f}",
        }

    def options_of(self, backend: str) -> dict[str, str]:
        """All options that hold for a backend; its own win over the general ones."""
        return {**self.backend_options.get(ALL_BACKENDS, {}), **self.backend_options.get(backend, {})}


def _resource_limit(text: str) -> ResourceLimit:
    from conch.core.scheduling.resource_scheduler import ResourceLimit

    found = re.fullmatch(r"([^:]+):([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if found is None:
        raise FlagError(
            f"--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
            f"'<resource_name>:<count>'. Got {text}"
        )
    name, count, device = found.groups()
    return ResourceLimit(name, int(count), None if device is None else int(device))


@dataclass(frozen=True, slots=True)
class RateLimitOptions:
    """The rate limiter, as the flags give it."""

    GROUP: ClassVar = "rate limiter"

    mode: str = option(
        "--rate-limit",
        TEXT,
        "off",
        "execution_count: instances run while the resources of their config are free, those first that have "
        "run least by their priority; off: resources are ignored",
        choices=("off", "execution_count"),
    )
    resources: tuple[ResourceLimit, ...] = option(
        "--rate-limit-resource",
        TEXT,
        help="<name>:<count>[:<device>], how much of a resource exists; without any, as much as the largest "
        "instance needs",
        repeatable=True,
        convert=lambda texts: tuple(map(_resource_limit, texts)),
    )

    @property
    def limits(self) -> tuple[ResourceLimit, ...] | None:
        """`ControlOptions.rate_limits`."""
        return None if self.mode == "off" else self.resources


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """Settings of the planner.

    Attributes:
        mode: ``poll``, or ``watch`` to use change notifications where available.
        poll_s: Seconds between polls.
        settle_s: Seconds without changes before a model is loaded.
        operations: Most concurrent loads and unloads.
        max_config_bytes: Largest config of a model.
        model_config_name: Use ``configs/<name>.pbtxt`` of a model as its config, where it exists.
        development: Ignore the temporary files of editors.
    """

    GROUP: ClassVar = _CONTROL

    mode: Literal["poll", "watch"]
    poll_s: float = option(
        "--repository-poll-secs", INTERVAL, 15.0, "time between looks at model repositories", unit="seconds"
    )
    settle_s: float = option(
        "--repository-settle-secs",
        INTERVAL,
        1.0,
        "time without a change to a model's files before it is loaded",
        unit="seconds",
    )
    operations: int = 4
    max_config_bytes: int = MOST_CONFIG_BYTES
    model_config_name: str = ""
    development: bool = False
