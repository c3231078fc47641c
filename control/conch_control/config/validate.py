"""Checks a normalised config; rules and texts are Triton's.

`validate_config` needs nothing but the config as it was written; `validate_tensors` comes after the backend
completed it. Instance groups have rules of their own, see `groups`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from conch.core.errors import InvalidArgumentError
from conch.protocol.model_config_pb2 import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelMetrics,
    ModelOutput,
    ModelQueuePolicy,
)
from conch_control.config.datatypes import WIRE_NAMES
from conch_control.config.ensembles import validate_ensemble
from conch_control.config.platforms import check_pair
from conch_control.config.sequences import validate_sequences

_DIMENSION_RULE = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def validate_config(config: ModelConfig) -> None:
    """Checks everything but tensors and instance groups.

    Raises:
        InvalidArgumentError: The config breaks a rule.
    """
    check_pair(config)
    name = config.name
    if config.HasField("ensemble_scheduling"):
        validate_ensemble(config)
    if config.max_batch_size < 0:
        raise InvalidArgumentError(f"'max_batch_size' must be non-negative value for {name}")
    if config.HasField("dynamic_batching"):
        _check_dynamic_batching(config.dynamic_batching, config)
    if config.response_cache.enable:
        _check_response_cache(config)
    validate_sequences(config)
    if config.HasField("model_metrics"):
        _check_metrics(config.model_metrics)


def validate_tensors(config: ModelConfig) -> None:
    """Checks inputs and outputs.

    Raises:
        InvalidArgumentError: One of them breaks a rule.
    """
    for kind, tensors in (("input", config.input), ("output", config.output)):
        seen: set[str] = set()
        for tensor in tensors:
            problem = _tensor_problem(tensor, kind, config.max_batch_size > 0)
            if problem is None and tensor.name in seen:
                problem = f"model {kind} '{tensor.name}' is specified more than once"
            if problem is not None:
                raise InvalidArgumentError(f"{problem} for {config.name}")
            seen.add(tensor.name)


def _check_dynamic_batching(batching: ModelDynamicBatching, config: ModelConfig) -> None:
    name = config.name
    for size in batching.preferred_batch_size:
        if size <= 0:
            raise InvalidArgumentError(f"dynamic batching preferred size must be positive for {name}")
        if size > config.max_batch_size:
            raise InvalidArgumentError(
                f"dynamic batching preferred size must be <= max batch size for {name}"
            )
    levels = batching.priority_levels
    if levels:
        if not 1 <= batching.default_priority_level <= levels:
            raise InvalidArgumentError(f"default priority level must be in range [1, {levels}] for {name}")
        if any(not 1 <= level <= levels for level in batching.priority_queue_policy):
            raise InvalidArgumentError(
                f"priority queue policy must have priority level in range [1, {levels}] for {name}"
            )
    if batching.preserve_ordering:
        _check_ordering(batching, name)


def _check_ordering(batching: ModelDynamicBatching, name: str) -> None:
    if batching.priority_levels > 1:
        raise InvalidArgumentError(
            f"Only one priority level is allowed when 'preserve_ordering' is true for {name}"
        )
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(policy.timeout_action == ModelQueuePolicy.DELAY for policy in policies):
        raise InvalidArgumentError(
            f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {name}"
        )


def _check_response_cache(config: ModelConfig) -> None:
    reason = None
    if config.HasField("sequence_batching"):
        reason = "sequence batching scheduler"
    elif config.model_transaction_policy.decoupled:
        reason = "'decoupled' transaction policy"
    if reason is not None:
        raise InvalidArgumentError(uncacheable_text(config.name, reason))
    if config.dynamic_batching.preserve_ordering:
        raise InvalidArgumentError(
            f"response_cache of model '{config.name}' can't be enabled with preserve_ordering of its "
            f"dynamic_batching: answers from the cache do not wait for those before them; disable one of them"
        )


def uncacheable_text(name: str, reason: str) -> str:
    """What Triton says of a model whose answers can't be cached."""
    return (
        f"Response Cache does not currently support model {name} with {reason}. Please disable the response "
        f"cache."
    )


def _check_metrics(metrics: ModelMetrics) -> None:
    for control in metrics.metric_control:
        if not control.HasField("metric_identifier"):
            raise InvalidArgumentError("metric control must specify 'metric_identifier'")
        if not control.metric_identifier.family:
            raise InvalidArgumentError("metric identifier must specify non-empty 'family'")
        if not control.HasField("histogram_options"):
            raise InvalidArgumentError("metric control must specify 'histogram_options'")


def _tensor_problem(tensor: ModelInput | ModelOutput, kind: str, batching: bool) -> str | None:
    if not tensor.name:
        return f"model {kind} must specify 'name'"
    prefix = f"model {kind} '{tensor.name}'"
    if tensor.data_type not in WIRE_NAMES:
        return f"{prefix} must specify 'data_type'"
    if not tensor.dims:
        return f"{prefix} must specify 'dims'"
    if _has_bad_dimension(tensor.dims):
        return f"{prefix} dimension {_DIMENSION_RULE}"
    if isinstance(tensor, ModelInput) and tensor.format != ModelInput.FORMAT_NONE and len(tensor.dims) != 3:
        return "model input NHWC/NCHW require 3 dims"
    if tensor.HasField("reshape"):
        return _reshape_problem(prefix, tensor.dims, tensor.reshape.shape, batching)
    return None


def _reshape_problem(prefix: str, dims: Sequence[int], shape: Sequence[int], batching: bool) -> str | None:
    if not shape and not batching:
        return (
            f"{prefix} cannot have empty reshape for non-batching model as scalar tensors are not supported"
        )
    if _has_bad_dimension(shape):
        return f"{prefix} reshape dimensions {_DIMENSION_RULE}"
    dims_chunks, shape_chunks = _chunk_sizes(dims), _chunk_sizes(shape)
    variable = (len(dims_chunks) > 1, len(shape_chunks) > 1)
    if all(variable) and len(dims_chunks) != len(shape_chunks):
        return f"{prefix} has different number of variable-size dimensions for dims and reshape"
    if dims_chunks != shape_chunks:
        return f"{prefix} has different size for dims and reshape"
    return None


def _chunk_sizes(dims: Iterable[int]) -> list[int]:
    """Element counts of the stretches between variable dimensions: [2, -1, 3, 4] gives [2, 12]."""
    chunks: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            chunks.append([])
        else:
            chunks[-1].append(dim)
    return [prod(chunk) for chunk in chunks]


def _has_bad_dimension(dims: Iterable[int]) -> bool:
    return any(dim < 1 and dim != -1 for dim in dims)
