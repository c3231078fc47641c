"""Large bodies mean what orjson says they do, within the limits."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch_llm.frontend.large_bodies import MOST_VALUES, read_body
from conch_llm.frontend.openai_errors import RequestError

scalars: st.SearchStrategy[Any] = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.text(st.characters(exclude_categories=["Cs"])),
)
runs = st.builds(
    lambda value, count: [value] * count, st.sampled_from([1, 2.5, "a", True]), st.integers(0, 300)
)
values = st.recursive(
    scalars | runs,
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(max_size=3), inner) | st.tuples(runs, inner, runs)
    ),
    max_leaves=12,
)


PAD = b'{"pad": "' + b"x" * 140_000 + b'"'
"""Beginning of a body that is read as long ones are."""


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


@given(st.fixed_dictionaries({}, optional={"prompt": values, "input": values, "stop": values, "": values}))
def test_a_body_is_read_as_orjson_reads_it(body: dict[str, Any]) -> None:
    text = PAD + b"," + json.dumps({"last": 0, **body}).encode()[1:]
    whole, found = read_body(memoryview(text))
    assert whole == text
    assert plain(found) == orjson.loads(text)


def test_long_lists_of_token_ids_are_arrays() -> None:
    _, found = read_body(
        PAD + b"," + orjson.dumps({"prompt": [[1] * 5000, [2] * 5000], "stop": [1] * 5000})[1:]
    )
    assert [type(each) for each in found["prompt"]] == [np.ndarray] * 2
    assert type(found["stop"]) is list


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b',"a": 1',
        b',"a": NaN}',
        b',"a": -Infinity}',
        b',"a": [' + b"1," * 200 + b"NaN]}",
        b',"a": 1}\0',
        b',"a": "\xff"}',
        b',"a": "\\ud800"}',
        b',"a": ' + b"[" * 2000,
    ],
)
def test_what_orjson_refuses_is_refused(rest: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(PAD + rest)
    with pytest.raises(RequestError) as caught:
        read_body(PAD + rest)
    assert caught.value.error_code == "json_invalid"


def test_the_last_of_two_members_counts() -> None:
    assert read_body(PAD + b', "a": 1, "a": 2}')[1]["a"] == 2


@pytest.mark.parametrize("value", ["1", "[]", '"a"', "true"])
def test_the_number_of_values_is_limited(value: str) -> None:
    body = '{"prompt": [' + f"{value}," * MOST_VALUES + value + "]}"
    with pytest.raises(RequestError, match=f"more than {MOST_VALUES} values"):
        read_body(body.encode())
