from __future__ import annotations

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tests.support.configs import Layout, configs, layouts

from conch.protocol.model_config_pb2 import ModelConfig
from conch_check.positions import Positions, parent
from conch_control.config.schema import leaves


@given(layouts())
def test_every_path_is_found_where_it_is(made: tuple[ModelConfig, Layout]) -> None:
    config, layout = made
    assert text_format.Parse(layout.text, ModelConfig()) == config
    positions = Positions(layout.text)
    found = {path: span.value for path in layout.places if (span := positions.find(path)) is not None}
    assert found == layout.places
    assert {path for path, _, _ in leaves(config)} <= set(found)


@given(configs())
def test_what_protobuf_prints_is_found(config: ModelConfig) -> None:
    text = text_format.MessageToString(config)
    positions = Positions(text)
    for path, field, value in leaves(config):
        span = positions.find(path)
        assert span is not None, path
        first = value[0] if isinstance(value, list) else value
        shown = text[span.value : span.end]
        if field.enum_type is not None:
            assert shown == field.enum_type.values_by_number[first].name
        elif isinstance(first, int) and field.message_type is None:
            assert shown.lower() == str(first).lower()


@given(st.text("{}[]<>:,;'\"#\\\n a1-.") | st.text())
def test_any_text_is_taken(text: str) -> None:
    positions = Positions(text)
    for offset in range(len(text) + 1):
        line, column = positions.place(offset)
        assert positions.offset(line, column) == offset
        positions.at(offset)


def test_lines_and_columns() -> None:
    positions = Positions('name: "m"\ninput [\n  { dims: [ 1,\n 2 ] }]\n')
    spans = {path: positions.find(path) for path in ("name", "input[0]", "input[0].dims[1]")}
    assert {path: positions.place(span.value) for path, span in spans.items() if span is not None} == {
        "name": (1, 7),
        "input[0]": (3, 3),
        "input[0].dims[1]": (4, 2),
    }


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("input[0].data_type", "input[0]"),
        ("input[3].data_type", "input"),
        ('parameters["a.b"].string_value', 'parameters["a.b"]'),
        ('parameters["x[\\"]"].string_value', "parameters"),
        ("output[0].dims", None),
    ],
)
def test_what_is_missing_is_where_it_would_be(path: str, found: str | None) -> None:
    positions = Positions('input { name: "x" } parameters { key: "a.b" value {} }')
    span = positions.nearest(path)
    assert (None if span is None else span.path) == found


@pytest.mark.parametrize(
    ("path", "above"),
    [
        ("a", ""),
        ("a[0]", "a"),
        ("a[0].b", "a[0]"),
        ('a["x"]', "a"),
        ('a["x[\\"y"]', "a"),
        ('a["."]["]"]', 'a["."]'),
        ("a.b.c", "a.b"),
    ],
)
def test_parent(path: str, above: str) -> None:
    assert parent(path) == above
