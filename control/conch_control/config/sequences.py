"""``sequence_batching`` of a config: defaults, checks, conversion to the core.

Rules and texts are Triton's; a load fails here also where Triton fails later or ignores a setting.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Literal

from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.spec import ControlTensor, SequenceBatching, StateSpec
from conch.core.tensor import ELEMENT_SIZES, decode_bytes
from conch.protocol.model_config_pb2 import ModelConfig, ModelSequenceBatching
from conch_control.config.named_files import read_error, stays_within
from conch_control.config.problems import (
    Checked,
    Problem,
    Problems,
    attempt,
)
from conch_control.config.schema import WIRE_NAMES

_IDLE_US = 1_000_000
_FOLDER = "initial_state"
_EMPTY_STRING = 4
"""Bytes of an empty BYTES element: its length field."""
_LARGEST_STATE = 2**31
"""Largest initial state in bytes. Each sequence has its own, and the config may be a client's."""

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
    """Fills in the defaults."""
    if not config.HasField("sequence_batching"):
        return
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or _IDLE_US
    # Reading a field of the other strategy must not select it.
    if batching.HasField("oldest") and config.max_batch_size > 0 and not batching.oldest.preferred_batch_size:
        batching.oldest.preferred_batch_size.append(config.max_batch_size)


def sequence_problems(config: ModelConfig) -> Problems:
    """Problems of ``sequence_batching`` without its states."""
    if not config.HasField("sequence_batching"):
        return
    batching = config.sequence_batching
    yield from _control_problems(config)
    for number, size in enumerate(batching.oldest.preferred_batch_size):
        path = f"sequence_batching.oldest.preferred_batch_size[{number}]"
        if size <= 0:
            yield Problem(
                path,
                f"sequence batching preferred batch size must be positive for {config.name}",
                expected="at least 1",
            )
        elif size > config.max_batch_size:
            yield Problem(
                path,
                f"sequence batching preferred batch size must be <= max batch size for {config.name}",
                expected=f"at most {config.max_batch_size}",
            )
    if not 0.0 <= batching.direct.minimum_slot_utilization <= 1.0:
        yield Problem(
            "sequence_batching.direct.minimum_slot_utilization",
            f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {config.name}",
            expected="more than 0.0 and at most 1.0",
        )


def checked_sequences(config: ModelConfig, directory: Path) -> Checked[SequenceBatching | None]:
    """Sequence batching for the core, from a normalised config, and the problems of its states.

    ``use_same_buffer_for_input_output`` and ``use_growable_memory`` have no effect on states in host memory.
    """
    if not config.HasField("sequence_batching"):
        return None
    batching = config.sequence_batching
    states = yield from _states(batching, directory)
    if next(sequence_problems(config), None) is not None:
        return None
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
        states=states,
        max_queue_delay_ns=chosen.max_queue_delay_microseconds * 1000,
        min_slot_utilization=batching.direct.minimum_slot_utilization,
        max_candidates=candidates if candidates > 0 else max(config.max_batch_size, 1),
        preferred_sizes=tuple(sorted(set(batching.oldest.preferred_batch_size))),
        preserve_ordering=batching.oldest.preserve_ordering,
        iterative=batching.iterative_sequence,
    )


def _control_problems(config: ModelConfig) -> Problems:
    name = config.name
    seen: set[str] = set()
    kinds: set[int] = set()
    for number, tensor in enumerate(config.sequence_batching.control_input):
        path = f"sequence_batching.control_input[{number}]"
        if not tensor.name:
            yield Problem(
                f"{path}.name",
                f"sequence batching control tensor must have a name for {name}",
                found="nothing",
            )
        # Triton allows two kinds for one tensor, which overwrite each other.
        if tensor.name in seen or len({control.kind for control in tensor.control}) > 1:
            yield Problem(
                f"{path}.name",
                f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds "
                f"for {name}",
                expected="a tensor for each kind of control",
            )
        seen.add(tensor.name)
        for place, control in enumerate(tensor.control):
            at = f"{path}.control[{place}]"
            if control.kind not in _KINDS:
                yield Problem(
                    f"{at}.kind",
                    f"sequence batching control tensor '{tensor.name}' has no known control kind for {name}",
                    expected=f"one of {', '.join(_Control.Kind.keys())}",
                )
                continue
            kind = _Control.Kind.Name(control.kind)
            if control.kind in kinds:
                yield Problem(f"{at}.kind", f"sequence batching specifies multiple {kind} tensors for {name}")
            kinds.add(control.kind)
            check = _typed_problems if _KINDS[control.kind] == "CORRID" else _boolean_problems
            yield from check(at, control, kind, name)


