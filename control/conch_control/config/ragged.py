"""Ragged batching: ``batch_input`` and ``batch_output`` of a config.

Rules and most texts are Triton's, which allows them only for TensorRT and custom backends; here all
backends may use them.
"""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from conch.core.spec import BatchInput, BatchOutput
from conch.protocol.model_config_pb2 import TYPE_FP32, TYPE_INT32, ModelConfig
from conch.protocol.model_config_pb2 import BatchInput as BatchInputConfig
from conch.protocol.model_config_pb2 import BatchOutput as BatchOutputConfig
from conch_control.config.problems import Problem, Problems, nearest
from conch_control.config.schema import WIRE_NAMES


def ragged_problems(config: ModelConfig) -> Problems:
    """Problems of batch inputs and outputs of a completed config."""
    inputs = {tensor.name: tensor for tensor in config.input}
    targets: set[str] = set()
    for number, made in enumerate(config.batch_input):
        path = f"batch_input[{number}]"
        what = f"batch input kind '{_input_kind(made)}'"
        yield from _kind_problems(f"{path}.kind", "input", made.kind, BatchInputConfig.Kind)
        if len(made.source_input) != 1:
            yield _one_source(path, what, len(made.source_input))
        if made.data_type not in (TYPE_INT32, TYPE_FP32):
            yield Problem(
                f"{path}.data_type",
                "batch input data type must be TYPE_INT32 or TYPE_FP32",
                expected="TYPE_INT32 or TYPE_FP32",
            )
        yield from _source_problems(path, made.source_input, what, config)
        if not made.target_name:
            yield Problem(
                f"{path}.target_name",
                f"{what} must specify 'target_name' for {config.name}",
                found="nothing",
            )
        for place, name in enumerate(made.target_name):
            if name in inputs or name in targets:
                yield Problem(
                    f"{path}.target_name[{place}]",
                    f"target input name '{name}' of {what} is taken by another input for {config.name}; "
                    f"inputs that the server makes are not listed under 'input'",
                )
            targets.add(name)
    outputs = {tensor.name for tensor in config.output}
    scattered: set[str] = set()
    for number, split in enumerate(config.batch_output):
        path = f"batch_output[{number}]"
        what = f"batch output kind '{_output_kind(split)}'"
        yield from _kind_problems(f"{path}.kind", "output", split.kind, BatchOutputConfig.Kind)
        if len(split.source_input) != 1:
            yield _one_source(path, what, len(split.source_input))
        yield from _source_problems(path, split.source_input, what, config)
        for place, name in enumerate(split.target_name):
            if name not in outputs:
                yield Problem(
                    f"{path}.target_name[{place}]",
                    f"unknown target output name '{name}'",
                    expected="the name of an output",
                    nearest=nearest(name, outputs),
                )
            elif name in scattered:
                yield Problem(
                    f"{path}.target_name[{place}]", f"target output name '{name}' can only be specified once"
                )
            scattered.add(name)
    if (targets or scattered) and config.max_batch_size == 0:
        yield Problem(
            "max_batch_size",
            f"'batch_input' and 'batch_output' need max_batch_size > 0 for {config.name}",
            expected="at least 1",
            found="0",
        )


def batch_inputs(config: ModelConfig) -> tuple[BatchInput, ...]:
    """Batch inputs of a valid config."""
    return tuple(
        BatchInput(
            _input_kind(made), tuple(made.target_name), WIRE_NAMES[made.data_type], made.source_input[0]
        )
        for made in config.batch_input
    )


def batch_outputs(config: ModelConfig) -> tuple[BatchOutput, ...]:
    """Batch outputs of a valid config."""
    return tuple(
        BatchOutput(_output_kind(split), tuple(split.target_name), split.source_input[0])
        for split in config.batch_output
    )


def _one_source(path: str, what: str, count: int) -> Problem:
    return Problem(
        f"{path}.source_input",
        f"{what} expects 1 source input, got {count}",
        expected="1 source input",
        found=str(count),
    )


def _source_problems(path: str, names: Sequence[str], what: str, config: ModelConfig) -> Problems:
    for place, name in enumerate(names):
        source = next((tensor for tensor in config.input if tensor.name == name), None)
        if source is None:
            yield Problem(
                f"{path}.source_input[{place}]",
                f"unknown source input name '{name}'",
                expected="the name of an input",
                nearest=nearest(name, [tensor.name for tensor in config.input]),
            )
        elif source.optional:
            yield Problem(
                f"{path}.source_input[{place}]",
                f"source input '{name}' of {what} must not be optional for {config.name}: a request may "
                f"leave it out",
            )


def _kind_problems(path: str, what: str, number: int, kinds: EnumTypeWrapper) -> Problems:
    # The text format allows any number.
    if number not in kinds.values():
        yield Problem(
            path, f"unknown batch {what} kind '{number}'", expected=f"one of {', '.join(kinds.keys())}"
        )


def _input_kind(made: BatchInputConfig) -> str:
    return _kind_name(made.kind, BatchInputConfig.Kind)


def _output_kind(split: BatchOutputConfig) -> str:
    return _kind_name(split.kind, BatchOutputConfig.Kind)


def _kind_name(number: int, kinds: EnumTypeWrapper) -> str:
    return str(kinds.Name(number)) if number in kinds.values() else str(number)
