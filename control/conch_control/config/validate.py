"""Validates a normalised config; most rules and texts are Triton's, those of conch's own limits are conch's.

The load of a model calls these in order:

1. as `read_definition` reads the config: `config_problems`, which needs only what is written; then
   `completed_problems` if configs must be complete (``strict_model_config``)
2. before the backend is looked up: `check_supported`, for features that conch lacks; if there is no such
   backend, `completed_problems` of a config that has inputs and outputs
3. once the backend has completed the config: `config_problems`, `tensor_problems` and `check_supported`

The load of an ensemble calls the three of step 3, `check_supported` first, and `config_problems` again once
the steps tell whether it is decoupled. A change of instances calls `check_supported`. ``conch check`` lists
features that conch lacks by `support_problems`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

from conch.core.errors import UnsupportedError
from conch.core.execution.placement import Devices
from conch.protocol.model_config_pb2 import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelMetrics,
    ModelOutput,
    ModelQueuePolicy,
)
from conch_control.config.ensembles import ensemble_problems
from conch_control.config.instance_groups import group_problems
from conch_control.config.platforms import is_ensemble, pair_problems
from conch_control.config.problems import Problem, Problems, entry_path
from conch_control.config.ragged import ragged_problems
from conch_control.config.schema import WIRE_NAMES
from conch_control.config.sequences import sequence_problems

_DIMENSION_RULE = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def config_problems(config: ModelConfig) -> Problems:
    """Problems of a config, without tensors and instance groups."""
    yield from pair_problems(config)
    if config.HasField("ensemble_scheduling"):
        yield from ensemble_problems(config)
    if config.max_batch_size < 0:
        yield Problem(
            "max_batch_size",
            f"'max_batch_size' must be non-negative value for {config.name}",
            expected="0 for a model without batching, or the largest batch",
        )
    if config.HasField("dynamic_batching"):
        yield from _batching_problems(config.dynamic_batching, config)
    if config.response_cache.enable:
        yield from _cache_problems(config)
    yield from sequence_problems(config)
    if config.HasField("model_metrics"):
        yield from _metrics_problems(config.model_metrics)


def tensor_problems(config: ModelConfig) -> Problems:
    """Problems of inputs and outputs."""
    kinds: dict[str, Sequence[ModelInput | ModelOutput]] = {"input": config.input, "output": config.output}
    for kind, tensors in kinds.items():
        seen: set[str] = set()
        for number, tensor in enumerate(tensors):
            path = f"{kind}[{number}]"
            for problem in _tensor_problems(path, tensor, kind, config.max_batch_size > 0):
                yield replace(problem, message=f"{problem.message} for {config.name}")
            if tensor.name and tensor.name in seen:
                yield Problem(
                    f"{path}.name",
                    f"model {kind} '{tensor.name}' is specified more than once for {config.name}",
                    expected=f"an entry for each {kind}",
                )
            seen.add(tensor.name)


def completed_problems(config: ModelConfig, devices: Devices) -> Problems:
    """Problems of tensors and instance groups in a complete config, independent of its backend."""
    yield from tensor_problems(config)
    yield from ragged_problems(config)
    if not is_ensemble(config):
        yield from group_problems(config, devices)


def _batching_problems(batching: ModelDynamicBatching, config: ModelConfig) -> Problems:
    name = config.name
    for number, size in enumerate(batching.preferred_batch_size):
        path = f"dynamic_batching.preferred_batch_size[{number}]"
        if size <= 0:
            yield Problem(
                path, f"dynamic batching preferred size must be positive for {name}", expected="at least 1"
            )
        elif size > config.max_batch_size:
            yield Problem(
                path,
                f"dynamic batching preferred size must be <= max batch size for {name}",
                expected=f"at most {config.max_batch_size}, the max_batch_size",
            )
    levels = batching.priority_levels
    if levels:
        if not 1 <= batching.default_priority_level <= levels:
            yield Problem(
                "dynamic_batching.default_priority_level",
                f"default priority level must be in range [1, {levels}] for {name}",
                expected=f"1 to {levels}",
            )
        for level in sorted(batching.priority_queue_policy):
            if not 1 <= level <= levels:
                yield Problem(
                    entry_path("dynamic_batching.priority_queue_policy", level),
                    f"priority queue policy must have priority level in range [1, {levels}] for {name}",
                    expected=f"1 to {levels}",
                    found=str(level),
                )
    if batching.preserve_ordering:
        yield from _ordering_problems(batching, name)


def _ordering_problems(batching: ModelDynamicBatching, name: str) -> Problems:
    if batching.priority_levels > 1:
        yield Problem(
            "dynamic_batching.priority_levels",
            f"Only one priority level is allowed when 'preserve_ordering' is true for {name}",
            expected="1, or no preserve_ordering",
        )
    named = batching.priority_queue_policy
    policies = {"dynamic_batching.default_queue_policy": batching.default_queue_policy} | {
        entry_path("dynamic_batching.priority_queue_policy", level): named[level] for level in sorted(named)
    }
    for path, policy in policies.items():
        if policy.timeout_action == ModelQueuePolicy.DELAY:
            yield Problem(
                f"{path}.timeout_action",
                f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true "
                f"for {name}",
                expected="REJECT, or no preserve_ordering",
            )


def _cache_problems(config: ModelConfig) -> Problems:
    path = "response_cache.enable"
    reason = None
    if config.HasField("sequence_batching"):
        reason = "sequence batching scheduler"
    elif config.model_transaction_policy.decoupled:
        reason = "'decoupled' transaction policy"
    if reason is not None:
        yield Problem(path, uncacheable_text(config.name, reason), expected="false")
    if config.dynamic_batching.preserve_ordering:
        yield Problem(
            path,
            f"response_cache of model '{config.name}' can't be enabled with preserve_ordering of its "
            f"dynamic_batching: answers from the cache do not wait for those before them; disable one of "
            f"them",
            expected="false, or no preserve_ordering",
        )


def uncacheable_text(name: str, reason: str) -> str:
    """Triton's error for a model whose responses can't be cached."""
    return (
        f"Response Cache does not currently support model {name} with {reason}. Please disable the response "
        f"cache."
    )


def _metrics_problems(metrics: ModelMetrics) -> Problems:
    for number, control in enumerate(metrics.metric_control):
        path = f"model_metrics.metric_control[{number}]"
        if not control.HasField("metric_identifier"):
            yield Problem(
                f"{path}.metric_identifier",
                "metric control must specify 'metric_identifier'",
                found="nothing",
            )
        elif not control.metric_identifier.family:
            yield Problem(
                f"{path}.metric_identifier.family",
                "metric identifier must specify non-empty 'family'",
                found="nothing",
            )
        if not control.HasField("histogram_options"):
            yield Problem(
                f"{path}.histogram_options",
                "metric control must specify 'histogram_options'",
                found="nothing",
            )
        elif not control.histogram_options.buckets:
            yield Problem(
                f"{path}.histogram_options.buckets",
                "histogram options must specify non-empty 'buckets'",
                found="nothing",
            )


def _tensor_problems(path: str, tensor: ModelInput | ModelOutput, kind: str, batching: bool) -> Problems:
    """Problems of one tensor; the caller adds the model's name."""
    if not tensor.name:
        yield Problem(f"{path}.name", f"model {kind} must specify 'name'", found="nothing")
    prefix = f"model {kind} '{tensor.name}'"
    if tensor.data_type not in WIRE_NAMES:
        yield Problem(
            f"{path}.data_type", f"{prefix} must specify 'data_type'", expected="a type such as TYPE_FP32"
        )
    if not tensor.dims:
        yield Problem(
            f"{path}.dims", f"{prefix} must specify 'dims'", expected="at least one dim", found="nothing"
        )
        return
    sound = True
    for number, dim in _bad_dimensions(tensor.dims):
        sound = False
        yield Problem(
            f"{path}.dims[{number}]",
            f"{prefix} dimension {_DIMENSION_RULE}",
            expected="at least 1, or -1 for a variable one",
            found=str(dim),
        )
    if isinstance(tensor, ModelInput) and tensor.format != ModelInput.FORMAT_NONE and len(tensor.dims) != 3:
        yield Problem(
            f"{path}.dims",
            "model input NHWC/NCHW require 3 dims",
            expected="3 dims",
            found=str(len(tensor.dims)),
        )
    if tensor.HasField("reshape") and sound:
        yield from _reshape_problems(
            f"{path}.reshape.shape", prefix, tensor.dims, tensor.reshape.shape, batching
        )