def _boolean_problems(path: str, control: _Control, kind: str, name: str) -> Problems:
    given = [field for field in _FALSE_TRUE if getattr(control, field)]
    if not given:
        yield Problem(
            path,
            f"sequence batching must specify either 'int32_false_true', 'fp32_false_true' or "
            f"'bool_false_true' for {kind} for {name}",
            expected="one of int32_false_true, fp32_false_true and bool_false_true",
            found="none of them",
        )
    elif len(given) > 1:
        yield Problem(
            path,
            f"sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' for {kind} for {name}",
            expected="one of int32_false_true, fp32_false_true and bool_false_true",
            found=" and ".join(given),
        )
    elif len(getattr(control, given[0])) != 2:
        yield Problem(
            f"{path}.{given[0]}",
            f"sequence batching control '{given[0]}' must have exactly 2 entries for {kind} for {name}",
            expected="2 entries, the one for false and the one for true",
        )


def _typed_problems(path: str, control: _Control, kind: str, name: str) -> Problems:
    given = [field for field in _FALSE_TRUE if getattr(control, field)]
    if given:
        yield Problem(
            f"{path}.{given[0]}",
            f"sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or "
            f"'bool_false_true' for {kind} for {name}",
            expected="data_type in its place",
        )
    if WIRE_NAMES.get(control.data_type) not in _CORRID_TYPES:
        yield Problem(
            f"{path}.data_type",
            f"unexpected data type for control {kind} for {name}. Allowed data types are TYPE_UINT64, "
            f"TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
            expected="TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 or TYPE_STRING",
        )


def _control_tensor(name: str, control: _Control) -> ControlTensor:
    kind = _KINDS[control.kind]
    if kind == "CORRID":
        return ControlTensor(name, kind, WIRE_NAMES[control.data_type])
    field = next(field for field in _FALSE_TRUE if getattr(control, field))
    false_value, true_value = getattr(control, field)
    return ControlTensor(name, kind, _FALSE_TRUE[field], false_value, true_value)


def _states(batching: ModelSequenceBatching, directory: Path) -> Checked[tuple[StateSpec, ...]]:
    inputs = {tensor.name for tensor in batching.control_input}
    outputs: set[str] = set()
    states = []
    for number, state in enumerate(batching.state):
        path = f"sequence_batching.state[{number}]"
        if not state.input_name or not state.output_name:
            yield Problem(
                f"{path}.output_name" if state.input_name else f"{path}.input_name",
                "sequence batching state must have an 'input_name' and an 'output_name'",
                found="nothing",
            )
        elif state.input_name in inputs:
            yield Problem(
                f"{path}.input_name", f"State input name '{state.input_name}' specified more than once."
            )
        elif state.output_name in outputs:
            yield Problem(
                f"{path}.output_name", f"State output name '{state.output_name}' specified more than once."
            )
        inputs.add(state.input_name)
        outputs.add(state.output_name)
        made = yield from _state(path, state, directory)
        if made is not None:
            states.append(made)
    return tuple(states)


def _state(path: str, state: _State, directory: Path) -> Checked[StateSpec | None]:
    name = state.input_name
    datatype = WIRE_NAMES.get(state.data_type)
    if datatype is None:
        yield Problem(
            f"{path}.data_type", f"state input '{name}' must specify 'data_type'", expected="an element type"
        )
        return None
    if any(dim < -1 for dim in state.dims):
        number = next(number for number, dim in enumerate(state.dims) if dim < -1)
        yield Problem(
            f"{path}.dims[{number}]",
            f"state input '{name}' dimension must be integer >= 0, or -1 for variable",
            expected="0 or more, or -1 for variable",
        )
        return None
    if state.use_growable_memory and not state.use_same_buffer_for_input_output:
        yield Problem(
            f"{path}.use_growable_memory",
            f"In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state input "
            f"name '{name}'.",
            expected="use_same_buffer_for_input_output: true beside it",
        )
    if len(state.initial_state) > 1:
        yield Problem(
            f"{path}.initial_state[1]",
            f"initial_state field for state input '{name}' must contain exactly one or zero element. Found "
            f"'{len(state.initial_state)}' elements.",
            expected="at most one",
            found=str(len(state.initial_state)),
        )
    if not state.initial_state:
        dims = tuple(1 if dim == -1 else dim for dim in state.dims)
        yield from _size_problems(f"{path}.dims", name, datatype, dims)
        return StateSpec(name, state.output_name, datatype, tuple(state.dims), dims)
    sound = True
    for problem in _initial_problems(f"{path}.initial_state[0]", state):
        sound = False
        yield problem
    dims = tuple(state.initial_state[0].dims)
    for problem in _size_problems(f"{path}.initial_state[0].dims", name, datatype, dims) if sound else ():
        sound = False
        yield problem
    if not sound:
        return None
    data = yield from _initial_data(f"{path}.initial_state[0]", state, datatype, dims, directory)
    return StateSpec(name, state.output_name, datatype, tuple(state.dims), dims, data)


