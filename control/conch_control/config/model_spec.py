"""Converts a finished config to the core's spec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch.core.padding import Padding
from conch.core.spec import DynamicBatching, ModelSpec, QueuePolicy, SequenceBatching, TensorSpec
from conch.protocol.model_config_pb2 import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelOutput,
    ModelQueuePolicy,
)
from conch_control.config.ensembles import scheduling_of
from conch_control.config.instance_groups import read_groups
from conch_control.config.json_format import to_json
from conch_control.config.named_files import read_error, stays_within
from conch_control.config.padding import checked_padding
from conch_control.config.problems import Checked, Problem, Problems, attempt, entry_path, result_or_raise
from conch_control.config.ragged import batch_inputs, batch_outputs
from conch_control.config.schema import WIRE_NAMES
from conch_control.config.sequences import checked_sequences

_TTL = "CONCH_CACHE_TTL"
_NS_PER_S = 1_000_000_000
_MOST_S = 10**9


def checked_cache_ttl(config: ModelConfig) -> Checked[int]:
    """Lifetime of cached responses in nanoseconds; 0 for the cache's default."""
    if _TTL not in config.parameters:
        return 0
    text = config.parameters[_TTL].string_value
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 / _NS_PER_S <= seconds <= _MOST_S:
        yield Problem(
            f"{entry_path('parameters', _TTL)}.string_value",
            f"parameter '{_TTL}' of model '{config.name}' must be a number of seconds above 0, got '{text}'",
            expected="a number of seconds above 0",
        )
        return 0
    return int(seconds * _NS_PER_S)


_FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
_USUAL_MS = (100.0, 500.0, 2000.0, 5000.0)


def first_response_buckets(config: Mapping[str, Any]) -> tuple[float, ...]:
    """Bucket bounds of the first-response histogram in milliseconds, from a config in JSON or by default."""
    for control in config.get("model_metrics", {}).get("metric_control", ()):
        if control.get("metric_identifier", {}).get("family") == _FIRST_RESPONSE:
            buckets = control["histogram_options"]["buckets"]
            return tuple(sorted({value for bucket in buckets if isfinite(value := float(bucket))}))
    return _USUAL_MS


def uncustomizable_families(config: ModelConfig) -> Problems:
    """Metric families in ``model_metrics`` that are not the first-response histogram; they have no effect."""
    for number, control in enumerate(config.model_metrics.metric_control):
        family = control.metric_identifier.family
        if family != _FIRST_RESPONSE:
            yield Problem(
                f"model_metrics.metric_control[{number}].metric_identifier.family",
                f"Metric family '{family}' in 'metric_identifier' is not a customizable metric in Triton "
                f"core.",
                expected=f"'{_FIRST_RESPONSE}'",
            )


_MAX_QUEUE_SIZE = "CONCH_MAX_QUEUE_SIZE"


@dataclass(frozen=True, slots=True)
class Extras:
    """Parts of a spec read from files and parameters."""

    labels: tuple[tuple[str, ...], ...]
    sequence: SequenceBatching | None
    padding: Padding | None
    cache_ttl_ns: int
    max_queue_size: int


def build_spec(
    config: ModelConfig,
    directory: Path,
    version: int,
    model_file: str,
    backend_options: Mapping[str, str],
    max_queue_size: int = 0,
) -> ModelSpec:
    """The spec of one version from a completed, normalised and validated config.

    Raises:
        ConchError: A labels or state file is unreadable or outside the model, or a parameter is invalid.
    """
    extras = result_or_raise(read_extras(config, directory, max_queue_size))
    return assemble_spec(config, directory, version, model_file, backend_options, extras)


def read_extras(config: ModelConfig, directory: Path, max_queue_size: int = 0) -> Checked[Extras]:
    """Reads files and parameters of a completed and normalised config, and reports their problems."""
    labels = []
    for number, tensor in enumerate(config.output):
        path = f"output[{number}].label_filename"
        found = yield from attempt(path, partial(_labels, tensor, config.name, directory))
        labels.append(found or ())
    sequence = yield from checked_sequences(config, directory)
    padding = yield from checked_padding(config)
    ttl = yield from checked_cache_ttl(config)
    size = yield from _checked_queue_size(config, max_queue_size)
    return Extras(tuple(labels), sequence, padding, ttl, size)