def _reshape_problems(
    path: str, prefix: str, dims: Sequence[int], shape: Sequence[int], batching: bool
) -> Problems:
    if not shape and not batching:
        yield Problem(
            path,
            f"{prefix} cannot have empty reshape for non-batching model as scalar tensors are not supported",
            expected="at least one dim",
            found="nothing",
        )
        return
    bad = list(_bad_dimensions(shape))
    for number, dim in bad:
        yield Problem(
            f"{path}[{number}]",
            f"{prefix} reshape dimensions {_DIMENSION_RULE}",
            expected="at least 1, or -1 for a variable one",
            found=str(dim),
        )
    if bad:
        return
    dims_chunks, shape_chunks = _chunk_sizes(dims), _chunk_sizes(shape)
    variable = (len(dims_chunks) > 1, len(shape_chunks) > 1)
    if all(variable) and len(dims_chunks) != len(shape_chunks):
        yield Problem(
            path,
            f"{prefix} has different number of variable-size dimensions for dims and reshape",
            expected=f"{len(dims_chunks) - 1} of them",
            found=str(len(shape_chunks) - 1),
        )
    elif dims_chunks != shape_chunks:
        yield Problem(
            path,
            f"{prefix} has different size for dims and reshape",
            expected=f"a shape of the same size as {list(dims)}",
        )


