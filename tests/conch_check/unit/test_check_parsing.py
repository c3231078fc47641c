from __future__ import annotations

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tests.support.configs import Layout, layouts

from conch.protocol.model_config_pb2 import ModelConfig
from conch_check.reading import read_text


def mistakes(text: str) -> list[tuple[int, int, str, str, str]]:
    return [
        (each.line, each.column, each.problem.path, each.problem.found, each.problem.nearest)
        for each in read_text(text).mistakes
    ]


def test_goes_on_after_each_mistake() -> None:
    text = """nam: "m"
input [ { name: "X" data_type: TYPE_FP23 dim: 3 } { name: "Y" dims: [ 1, x ], foo: 1, data_type: TYPE_INT8 } ]
max_batch_size "x"
platform: "p" platform: "q"
dynamic_batching {} sequence_batching { a: 1 }
zzz { a { b: 1 } }
parameters { key: "a" value: "b" }
instance_group { kind: KIND_CPU count: 2.5 gpus: -1 }
"""
    reading = read_text(text)
    assert mistakes(text) == [
        (1, 1, "nam", "'nam'", "name"),
        (2, 32, "input[0].data_type", "'TYPE_FP23'", "TYPE_FP32"),
        (2, 42, "input[0].dim", "'dim'", "dims"),
        (2, 51, "input[1]", "", ""),  # a comma is missing
        (2, 74, "input[1].dims[1]", "x", ""),
        (2, 79, "input[1].foo", "'foo'", ""),
        (3, 16, "max_batch_size", "", ""),  # a colon is missing
        (3, 16, "max_batch_size", '"x"', ""),
        (4, 25, "platform", "", ""),
        (5, 21, "sequence_batching", "", ""),
        (6, 1, "zzz", "'zzz'", ""),
        (7, 30, 'parameters["a"].value', '"b"', ""),
        (8, 40, "instance_group[0].count", "2.5", ""),
    ]
    assert reading.config == text_format.Parse(
        """name: "m" platform: "p" dynamic_batching {} parameters { key: "a" value {} }
        input { name: "X" data_type: TYPE_FP32 dims: 3 } input { name: "Y" data_type: TYPE_INT8 }
        instance_group { kind: KIND_CPU gpus: -1 }""",
        ModelConfig(),
    )
    assert reading.dropped == {
        *("input[1].dims", "input[1].foo", "max_batch_size", "sequence_batching", "zzz"),
        *('parameters["a"].value', "instance_group[0].count"),
    }
    # Places are those of the text as it was written.
    assert reading.place("name") == (1, 6)
    assert reading.place("input[0].dims") == (2, 47)
    assert reading.place("input[1].data_type") == (2, 98)
    assert reading.place("instance_group[0].gpus[0]") == (8, 50)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('input [ { name: "X"', (1, 17)),
        ('name: "m"\n}', (2, 1)),
        ('input { name: "a" } }\nname: "b"', (1, 21)),
        ('input { name: "a" ]', (1, 19)),
    ],
)
def test_brackets_that_do_not_match_are_the_end(text: str, where: tuple[int, int]) -> None:
    reading = read_text(text)
    assert [(each.line, each.column) for each in reading.mistakes] == [where]
    assert reading.config is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_batch_size: a", "a whole number from -2^31 to 2^31 - 1"),
        ("input { optional: 3 }", "true or false"),
        ("name: m", "a string in quotes"),
        ("input: 5", "fields in braces"),
        ("instance_group { kind: KIND_Q }", "one of KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL"),
        ("version_policy { latest { num_versions: -1 } }", "a whole number from 0 to 2^32 - 1"),
    ],
)
def test_says_what_is_expected(text: str, expected: str) -> None:
    (mistake,) = read_text(text).mistakes
    assert mistake.problem.expected == expected


def test_a_name_that_is_there_already_is_no_suggestion_to_follow() -> None:
    reading = read_text('name: "m" nam: "n"')
    assert len(reading.mistakes) == 1
    assert reading.config == ModelConfig(name="m")


@st.composite
def broken(draw: st.DrawFn) -> str:
    """A config with a few characters changed."""
    _, layout = draw(layouts())
    text = layout.text
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(text)))
        put = draw(st.sampled_from(["", "x", "{", "}", "]", '"', ":", ",", "foo: 1 ", "nam: 2 ", "-", "\\"]))
        text = text[:place] + put + text[place + draw(st.integers(0, 2)) :]
    return text


def parses(text: str) -> bool:
    try:
        text_format.Parse(text, ModelConfig())
    except (text_format.ParseError, ValueError):
        return False
    return True


# Protobuf keeps a backslash that escapes nothing; Python says that it will not be so for ever.
@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
@given(broken())
def test_finds_something_exactly_when_protobuf_does(text: str) -> None:
    reading = read_text(text)
    assert bool(reading.mistakes) is not parses(text)
    lines = text.split("\n")
    for mistake in reading.mistakes:
        assert 1 <= mistake.line <= len(lines)
        assert 1 <= mistake.column <= len(lines[mistake.line - 1]) + 1


@given(layouts())
def test_configs_without_mistakes_are_read_as_they_are(made: tuple[ModelConfig, Layout]) -> None:
    config, layout = made
    reading = read_text(layout.text)
    assert (reading.config, reading.mistakes) == (config, [])
