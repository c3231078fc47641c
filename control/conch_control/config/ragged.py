"""Ragged batching: checks a config's ``batch_input`` and ``batch_output``, and turns them into the core's.

The rules and most texts are Triton's. Unlike Triton, which has them for TensorRT and custom backends only,
they are allowed for every backend.
"""

from __future__ import annotations

from conch.core.errors import InvalidArgumentError
from conch.core.spec import BatchInput, BatchOutput
from conch.protocol.model_config_pb2 import TYPE_FP32, TYPE_INT32, ModelConfig
from conch.protocol.model_config_pb2 import BatchInput as BatchInputConfig
from conch.protocol.model_config_pb2 import BatchOutput as BatchOutputConfig
from conch_control.config.datatypes import WIRE_NAMES


def validate_ragged(config: ModelConfig) -> None:
    """Checks a completed config's batch inputs and outputs.

    Raises:
        InvalidArgumentError: One of them breaks a rule.
    """
    inputs = {tensor.name: tensor for tensor in config.input}
    targets: set[str] = set()
    for made in config.batch_input:
        what = f"batch input kind '{_input_kind(made)}'"
        if len(made.source_input) != 1:
            raise InvalidArgumentError(f"{what} expects 1 source input, got {len(made.source_input)}")
        if made.data_type not in (TYPE_INT32, TYPE_FP32):
            raise InvalidArgumentError("batch input data type must be TYPE_INT32 or TYPE_FP32")
        _check_source(made.source_input[0], what, config)
        if not made.target_name:
            raise InvalidArgumentError(f"{what} must specify 'target_name' for {config.name}")
        for name in made.target_name:
            if name in inputs or name in targets:
                raise InvalidArgumentError(
                    f"target input name '{name}' of {what} is taken by another input for {config.name}; "
                    f"inputs that the server makes are not listed under 'input'"
                )
            targets.add(name)
    outputs = {tensor.name for tensor in config.output}
    scattered: set[str] = set()
    for split in config.batch_output:
        what = f"batch output kind '{_output_kind(split)}'"
        if len(split.source_input) != 1:
            raise InvalidArgumentError(f"{what} expects 1 source input, got {len(split.source_input)}")
        _check_source(split.source_input[0], what, config)
        for name in split.target_name:
            if name not in outputs:
                raise InvalidArgumentError(f"unknown target output name '{name}'")
            if name in scattered:
                raise InvalidArgumentError(f"target output name '{name}' can only be specified once")
            scattered.add(name)
    if (targets or scattered) and config.max_batch_size == 0:
        raise InvalidArgumentError(
            f"'batch_input' and 'batch_output' need max_batch_size > 0 for {config.name}"
        )


def batch_inputs(config: ModelConfig) -> tuple[BatchInput, ...]:
    """The batch inputs of a checked config."""
    return tuple(
        BatchInput(
            _input_kind(made), tuple(made.target_name), WIRE_NAMES[made.data_type], made.source_input[0]
        )
        for made in config.batch_input
    )


def batch_outputs(config: ModelConfig) -> tuple[BatchOutput, ...]:
    """The batch outputs of a checked config."""
    return tuple(
        BatchOutput(_output_kind(split), tuple(split.target_name), split.source_input[0])
        for split in config.batch_output
    )


def _check_source(name: str, what: str, config: ModelConfig) -> None:
    source = next((tensor for tensor in config.input if tensor.name == name), None)
    if source is None:
        raise InvalidArgumentError(f"unknown source input name '{name}'")
    if source.optional:
        raise InvalidArgumentError(
            f"source input '{name}' of {what} must not be optional for {config.name}: a request may leave it "
            f"out"
        )


def _input_kind(made: BatchInputConfig) -> str:
    return BatchInputConfig.Kind.Name(made.kind)


def _output_kind(split: BatchOutputConfig) -> str:
    return BatchOutputConfig.Kind.Name(split.kind)
