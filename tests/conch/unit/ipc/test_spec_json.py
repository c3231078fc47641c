"""Specs travel as JSON and come back as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.core import make_spec
from tests.support.profiles import scaled

from conch.core.execution.placement import Placement
from conch.core.spec import ModelSpec
from conch.ipc.channel import WireError
from conch.ipc.spec_json import (
    placement_from_json,
    placement_to_json,
    spec_from_json,
    spec_to_json,
)

TEXT = st.text(st.characters(), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT, lambda inner: st.lists(inner, max_size=2)
)

st.register_type_strategy(Path, TEXT.map(lambda text: Path("/models", text.replace("\0", "_"))))
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(str, TEXT)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], max_examples=scaled(50))
@given(
    spec=st.builds(
        ModelSpec,
        parameters=st.dictionaries(TEXT, TEXT, max_size=2),
        backend_options=st.dictionaries(TEXT, TEXT, max_size=2),
        config=st.dictionaries(TEXT, JSON, max_size=3),
    )
)
def test_a_spec_comes_back(spec: ModelSpec) -> None:
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


@given(placement=st.builds(Placement))
def test_a_placement_comes_back(placement: Placement) -> None:
    assert placement_from_json(json.loads(json.dumps(placement_to_json(placement)))) == placement


@pytest.mark.parametrize(
    "change",
    [
        {"name": 5},
        {"inputs": "x"},
        {"inputs": [{"name": "IN"}]},
        {"nothing": 1},
        {"version": "1"},
        {"config_message": "%"},
        {"directory": None},
        {"sequence": {"strategy": "OTHER"}},
        {"parameters": []},
    ],
)
def test_what_is_no_spec_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        spec_from_json({**spec_to_json(make_spec()), **change})


@given(value=JSON)
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(WireError):
        spec_from_json(value)
