"""The ``sequence_batching`` of a config: its defaults, breaches of its rules, and the core's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.spec import ControlTensor, SequenceBatching, StateSpec
from conch_control.config.parse import normalize, parse_config
from conch_control.config.problems import raise_first, result_or_raise
from conch_control.config.sequences import checked_sequences
from conch_control.config.validate import config_problems

KINDS = ("START", "END", "READY")
NEITHER = "either 'int32_false_true', 'fp32_false_true' or 'bool_false_true'"


def control(name: str, kind: str, values: str) -> str:
    return f'control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{kind} {values} }} }}'


def build(text: str, directory: Path = Path("none"), batch: int = 4) -> SequenceBatching:
    config = parse_config(
        f'name: "m" backend: "b" max_batch_size: {batch} sequence_batching {{ {text} }}', "c"
    )
    normalize(config)
    raise_first(config_problems(config))
    made = result_or_raise(checked_sequences(config, directory))
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('control_input { name: "" }', "sequence batching control tensor must have a name for m"),
        (
            control("T", "START", "int32_false_true: [ 0, 1 ]")
            + control("T", "END", "int32_false_true: [ 0, 1 ]"),
            "sequence batching control tensor 'T' is specified for multiple control kinds for m",
        ),
        (
            'control_input { name: "T" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }'
            " control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }",
            "sequence batching control tensor 'T' is specified for multiple control kinds for m",
        ),
        (
            'control_input { name: "T" control { kind: 77 } }',
            "sequence batching control tensor 'T' has no known control kind for m",
        ),
        *(
            case
            for kind in KINDS
            for case in (
                (
                    control("A", kind, "int32_false_true: [ 0, 1 ]")
                    + control("B", kind, "fp32_false_true: [ 0, 1 ]"),
                    f"sequence batching specifies multiple CONTROL_SEQUENCE_{kind} tensors for m",
                ),
                (
                    control("A", kind, ""),
                    f"sequence batching must specify {NEITHER} for CONTROL_SEQUENCE_{kind} for m",
                ),
                (
                    control("A", kind, "int32_false_true: [ 0, 1 ] bool_false_true: [ false, true ]"),
                    "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' "
                    f"and 'bool_false_true' for CONTROL_SEQUENCE_{kind} for m",
                ),
                *(
                    (
                        control("A", kind, f"{values}_false_true: [ {given} ]"),
                        f"sequence batching control '{values}_false_true' must have exactly 2 entries for "
                        f"CONTROL_SEQUENCE_{kind} for m",
                    )
                    for values, given in (("int32", "0"), ("fp32", "0, 1, 2"), ("bool", "true"))
                ),
            )
        ),
        (
            control("A", "CORRID", "data_type: TYPE_UINT64")
            + control("B", "CORRID", "data_type: TYPE_INT64"),
            "sequence batching specifies multiple CONTROL_SEQUENCE_CORRID tensors for m",
        ),
        (
            control("A", "CORRID", "data_type: TYPE_UINT64 int32_false_true: [ 0, 1 ]"),
            f"sequence batching must not specify {NEITHER} for CONTROL_SEQUENCE_CORRID for m",
        ),
        *(
            (
                control("A", "CORRID", values),
                "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are "
                "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
            )
            for values in ("", "data_type: TYPE_FP32", "data_type: 99")
        ),
        (
            "oldest { preferred_batch_size: [ 1, 0 ] }",
            "sequence batching preferred batch size must be positive for m",
        ),
        (
            "oldest { preferred_batch_size: [ 5 ] }",
            "sequence batching preferred batch size must be <= max batch size for m",
        ),
        *(
            (
                f"direct {{ minimum_slot_utilization: {value} }}",
                "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
            )
            for value in ("-0.1", "1.1", "nan")
        ),
    ],
)
def test_rules(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        build(text)
    assert raised.value.message == message


@pytest.mark.parametrize(
    ("text", "batch", "expected"),
    [
        ("", 4, "max_sequence_idle_microseconds: 1000000"),
        ("direct {}", 4, "max_sequence_idle_microseconds: 1000000 direct {}"),
        ("oldest {}", 4, "max_sequence_idle_microseconds: 1000000 oldest { preferred_batch_size: 4 }"),
        ("oldest {}", 0, "max_sequence_idle_microseconds: 1000000 oldest {}"),
        (
            "oldest { preferred_batch_size: 2 } max_sequence_idle_microseconds: 5",
            4,
            "max_sequence_idle_microseconds: 5 oldest { preferred_batch_size: 2 }",
        ),
    ],
)
def test_defaults(text: str, batch: int, expected: str) -> None:
    config = parse_config(f"max_batch_size: {batch} sequence_batching {{ {text} }}", "c")
    normalize(config)
    normalize(config)  # again, as after completion
    assert (
        config.sequence_batching == parse_config(f"sequence_batching {{ {expected} }}", "c").sequence_batching
    )


def test_a_config_without_sequences_gets_none() -> None:
    config = parse_config('name: "m"', "c")
    normalize(config)
    assert not config.HasField("sequence_batching")
    assert result_or_raise(checked_sequences(config, Path("none"))) is None


def test_everything_the_core_reads() -> None:
    direct = build(
        control("S", "START", "int32_false_true: [ 0, 1 ]")
        + control("R", "READY", "fp32_false_true: [ -1, 2 ]")
        + control("E", "END", "bool_false_true: [ false, true ]")
        + control("C", "CORRID", "data_type: TYPE_STRING")
        + "max_sequence_idle_microseconds: 7"
        + " direct { max_queue_delay_microseconds: 3 minimum_slot_utilization: 0.5 }"
    )
    assert direct == SequenceBatching(
        strategy="DIRECT",
        max_idle_ns=7_000,
        controls=(
            ControlTensor("S", "START", "INT32", 0, 1),
            ControlTensor("R", "READY", "FP32", -1, 2),
            ControlTensor("E", "END", "BOOL", False, True),
            ControlTensor("C", "CORRID", "BYTES"),
        ),
        max_queue_delay_ns=3_000,
        min_slot_utilization=0.5,
        max_candidates=4,
    )
    oldest = build(
        "iterative_sequence: true oldest { max_candidate_sequences: 9 preferred_batch_size: [ 4, 2, 4 ] "
        "max_queue_delay_microseconds: 5 preserve_ordering: true }"
    )
    assert oldest == SequenceBatching(
        strategy="OLDEST",
        max_queue_delay_ns=5_000,
        max_candidates=9,
        preferred_sizes=(2, 4),
        preserve_ordering=True,
        iterative=True,
    )


def test_no_strategy_is_direct_and_candidates_default_to_a_batch() -> None:
    assert build("").strategy == "DIRECT"
    assert build("oldest {}").max_candidates == 4
    assert build("oldest {}", batch=0).max_candidates == 1


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's directory with files in its folder for states and a secret beside it."""
    directory = tmp_path / "m"
    (directory / "initial_state").mkdir(parents=True)
    (directory / "initial_state" / "four").write_bytes(b"\1\2\3\4")
    (directory / "initial_state" / "strings").write_bytes(b"\2\0\0\0ab\0\0\0\0")
    (directory / "initial_state" / "broken").write_bytes(b"\2\0\0\0a")
    (directory / "secret").write_bytes(b"1234")
    return directory