def assemble_spec(
    config: ModelConfig,
    directory: Path,
    version: int,
    model_file: str,
    backend_options: Mapping[str, str],
    extras: Extras,
) -> ModelSpec:
    """The spec of one version of a valid config; see `build_spec`."""
    return ModelSpec(
        name=config.name,
        version=version,
        platform=config.platform,
        backend=config.backend,
        max_batch_size=config.max_batch_size,
        inputs=tuple(_input(tensor) for tensor in config.input),
        outputs=tuple(
            _output(tensor, labels) for tensor, labels in zip(config.output, extras.labels, strict=True)
        ),
        directory=directory,
        version_directory=directory / str(version),
        model_file=model_file,
        instance_groups=read_groups(config),
        batching=_batching(config),
        sequence=extras.sequence,
        ensemble=scheduling_of(config),
        batch_inputs=batch_inputs(config),
        batch_outputs=batch_outputs(config),
        padding=extras.padding,
        cached=config.response_cache.enable,
        cache_ttl_ns=extras.cache_ttl_ns,
        max_queue_size=extras.max_queue_size,
        decoupled=config.model_transaction_policy.decoupled,
        parameters={key: value.string_value for key, value in config.parameters.items()},
        config=to_json(config),
        config_message=config.SerializeToString(),
        backend_options=dict(backend_options),
    )


def _input(tensor: ModelInput) -> TensorSpec:
    return TensorSpec(
        name=tensor.name,
        datatype=WIRE_NAMES[tensor.data_type],
        dims=tuple(tensor.dims),
        reshape=tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
        optional=tensor.optional,
        ragged=tensor.allow_ragged_batch,
        is_shape=tensor.is_shape_tensor,
    )


def _output(tensor: ModelOutput, labels: tuple[str, ...]) -> TensorSpec:
    return TensorSpec(
        name=tensor.name,
        datatype=WIRE_NAMES[tensor.data_type],
        dims=tuple(tensor.dims),
        reshape=tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
        labels=labels,
        is_shape=tensor.is_shape_tensor,
    )


def _labels(tensor: ModelOutput, model: str, directory: Path) -> tuple[str, ...]:
    name = tensor.label_filename
    if not name:
        return ()
    if not stays_within(directory, name):
        raise InvalidArgumentError(
            f"label file '{name}' of output '{tensor.name}' must stay within the directory of model '{model}'"
        )
    path = directory / name
    try:
        return tuple(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"))
    except OSError as error:
        raise read_error(path, error) from error
    except ValueError as error:  # not UTF-8, or no valid path
        raise InvalidArgumentError(f"label file '{name}' of output '{tensor.name}': {error}") from error


def _batching(config: ModelConfig) -> DynamicBatching | None:
    if not config.HasField("dynamic_batching"):
        return None
    batching = config.dynamic_batching
    policies = _policies(batching)
    if config.max_batch_size == 0 and not (policies or batching.preserve_ordering):
        return None  # no batch dimension: nothing to merge
    return DynamicBatching(
        preferred_sizes=tuple(sorted(set(batching.preferred_batch_size))),
        max_queue_delay_ns=batching.max_queue_delay_microseconds * 1000,
        policies=policies,
        default_level=batching.default_priority_level or 1,
        preserve_ordering=batching.preserve_ordering,
    )


def _policies(batching: ModelDynamicBatching) -> tuple[QueuePolicy, ...]:
    """Queue policy of each priority level; empty for one level without limits."""
    default = _policy(batching.default_queue_policy)
    named = batching.priority_queue_policy
    policies = tuple(
        _policy(named[level]) if level in named else default
        for level in range(1, batching.priority_levels + 1)
    )
    policies = policies or (default,)
    # Without a timeout, action and override have no effect.
    if len(policies) == 1 and not (policies[0].timeout_ns or policies[0].max_size):
        return ()
    return policies


def _policy(policy: ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        delays=policy.timeout_action == ModelQueuePolicy.DELAY,
        timeout_ns=policy.default_timeout_microseconds * 1000,
        allow_override=policy.allow_timeout_override,
        max_size=policy.max_queue_size,
    )


def _checked_queue_size(config: ModelConfig, default: int) -> Checked[int]:
    if _MAX_QUEUE_SIZE not in config.parameters:
        return default
    text = config.parameters[_MAX_QUEUE_SIZE].string_value
    if not re.fullmatch("[0-9]{1,18}", text):
        yield Problem(
            f"{entry_path('parameters', _MAX_QUEUE_SIZE)}.string_value",
            f"parameter '{_MAX_QUEUE_SIZE}' of model '{config.name}' must be a whole number >= 0, got "
            f"'{text}'",
            expected="a whole number >= 0",
        )
        return default
    return int(text)
