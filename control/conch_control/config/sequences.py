"""The ``sequence_batching`` of a config: its defaults, its rules, and what the core is told of it.

Rules and texts are Triton's; where it only fails later, or ignores what it can't do, the load fails here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Literal

from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch.core.spec import ControlTensor, SequenceBatching, StateSpec
from conch.core.tensor import ELEMENT_SIZES, decode_bytes
from conch.protocol.model_config_pb2 import ModelConfig, ModelSequenceBatching
from conch_control.config.datatypes import WIRE_NAMES
from conch_control.config.paths import stays_within

_IDLE_US = 1_000_000
_FOLDER = "initial_state"
_EMPTY_STRING = 4
"""Bytes of an empty BYTES element: its length, which is zero."""
_LARGEST_STATE = 2**31
"""Each sequence has its own; a config may be a client's text, so it must not ask for any amount of memory."""

_FALSE_TRUE = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
_CORRID_TYPES = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")

_Control = ModelSequenceBatching.Control
_State = ModelSequenceBatching.State
_KINDS: dict[int, Literal["START", "READY", "END", "CORRID"]] = {
    _Control.CONTROL_SEQUENCE_START: "START",
    _Control.CONTROL_SEQUENCE_READY: "READY",
    _Control.CONTROL_SEQUENCE_END: "END",
    _Control.CONTROL_SEQUENCE_CORRID: "CORRID",
}


def normalize_sequences(config: ModelConfig) -> None:
    """Fills in the defaults of a config's ``sequence_batching``, if it has one."""
    if not config.HasField("sequence_batching"):
        return
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or _IDLE_US
    # Asking for the field of a strategy that was not chosen must not choose it.
    if batching.HasField("oldest") and config.max_batch_size > 0 and not batching.oldest.preferred_batch_size:
        batching.oldest.preferred_batch_size.append(config.max_batch_size)


def validate_sequences(config: ModelConfig) -> None:
    """Checks a config's ``sequence_batching``, if it has one, but for its states.

    Raises:
        InvalidArgumentError: It breaks a rule.
    """
    if not config.HasField("sequence_batching"):
        return
    batching = config.sequence_batching
    for problem in _control_problems(config):
        raise InvalidArgumentError(problem)
    for size in batching.oldest.preferred_batch_size:
        if size <= 0:
            raise InvalidArgumentError(
                f"sequence batching preferred batch size must be positive for {config.name}"
            )
        if size > config.max_batch_size:
            raise InvalidArgumentError(
                f"sequence batching preferred batch size must be <= max batch size for {config.name}"
            )
    if not 0.0 <= batching.direct.minimum_slot_utilization <= 1.0:
        raise InvalidArgumentError(
            f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {config.name}"
        )


def sequence_batching(config: ModelConfig, directory: Path) -> SequenceBatching | None:
    """What the core is told of a config's ``sequence_batching``; None where it has none.

    ``use_same_buffer_for_input_output`` and ``use_growable_memory`` need nothing: they say how to save memory
    on a GPU, and here a state lives in host memory of its own, of any size.

    Args:
        config: The config, normalised and validated.
        directory: The model's directory; files come from its folder ``initial_state``.

    Raises:
        ConchError: A state breaks a rule, or its file can't be read or is not in that folder.
    """
    if not config.HasField("sequence_batching"):
        return None
    batching = config.sequence_batching
    oldest = batching.WhichOneof("strategy_choice") == "oldest"
    chosen = batching.oldest if oldest else batching.direct
    candidates = batching.oldest.max_candidate_sequences
    return SequenceBatching(
        strategy="OLDEST" if oldest else "DIRECT",
        max_idle_ns=batching.max_sequence_idle_microseconds * 1000,
        controls=tuple(
            _control_tensor(tensor.name, control)
            for tensor in batching.control_input
            for control in tensor.control
        ),
        states=tuple(_states(batching, directory)),
        max_queue_delay_ns=chosen.max_queue_delay_microseconds * 1000,
        min_slot_utilization=batching.direct.minimum_slot_utilization,
        max_candidates=candidates if candidates > 0 else max(config.max_batch_size, 1),
        preferred_sizes=tuple(sorted(set(batching.oldest.preferred_batch_size))),
        preserve_ordering=batching.oldest.preserve_ordering,
        iterative=batching.iterative_sequence,
    )