def state(value: str, initial: str = "", name: str = "IN") -> str:
    made = f'initial_state {{ name: "i" {initial} }}' if initial else ""
    return f'state {{ input_name: "{name}" output_name: "{name}OUT" {value} {made} }}'


def test_states(directory: Path) -> None:
    made = build(
        state("data_type: TYPE_FP32 dims: [ -1, 2 ]", name="A")
        + state(
            "data_type: TYPE_STRING dims: [ 1 ]", "data_type: TYPE_STRING dims: 1 zero_data: true", name="B"
        )
        + state(
            "data_type: TYPE_UINT8 dims: -1 use_same_buffer_for_input_output: true use_growable_memory: true",
            'data_type: TYPE_UINT8 dims: 3 data_file: "four"',
            name="C",
        )
        + state(
            "data_type: TYPE_STRING dims: 2", 'data_type: TYPE_STRING dims: 2 data_file: "strings"', name="D"
        )
        + state("data_type: TYPE_FP16 dims: -1", "data_type: TYPE_FP16 dims: 0 zero_data: true", name="E")
        + state("data_type: TYPE_FP16", name="F"),
        directory,
    )
    assert made.states == (
        StateSpec("A", "AOUT", "FP32", (-1, 2), (1, 2)),
        StateSpec("B", "BOUT", "BYTES", (1,), (1,)),
        StateSpec("C", "COUT", "UINT8", (-1,), (3,), b"\1\2\3"),
        StateSpec("D", "DOUT", "BYTES", (2,), (2,), b"\2\0\0\0ab\0\0\0\0"),
        StateSpec("E", "EOUT", "FP16", (-1,), (0,)),
        StateSpec("F", "FOUT", "FP16", (), ()),
    )


