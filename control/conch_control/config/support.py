"""Refuses configs that ask for what is not built yet, rather than serving them wrongly.

Settings that only hint at how to run a model faster, or that Triton's own defaults ignore as well, are
accepted and ignored; those that change answers or promises are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from conch.core.errors import UnsupportedError
from conch.protocol.model_config_pb2 import ModelConfig, ModelInput, ModelInstanceGroup, ModelOutput
from conch_control.config.problems import Problem, Problems

_MOST_LEVELS = 1000
_MOST_ROWS = 100_000


def check_supported(config: ModelConfig, namespaces: bool = False) -> None:
    """Checks that everything a config asks for is there.

    Args:
        config: The config.
        namespaces: Whether models have namespaces.

    Raises:
        UnsupportedError: Something is not; the text names the fields.
    """
    fields = list(_unsupported(config, namespaces))
    if fields:
        names = ", ".join(f"'{name}'" for _, name in fields)
        raise UnsupportedError(f"model '{config.name}' uses {names}: not supported yet")


def support_problems(config: ModelConfig) -> Problems:
    """What a config asks for that is not there, each thing by itself."""
    for path, name in _unsupported(config, False):
        yield Problem(
            path,
            f"model '{config.name}' uses '{name}': not supported yet",
            expected=f"a version of conch that has it; this one is without '{name}'",
            kind=UnsupportedError,
        )


def _unsupported(config: ModelConfig, namespaces: bool) -> Iterator[tuple[str, str]]:
    """Paths of fields and what messages call them; a name for each thing, if many fields ask for it."""
    for number, step in enumerate(config.ensemble_scheduling.step):
        if step.model_namespace and not namespaces:
            path = f"ensemble_scheduling.step[{number}].model_namespace"
            yield path, "ensemble_scheduling.step.model_namespace"
            break
    kinds: dict[str, Sequence[ModelInput | ModelOutput]] = {"input": config.input, "output": config.output}
    for kind, tensors in kinds.items():
        for number, tensor in enumerate(tensors):
            for field in ("is_shape_tensor", "is_non_linear_format_io"):
                if getattr(tensor, field):
                    yield f"{kind}[{number}].{field}", f"{kind}[{tensor.name}].{field}"
    # Each level has queues of its own, so their number must not be a client's free choice.
    if config.HasField("dynamic_batching") and config.dynamic_batching.priority_levels > _MOST_LEVELS:
        path = "dynamic_batching.priority_levels"
        yield path, f"{path} > {_MOST_LEVELS}"
    # Each row has a place of its own.
    direct = config.HasField("sequence_batching") and not config.sequence_batching.HasField("oldest")
    if direct and config.max_batch_size > _MOST_ROWS:
        yield "max_batch_size", f"sequence_batching.direct with max_batch_size > {_MOST_ROWS}"
    on_gpu = any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)
    if on_gpu and config.cc_model_filenames:
        yield "cc_model_filenames", "cc_model_filenames"