def _control_problems(config: ModelConfig) -> Iterator[str]:
    name = config.name
    seen: set[str] = set()
    kinds: set[int] = set()
    for tensor in config.sequence_batching.control_input:
        if not tensor.name:
            yield f"sequence batching control tensor must have a name for {name}"
        # Triton lets one tensor have two kinds, of which one then overwrites the other.
        if tensor.name in seen or len({control.kind for control in tensor.control}) > 1:
            yield (
                f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds "
                f"for {name}"
            )
        seen.add(tensor.name)
        for control in tensor.control:
            if control.kind not in _KINDS:
                yield f"sequence batching control tensor '{tensor.name}' has no known control kind for {name}"
            kind = _Control.Kind.Name(control.kind)
            if control.kind in kinds:
                yield f"sequence batching specifies multiple {kind} tensors for {name}"
            kinds.add(control.kind)
            check = _typed_problems if _KINDS[control.kind] == "CORRID" else _boolean_problems
            yield from check(control, kind, name)


def _boolean_problems(control: _Control, kind: str, name: str) -> Iterator[str]:
    given = [field for field in _FALSE_TRUE if getattr(control, field)]
    if not given:
        yield (
            f"sequence batching must specify either 'int32_false_true', 'fp32_false_true' or "
            f"'bool_false_true' for {kind} for {name}"
        )
    elif len(given) > 1:
        yield (
            f"sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' for {kind} for {name}"
        )
    elif len(getattr(control, given[0])) != 2:
        yield f"sequence batching control '{given[0]}' must have exactly 2 entries for {kind} for {name}"


def _typed_problems(control: _Control, kind: str, name: str) -> Iterator[str]:
    if any(getattr(control, field) for field in _FALSE_TRUE):
        yield (
            f"sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or "
            f"'bool_false_true' for {kind} for {name}"
        )
    if WIRE_NAMES.get(control.data_type) not in _CORRID_TYPES:
        yield (
            f"unexpected data type for control {kind} for {name}. Allowed data types are TYPE_UINT64, "
            f"TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
        )


def _control_tensor(name: str, control: _Control) -> ControlTensor:
    kind = _KINDS[control.kind]
    if kind == "CORRID":
        return ControlTensor(name, kind, WIRE_NAMES[control.data_type])
    field = next(field for field in _FALSE_TRUE if getattr(control, field))
    false_value, true_value = getattr(control, field)
    return ControlTensor(name, kind, _FALSE_TRUE[field], false_value, true_value)


def _states(batching: ModelSequenceBatching, directory: Path) -> Iterator[StateSpec]:
    inputs = {tensor.name for tensor in batching.control_input}
    outputs: set[str] = set()
    for state in batching.state:
        if not state.input_name or not state.output_name:
            raise InvalidArgumentError(
                "sequence batching state must have an 'input_name' and an 'output_name'"
            )
        if state.input_name in inputs:
            raise InvalidArgumentError(f"State input name '{state.input_name}' specified more than once.")
        if state.output_name in outputs:
            raise InvalidArgumentError(f"State output name '{state.output_name}' specified more than once.")
        inputs.add(state.input_name)
        outputs.add(state.output_name)
        yield _state(state, directory)