INT8 = "data_type: TYPE_INT8 dims: 4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'state { input_name: "X" data_type: TYPE_INT8 dims: 1 }',
            "sequence batching state must have an 'input_name' and an 'output_name'",
        ),
        (state("dims: 1"), "state input 'IN' must specify 'data_type'"),
        (
            state("data_type: TYPE_INT8 dims: -2"),
            "state input 'IN' dimension must be integer >= 0, or -1 for variable",
        ),
        (state(INT8) + state(INT8), "State input name 'IN' specified more than once."),
        (
            control("IN", "START", "int32_false_true: [ 0, 1 ]") + state(INT8),
            "State input name 'IN' specified more than once.",
        ),
        (
            state(INT8, name="A") + f'state {{ input_name: "B" output_name: "AOUT" {INT8} }}',
            "State output name 'AOUT' specified more than once.",
        ),
        (
            state(f"{INT8} use_growable_memory: true"),
            "In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state input "
            "name 'IN'.",
        ),
        (
            state(f"{INT8} initial_state {{}} initial_state {{}}"),
            "initial_state field for state input 'IN' must contain exactly one or zero element. Found '2' "
            "elements.",
        ),
        (
            state(INT8, "data_type: TYPE_FP32 dims: 4 zero_data: true"),
            "The data type used for 'initial_state' field of state 'IN' does not match the state data type.",
        ),
        (
            state(f"{INT8} initial_state {{ {INT8} zero_data: true }}"),
            "Field 'name' must be set when using initial_state for state input 'IN'.",
        ),
        (
            state(INT8, "data_type: TYPE_INT8 dims: [ 1, 4 ] zero_data: true"),
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state "
            "input 'IN'. 2 != 1",
        ),
        (
            state("data_type: TYPE_INT8 dims: -1", "data_type: TYPE_INT8 dims: -1 zero_data: true"),
            "'initial_state' field for state input name 'IN' contains variable dimensions.",
        ),
        (
            state(INT8, "data_type: TYPE_INT8 dims: 3 zero_data: true"),
            "'initial_state' dim for input name 'IN' doesn't match 'state' dim description. 3 != 4",
        ),
        (state(INT8, INT8), "initial_state setting expects state 'IN' to have state_data set"),
        (
            state("data_type: TYPE_FP32 dims: [ 65536, 65536 ]"),
            "the first value of state input 'IN' has 17179869184 bytes; the most is 2147483648",
        ),
        (
            state("data_type: TYPE_FP32 dims: 4", 'data_type: TYPE_FP32 dims: 4 data_file: "four"'),
            "initial_state setting expects 16 bytes, but the data provided from four only has 4 bytes.",
        ),
        (
            state("data_type: TYPE_STRING dims: 3", 'data_type: TYPE_STRING dims: 3 data_file: "strings"'),
            "initial_state setting expects 3 strings, but the data provided from strings has 2",
        ),
        (
            state("data_type: TYPE_STRING dims: 1", 'data_type: TYPE_STRING dims: 1 data_file: "broken"'),
            "initial_state file 'broken': BYTES tensor ends inside an element",
        ),
        (
            state(INT8, f'{INT8} data_file: "../secret"'),
            "file '../secret' of state input 'IN' must stay within the folder 'initial_state' of the model",
        ),
        (state(INT8, f'{INT8} data_file: "/etc/passwd"'), "file '/etc/passwd' of state input 'IN' must stay"),
        (state(INT8, f'{INT8} data_file: "none"'), "initial_state/none: No such file or directory"),
        (state(INT8, f'{INT8} data_file: "nul\\000"'), "of state input 'IN': embedded null byte"),
    ],
)
def test_states_that_break_rules(directory: Path, text: str, message: str) -> None:
    with pytest.raises(ConchError) as raised:
        build(text, directory)
    assert message in raised.value.message
