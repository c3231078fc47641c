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
_MOST_ROWS = 100_000


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
    if any(step.model_namespace for step in config.ensemble_scheduling.step):
        yield "ensemble_scheduling.step.model_namespace"
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            yield from _unsupported_of_tensor(kind, tensor)
    if config.HasField("dynamic_batching"):
        yield from _unsupported_of_batching(config.dynamic_batching)
    # Each row has a place of its own.
    direct = config.HasField("sequence_batching") and not config.sequence_batching.HasField("oldest")
    if direct and config.max_batch_size > _MOST_ROWS:
        yield f"sequence_batching.direct with max_batch_size > {_MOST_ROWS}"
    yield from _unsupported_of_groups(config)


def _unsupported_of_tensor(kind: str, tensor: ModelInput | ModelOutput) -> Iterator[str]:
    if tensor.is_shape_tensor:
        yield f"{kind}[{tensor.name}].is_shape_tensor"
    if tensor.is_non_linear_format_io:
        yield f"{kind}[{tensor.name}].is_non_linear_format_io"


def _unsupported_of_batching(batching: ModelDynamicBatching) -> Iterator[str]:
    # Each level has queues of its own, so their number must not be a client's free choice.
    if batching.priority_levels > _MOST_LEVELS:
        yield f"dynamic_batching.priority_levels > {_MOST_LEVELS}"


def _unsupported_of_groups(config: ModelConfig) -> Iterator[str]:
    on_gpu = any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)
    if on_gpu and config.cc_model_filenames:
        yield "cc_model_filenames"