def _initial_problems(path: str, state: _State) -> Problems:
    name = state.input_name
    initial = state.initial_state[0]
    if initial.data_type != state.data_type:
        yield Problem(
            f"{path}.data_type",
            f"The data type used for 'initial_state' field of state '{name}' does not match the state data "
            f"type.",
            expected=f"TYPE_{WIRE_NAMES[state.data_type]}".replace("BYTES", "STRING"),
        )
    if not initial.name:
        yield Problem(
            f"{path}.name",
            f"Field 'name' must be set when using initial_state for state input '{name}'.",
            found="nothing",
        )
    if len(initial.dims) != len(state.dims):
        yield Problem(
            f"{path}.dims",
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state "
            f"input '{name}'. {len(initial.dims)} != {len(state.dims)}",
            expected=f"{len(state.dims)} dims",
            found=f"{len(initial.dims)}",
        )
        return
    for number, (got, wanted) in enumerate(zip(initial.dims, state.dims, strict=True)):
        if got < 0:
            yield Problem(
                f"{path}.dims[{number}]",
                f"'initial_state' field for state input name '{name}' contains variable dimensions.",
                expected="0 or more",
            )
        elif wanted not in (-1, got):
            yield Problem(
                f"{path}.dims[{number}]",
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. {got} "
                f"!= {wanted}",
                expected=str(wanted),
            )


def _size(datatype: str, dims: tuple[int, ...]) -> int:
    """Bytes of an initial value; for BYTES, of empty elements."""
    return prod(dims) * ELEMENT_SIZES.get(datatype, _EMPTY_STRING)


def _size_problems(path: str, name: str, datatype: str, dims: tuple[int, ...]) -> Problems:
    size = _size(datatype, dims)
    if size > _LARGEST_STATE:
        yield Problem(
            path,
            f"the first value of state input '{name}' has {size} bytes; the most is {_LARGEST_STATE}",
            expected=f"at most {_LARGEST_STATE} bytes",
            found=f"{size} bytes",
        )


def _initial_data(
    path: str, state: _State, datatype: str, dims: tuple[int, ...], directory: Path
) -> Checked[bytes | None]:
    """Initial value of a state in wire form; None for zeros."""
    initial = state.initial_state[0]
    match initial.WhichOneof("state_data"):
        case "zero_data":
            return None
        case "data_file":
            path = f"{path}.data_file"
            data = yield from attempt(
                path, lambda: _read(initial.data_file, state.input_name, directory / _FOLDER)
            )
        case _:
            yield Problem(
                path,
                f"initial_state setting expects state '{state.input_name}' to have state_data set",
                expected="zero_data or data_file",
                found="neither",
            )
            return None
    if data is None:
        return None
    if datatype == "BYTES":
        # Strings have no fixed size: the whole file, each string after its length.
        return (yield from attempt(path, lambda: _checked_strings(data, prod(dims), initial.data_file)))
    size = _size(datatype, dims)
    if len(data) < size:
        yield Problem(
            path,
            f"initial_state setting expects {size} bytes, but the data provided from {initial.data_file} "
            f"only has {len(data)} bytes.",
            expected=f"a file of at least {size} bytes",
            found=f"{len(data)} bytes",
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
        raise read_error(path, error) from error
    except ValueError as error:  # no valid path
        raise InvalidArgumentError(f"file '{file}' of state input '{name}': {error}") from error
