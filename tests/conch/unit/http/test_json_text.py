"""JSON texts: the same as others read, Triton's leniencies and texts, and no step that takes long."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.frontends.http.jsontext import json_values
from conch.frontends.http.jsontext.json_loader import QUICK_BYTES, SlowTextError, load
from conch.frontends.http.jsontext.json_scanner import JsonDepthError, JsonMembersError, JsonSyntaxError, scan
from conch.frontends.http.jsontext.json_values import BulkArray, flattened

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=60,
)


def opened(value: Any) -> Any:
    """A parsed value with lists for long arrays, all of them flat: that is lost of long ones."""
    if isinstance(value, BulkArray | list):
        return [opened(each) for each in flattened(value)[0]]
    if isinstance(value, dict):
        return {key: opened(each) for key, each in value.items()}
    return value


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_it_reads_what_others_write(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert opened(scan(text)) == opened(value)
    assert opened(load(text)) == opened(value)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**64 - 1)))
def test_long_arrays_in_small_windows(numbers: list[float | int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "WINDOW", 64)
        text = json.dumps({"a": [numbers, [numbers, 1]], "b": 1}).encode()
        value = scan(text)
    assert value["b"] == 1
    assert flattened(value["a"])[0] == [*numbers, *numbers, 1]


@given(
    st.binary(max_size=200) | st.text('[]{}",:0123456789.eE-+NaInftrulsé\\u \n', max_size=60).map(str.encode)
)
def test_anything_is_read_or_refused(text: bytes) -> None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            scan(text)
        except JsonSyntaxError as error:
            assert error.message.startswith("failed to parse the request JSON buffer: ")
    else:
        if text.count(b":") < 2:  # else the first of the same name counts
            assert opened(scan(text)) == opened(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"inputs":[', "Invalid value. at 11"),
        (b"{a}", "Missing a name for object member. at 1"),
        (b'{"a":tru}', "Invalid value. at 8"),
        (b'{"a":1 "b":2}', "Missing a comma or '}' after an object member. at 7"),
        (b'{"a" 1}', "Missing a colon after a name of object member. at 5"),
        (b"[1 2]", "Missing a comma or ']' after an array element. at 3"),
        (b"{} x", "The document root must not be followed by other values. at 3"),
        (b'{"a":"\\q"}', "Invalid escape character in string. at 6"),
        (b'{"a":"\\ud800"}', "The surrogate pair in string is invalid. at 6"),
        (b'{"a":"abc', "Missing a closing quotation mark in string. at 9"),
        (b'{"a":1.}', "Miss fraction part in number. at 7"),
        (b'{"a":1e}', "Miss exponent in number. at 7"),
        (b'{"a":1e999}', "Number too big to be stored in double. at 5"),
        (b'{"a":"\\uzzzz"}', "Incorrect hex digit after \\u escape in string. at 6"),
        (b'{"a":"\x01"}', "Invalid escape character in string. at 6"),
        (b'{"a":01}', "Missing a comma or '}' after an object member. at 6"),
        (b'{"a":-}', "Invalid value. at 6"),
        (b"[1,]", "Invalid value. at 3"),
        (b'{"a":1,}', "Missing a name for object member. at 7"),
        (b'{"a":Nan}', "Invalid value. at 7"),
        (b'{"a":1}}', "The document root must not be followed by other values. at 7"),
        (b'{"a":\x00}', "Invalid value. at 5"),
        (b"  ", "The document is empty. at 2"),
        (b"[" + b"1," * 70000 + b"]", "Invalid value. at 140001"),
        (b"[" + b"[1,2]," * 40000 + b"x]", "Invalid value. at 240001"),
        (b'["' + b'a","' * 70000 + b"]", "Missing a closing quotation mark in string. at 280003"),
    ],
)
def test_texts_are_tritons(text: bytes, reason: str) -> None:
    with pytest.raises(JsonSyntaxError) as caught:
        load(text)
    assert caught.value.message == f"failed to parse the request JSON buffer: {reason}"


def test_leniencies() -> None:
    assert load(b'\xef\xbb\xbf{"a":1}\x00 rest') == {"a": 1}
    assert load(b'{"a":1,"a":2,"b":{"c":1,"c":2}}') == {"a": 1, "b": {"c": 1}}
    values = load(b"[NaN,Inf,Infinity,-Inf,-Infinity,-NaN,18446744073709551616,1.0,-0]")
    assert [str(value) for value in values] == [
        "nan",
        "inf",
        "inf",
        "-inf",
        "-inf",
        "nan",
        "1.8446744073709552e+19",
        "1.0",
        "0",
    ]
    assert load(b'"\xff\xfe"').encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert load(b'["\\ud83d\\ude00\\u00e9\\n"]') == ["\U0001f600\xe9\n"]
    many = load(b"[" + b"NaN,1.5," * 20000 + b"0]")
    assert math.isnan(many.pieces[0][0]) and len(many) == 40001


def test_nesting_costs_no_stack() -> None:
    depth = 1000
    value = load(b'{"a":' + b"[" * depth + b"]" * depth + b"}")
    assert flattened(value["a"])[1] == depth
    assert flattened(load(b"[" * depth + b"1,2" + b"]" * depth))[0] == [1, 2]
    assert flattened(load(b"[" * depth + b"1,2" + b" " * QUICK_BYTES + b"]" * depth))[0] == [1, 2]


@pytest.mark.parametrize(
    ("head", "repeated", "error"),
    [
        (b"", b"[", JsonDepthError),
        (b"", b'{"a":', JsonDepthError),
        (b"", b'{"a":[', JsonDepthError),
        (b"[", b"{},", JsonMembersError),
        pytest.param(b"{", b'"a":1,', JsonMembersError, marks=pytest.mark.slow),
        pytest.param(b"[", b'{"a":1},', JsonMembersError, marks=pytest.mark.slow),
        (b"[", b"9", JsonSyntaxError),
    ],
)
def test_what_no_request_has_is_refused_where_it_begins(
    head: bytes, repeated: bytes, error: type[Exception]
) -> None:
    """However much of it there is behind that: none of it is looked at."""

    class Counted(bytearray):
        looked = 0

        def __getitem__(self, place: Any) -> Any:
            Counted.looked += 1
            return super().__getitem__(place)

    for pairs in (False, True):
        Counted.looked = 0
        with pytest.raises(error):
            load(Counted(head + repeated * 1_000_000), pairs)
        assert Counted.looked < 1_000_000


def test_members_of_a_name_in_order_and_all_of_them() -> None:
    """In a short text and in a long one, which different parsers refuse."""
    for more in (b"", b" " * QUICK_BYTES):
        value = load(b'{"b":1,"a":{"x":[1],"x":2},"b":3' + more + b"}", pairs=True)
        assert [(name, given) for name, given in value if name == "b"] == [("b", 1), ("b", 3)]
        assert list(dict(value)["a"]) == [("x", [1]), ("x", 2)]


def test_deep_objects_keep_their_members_in_order() -> None:
    depth = 900
    value = load(b'{"a":' * depth + b"1" + b"}" * depth, pairs=True)
    for _ in range(depth):
        (name, value), *others = value
        assert (name, others) == ("a", [])
    assert value == 1


def test_quick_threads_leave_what_takes_long() -> None:
    for text in (
        b"[" * 2000,
        b'{"a":1,' + b'"a":1,' * 1000 + b'"a":1}',
        b"[" + b"{}," * 2000 + b"{}]",
        b"[" + b"NaN," * 1000 + b"1]",
        b" " * QUICK_BYTES + b"1",
    ):
        with pytest.raises(SlowTextError):
            load(text, quick=True)
    assert load(b'{"a":1,"a":NaN}', quick=True) == {"a": 1}
    assert load(b"[" + b"1," * 10000 + b"1]", quick=True) == [1] * 10001


@pytest.mark.parametrize(
    "element", [b"1.5", b"12", b"[1,2]", b'"abc"', b'"a\\n"', b"true", b"NaN", b"[[3],[4.5]]"]
)
def test_no_step_of_a_long_text_is_long(element: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads run between steps, so what one step parses bounds how long they wait."""
    steps: list[int] = []

    def loads(text: bytes) -> Any:
        steps.append(len(text))
        return orjson.loads(text)

    class Spy:
        JSONDecodeError = orjson.JSONDecodeError

    Spy.loads = staticmethod(loads)  # type: ignore[attr-defined]
    monkeypatch.setattr(json_values, "orjson", Spy)
    count = 1_000_000 // len(element)
    value = load(b'{"data":[' + b",".join([element] * count) + b'],"x":1}')
    assert value["x"] == 1
    assert max(steps) <= json_values.WINDOW + 2
    assert sum(steps) >= 1_000_000  # none of it was parsed one by one
    pieces = value["data"].pieces
    assert max(map(len, pieces)) <= json_values.WINDOW
    if element in (b"1.5", b"12", b"NaN"):
        assert all(isinstance(piece, np.ndarray) for piece in pieces)


@given(st.recursive(st.floats() | st.integers(-5, 5) | st.text("aN Inf,", max_size=5), st.lists))
def test_numbers_without_a_notation(value: Any) -> None:
    """A short text with them comes to the same by either way."""
    text = json.dumps(
        {"x": value, "NaN": "Infinity,NaN", "y": [value, 1, value]}, ensure_ascii=False
    ).encode()
    assert repr(opened(load(text))) == repr(opened(scan(text)))


@pytest.mark.parametrize(
    "text",
    [
        b"[-Inf]",
        b"[1NaN]",
        b"[NaNx]",
        b"[NaN NaN]",
        b"NaN:1",
        b'{"a":NaN,"a":1}',
        b'["\\"NaN"]',
        b"[null,NaN]",
    ],
)
def test_odd_places_of_numbers_without_a_notation(text: bytes) -> None:
    def outcome(parse: Callable[[bytes], Any]) -> str:
        try:
            return repr(opened(parse(text)))
        except JsonSyntaxError as error:
            return error.message

    assert outcome(load) == outcome(scan)