def _chunk_sizes(dims: Iterable[int]) -> list[int]:
    """Element counts between variable dimensions: [2, -1, 3, 4] gives [2, 12]."""
    chunks: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            chunks.append([])
        else:
            chunks[-1].append(dim)
    return [prod(chunk) for chunk in chunks]


def _bad_dimensions(dims: Iterable[int]) -> Iterator[tuple[int, int]]:
    return ((number, dim) for number, dim in enumerate(dims) if dim < 1 and dim != -1)


_MOST_LEVELS = 1000
_MOST_ROWS = 100_000


def check_supported(config: ModelConfig, namespaces: bool = False) -> None:
    """Checks that conch supports everything in a config.

    Raises:
        UnsupportedError: It does not; the text names the fields.
    """
    fields = list(_unsupported(config, namespaces))
    if fields:
        names = ", ".join(f"'{name}'" for _, name in fields)
        raise UnsupportedError(f"model '{config.name}' uses {names}: not supported yet")


def support_problems(config: ModelConfig) -> Problems:
    """Unsupported features of a config."""
    for path, name in _unsupported(config, False):
        yield Problem(
            path,
            f"model '{config.name}' uses '{name}': not supported yet",
            expected=f"a version of conch that has it; this one is without '{name}'",
            kind=UnsupportedError,
        )


def _unsupported(config: ModelConfig, namespaces: bool) -> Iterator[tuple[str, str]]:
    """Paths and names of unsupported features; for those of tensors, one for each tensor that has it."""
    for number, step in enumerate(config.ensemble_scheduling.step):
        if step.model_namespace and not namespaces:
            path = f"ensemble_scheduling.step[{number}].model_namespace"
            yield path, "ensemble_scheduling.step.model_namespace"
            break
    is_plan = config.backend == "tensorrt"
    kinds: dict[str, Sequence[ModelInput | ModelOutput]] = {"input": config.input, "output": config.output}
    for kind, tensors in kinds.items():
        for number, tensor in enumerate(tensors):
            for field in ("is_shape_tensor", "is_non_linear_format_io"):
                if getattr(tensor, field) and not (is_plan and field == "is_shape_tensor"):
                    yield f"{kind}[{number}].{field}", f"{kind}[{tensor.name}].{field}"
    # Each level has its own queue, and the config may be a client's.
    if config.HasField("dynamic_batching") and config.dynamic_batching.priority_levels > _MOST_LEVELS:
        path = "dynamic_batching.priority_levels"
        yield path, f"{path} > {_MOST_LEVELS}"
    # Each row has its own slot.
    direct = config.HasField("sequence_batching") and not config.sequence_batching.HasField("oldest")
    if direct and config.max_batch_size > _MOST_ROWS:
        yield "max_batch_size", f"sequence_batching.direct with max_batch_size > {_MOST_ROWS}"
    on_gpu = any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)
    if on_gpu and config.cc_model_filenames and not is_plan:
        yield "cc_model_filenames", "cc_model_filenames"
