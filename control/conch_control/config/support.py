"""Refuses configs that ask for what is not built yet, rather than serving them wrongly.

Settings that only hint at how to run a model faster, or that Triton's own defaults ignore as well, are
accepted and ignored; those that change answers or promises are not.
"""

from __future__ import annotations

from collections.abc import Iterator

from conch.core.errors import UnsupportedError
from conch.protocol.model_config_pb2 import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
)

_MOST_LEVELS = 1000


def check_supported(config: ModelConfig) -> None:
    """Checks that everything a config asks for is there.

    Raises:
        UnsupportedError: Something is not; the text names the fields.
    """
    fields = list(_unsupported(config))
    if fields:
        names = ", ".join(f"'{field}'" for field in fields)
        raise UnsupportedError(f"model '{config.name}' uses {names}: not supported yet")


def _unsupported(config: ModelConfig) -> Iterator[str]:
    for field in ("sequence_batching", "model_repository_agents"):
        if config.HasField(field):
            yield field
    if any(step.model_namespace for step in config.ensemble_scheduling.step):
        yield "ensemble_scheduling.step.model_namespace"
    for field in ("batch_input", "batch_output"):
        if getattr(config, field):
            yield field
    if config.response_cache.enable:
        yield "response_cache"
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            yield from _unsupported_of_tensor(kind, tensor)
    if config.HasField("dynamic_batching"):
        yield from _unsupported_of_batching(config, config.dynamic_batching)
    yield from _unsupported_of_groups(config)


def _unsupported_of_tensor(kind: str, tensor: ModelInput | ModelOutput) -> Iterator[str]:
    if isinstance(tensor, ModelInput) and tensor.allow_ragged_batch:
        yield f"{kind}[{tensor.name}].allow_ragged_batch"
    if tensor.is_shape_tensor:
        yield f"{kind}[{tensor.name}].is_shape_tensor"
    if tensor.is_non_linear_format_io:
        yield f"{kind}[{tensor.name}].is_non_linear_format_io"


def _unsupported_of_batching(config: ModelConfig, batching: ModelDynamicBatching) -> Iterator[str]:
    # Each level has queues of its own, so their number must not be a client's free choice.
    if batching.priority_levels > _MOST_LEVELS:
        yield f"dynamic_batching.priority_levels > {_MOST_LEVELS}"
    # One instance runs one batch at a time, so there the order is kept anyhow.
    if batching.preserve_ordering and _instances(config) > 1:
        yield "dynamic_batching.preserve_ordering"


def _instances(config: ModelConfig) -> int:
    return sum(max(group.count, 1) * max(len(group.gpus), 1) for group in config.instance_group)


def _unsupported_of_groups(config: ModelConfig) -> Iterator[str]:
    if any(group.passive for group in config.instance_group):
        yield "instance_group.passive"
    on_gpu = any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)
    if on_gpu and config.cc_model_filenames:
        yield "cc_model_filenames"