def _state(state: _State, directory: Path) -> StateSpec:
    name = state.input_name
    datatype = WIRE_NAMES.get(state.data_type)
    if datatype is None:
        raise InvalidArgumentError(f"state input '{name}' must specify 'data_type'")
    if any(dim < -1 for dim in state.dims):
        raise InvalidArgumentError(f"state input '{name}' dimension must be integer >= 0, or -1 for variable")
    if state.use_growable_memory and not state.use_same_buffer_for_input_output:
        raise InvalidArgumentError(
            f"In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state input "
            f"name '{name}'."
        )
    if len(state.initial_state) > 1:
        raise InvalidArgumentError(
            f"initial_state field for state input '{name}' must contain exactly one or zero element. Found "
            f"'{len(state.initial_state)}' elements."
        )
    data = None
    if state.initial_state:
        dims = _initial_dims(state)
        size = _checked_size(name, datatype, dims)
        data = _initial_data(state, datatype, dims, size, directory)
    else:
        dims = tuple(1 if dim == -1 else dim for dim in state.dims)
        _checked_size(name, datatype, dims)
    return StateSpec(name, state.output_name, datatype, tuple(state.dims), dims, data)


def _initial_dims(state: _State) -> tuple[int, ...]:
    name = state.input_name
    initial = state.initial_state[0]
    if initial.data_type != state.data_type:
        raise InvalidArgumentError(
            f"The data type used for 'initial_state' field of state '{name}' does not match the state data "
            f"type."
        )
    if not initial.name:
        raise InvalidArgumentError(
            f"Field 'name' must be set when using initial_state for state input '{name}'."
        )
    if len(initial.dims) != len(state.dims):
        raise InvalidArgumentError(
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state "
            f"input '{name}'. {len(initial.dims)} != {len(state.dims)}"
        )
    for got, wanted in zip(initial.dims, state.dims, strict=True):
        if got < 0:
            raise InvalidArgumentError(
                f"'initial_state' field for state input name '{name}' contains variable dimensions."
            )
        if wanted not in (-1, got):
            raise InvalidArgumentError(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. {got} "
                f"!= {wanted}"
            )
    return tuple(initial.dims)


def _checked_size(name: str, datatype: str, dims: tuple[int, ...]) -> int:
    """Bytes of the first value; for BYTES, of as many empty elements."""
    size = prod(dims) * ELEMENT_SIZES.get(datatype, _EMPTY_STRING)
    if size > _LARGEST_STATE:
        raise InvalidArgumentError(
            f"the first value of state input '{name}' has {size} bytes; the most is {_LARGEST_STATE}"
        )
    return size


def _initial_data(
    state: _State, datatype: str, dims: tuple[int, ...], size: int, directory: Path
) -> bytes | None:
    """The first value of a state in wire form, or None for zeros."""
    initial = state.initial_state[0]
    match initial.WhichOneof("state_data"):
        case "zero_data":
            return None
        case "data_file":
            data = _read(initial.data_file, state.input_name, directory / _FOLDER)
        case _:
            raise InvalidArgumentError(
                f"initial_state setting expects state '{state.input_name}' to have state_data set"
            )
    if datatype == "BYTES":
        # Strings have no size to expect: the file is all of them, each after its length.
        return _checked_strings(data, prod(dims), initial.data_file)
    if len(data) < size:
        raise InvalidArgumentError(
            f"initial_state setting expects {size} bytes, but the data provided from {initial.data_file} "
            f"only has {len(data)} bytes."
        )
    return data[:size]


def _checked_strings(data: bytes, count: int, file: str) -> bytes:
    try:
        found = len(decode_bytes(data))
    except ConchError as error:
        raise InvalidArgumentError(f"initial_state file '{file}': {error.message}") from error
    if found != count:
        raise InvalidArgumentError(
            f"initial_state setting expects {count} strings, but the data provided from {file} has {found}"
        )
    return data


def _read(file: str, name: str, folder: Path) -> bytes:
    if not stays_within(folder, file):
        raise InvalidArgumentError(
            f"file '{file}' of state input '{name}' must stay within the folder '{_FOLDER}' of the model"
        )
    path = folder / file
    try:
        with path.open("rb") as opened:
            return opened.read(_LARGEST_STATE)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise InternalError(f"failed to open text file for read {path}: {reason}") from error
    except ValueError as error:  # no path at all
        raise InvalidArgumentError(f"file '{file}' of state input '{name}': {error}") from error
