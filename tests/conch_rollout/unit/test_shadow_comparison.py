"""The comparison of outputs: properties over arrays, and each way to differ."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from conch.core.errors import InternalError
from conch.core.tensor import Tensor, brain_floats
from conch_rollout.shadows.comparison import (
    CompareRules,
    Difference,
    Figures,
    VersionAnswer,
    compare_answers,
    compare_outputs,
    compare_tensors,
)
from conch_rollout.shadows.shadow_report import EDGES, WORST_PAIRS, ShadowReport

RULES = CompareRules(atol=1e-2, rtol=1e-2)
SHAPES = arrays.array_shapes(max_dims=3, max_side=6)
FLOATS = st.sampled_from([np.float16, np.float32, np.float64])
NUMBERS = st.floats(width=16)
ANY = st.one_of(
    FLOATS.flatmap(lambda dtype: arrays.arrays(dtype, SHAPES, elements=NUMBERS)),
    arrays.arrays(st.sampled_from([np.uint8, np.int16, np.int64, np.uint64, np.bool_]), SHAPES),
)


def compared(first: NDArray[Any], second: NDArray[Any], rules: CompareRules = RULES) -> Figures:
    return compare_tensors(rules, Tensor.from_array("T", first), Tensor.from_array("T", second))


def answer(*responses: list[Tensor], error: str = "") -> VersionAnswer:
    made = VersionAnswer()
    made.responses += responses
    made.error = InternalError(error) if error else None
    return made


@given(ANY)
def test_an_output_agrees_with_itself(array: NDArray[Any]) -> None:
    """NaN and infinity included; and with a copy that is held in wire form."""
    for other in (array.copy(), np.asfortranarray(array)):
        figures = compared(array, other)
        assert (figures.difference, figures.within, figures.max_abs) == (None, 1.0, 0.0)
    top = CompareRules(top={"T": 2})
    assert compared(array, array.copy(), top).top == 1.0


@given(arrays.arrays(np.float64, SHAPES, elements=st.floats(-1e6, 1e6)), st.data())
def test_floats_agree_if_each_is_within_the_tolerances(array: NDArray[Any], data: st.DataObject) -> None:
    noise = data.draw(arrays.arrays(np.float64, array.shape, elements=st.floats(-0.1, 0.1)))
    other = array + noise
    close = np.abs(array - other) <= RULES.atol + RULES.rtol * np.abs(array)
    figures = compared(array, other)
    assert figures.within == np.mean(close)
    assert figures.max_abs == np.max(np.abs(array - other))
    assert (figures.difference is None) == bool(close.all())
    norms = float(np.linalg.norm(array) * np.linalg.norm(other))
    if norms > 1e-3:
        assert figures.cosine is not None
        assert math.isclose(figures.cosine, float(np.vdot(array, other)) / norms, abs_tol=1e-6)


@given(ANY, st.data())
def test_one_other_element_is_found(array: NDArray[Any], data: st.DataObject) -> None:
    other = array.copy()
    place = data.draw(st.integers(0, array.size - 1))
    flat = other.reshape(-1)
    if array.dtype.kind == "f":
        flat[place] = np.nan if np.isfinite(flat[place]) else 0.0
    else:
        flat[place] = not flat[place]
    if np.array_equal(other, array):
        return
    figures = compared(array, other)
    assert (figures.difference, figures.within) == (Difference.VALUES, (array.size - 1) / array.size)
    assert figures.max_abs is not None
    assert figures.max_abs > 0
    json.dumps(figures.as_json(), allow_nan=False)


@given(arrays.arrays(np.float32, (3, 5), elements=st.floats(-8, 8, width=16)), st.integers(1, 6))
def test_the_largest_elements_may_have_other_values(array: NDArray[Any], most: int) -> None:
    rules = CompareRules(top={"T": most})
    assert compared(array, array * 2 + 100, rules).difference is None, "the order is the same"
    figures = compared(array, -array, rules)
    rows = [
        set(np.argsort(-row, kind="stable")[:most]) == set(np.argsort(row, kind="stable")[:most])
        for row in array
        if len(set(row.tolist())) == 5  # no ties
    ]
    if len(rows) == 3:
        assert figures.top == np.mean(rows)
        assert figures.difference is (None if all(rows) else Difference.TOP)


def test_equal_largest_elements_take_each_others_place() -> None:
    rules = CompareRules(top={"T": 1})
    tied, first, second = (np.array([row], np.float32) for row in ([1, 1, 0], [2, 1, 0], [1, 2, 0]))
    assert [compared(tied, each, rules).top for each in (first, second)] == [1.0, 1.0]
    assert compared(first, second, rules).top == 0.0


def test_large_outputs_are_compared_in_parts() -> None:
    array = np.zeros(1_000_000, np.float32)
    other = array.copy()
    other[[0, 500_000, 999_999]] = (0.5, 2.0, 1.0)
    figures = compared(array, other)
    assert (figures.within, figures.max_abs) == (1 - 3e-6, 2.0)


@pytest.mark.parametrize(
    ("first", "second", "difference", "note"),
    [
        (np.zeros(2, np.float32), np.zeros(2), Difference.DATATYPE, "FP32 against FP64"),
        (np.zeros(2, np.float32), np.zeros((1, 2), np.float32), Difference.SHAPE, "[2] against [1, 2]"),
        (np.array([b"a", b"b"], object), np.array([b"a", b"c"], object), Difference.VALUES, ""),
        (np.array([b"a", b"b"], object), np.array([b"a", b"b"], object), None, ""),
        (np.array([2**63], np.uint64), np.array([2**63 + 1], np.uint64), Difference.VALUES, ""),
        (np.array([np.inf]), np.array([1e300]), Difference.VALUES, ""),
    ],
)
def test_ways_to_differ(
    first: NDArray[Any], second: NDArray[Any], difference: Difference | None, note: str
) -> None:
    figures = compared(first, second)
    assert (figures.difference, figures.note) == (difference, note)


def test_bfloat16() -> None:
    rows = [Tensor("T", "BF16", (2,), brain_floats(np.array(row, np.float32))) for row in ([1, 2], [1, 2.5])]
    figures = compare_tensors(RULES, *rows)
    assert (figures.difference, figures.max_abs, figures.within) == (Difference.VALUES, 0.5, 0.5)


@pytest.mark.parametrize("datatype", ["FP32", "BF16", "BYTES"])
def test_bytes_that_do_not_fill_the_shape(datatype: str) -> None:
    first = Tensor("T", datatype, (2,), b"\1\0\0\0x\0\0\0")
    second = Tensor("T", datatype, (2,), b"\1\0\0\0xx")
    assert compare_tensors(RULES, first, second).difference is Difference.SHAPE


def test_outputs_that_only_one_side_has() -> None:
    first, second, third = (Tensor.from_array(name, np.zeros(1)) for name in "abc")
    found = compare_outputs(RULES, [first, second], [second, third], frozenset())
    kinds = {each.output: each.difference for each in found}
    assert kinds == {"a": Difference.MISSING, "b": None, "c": Difference.EXTRA}
    assert [each.output for each in compare_outputs(RULES, [first, second], [third], frozenset("ac"))] == [
        "b"
    ]


def test_whole_answers() -> None:
    zero, one = ([Tensor.from_array("T", np.array([value]))] for value in (0.0, 1.0))
    assert compare_answers(RULES, answer(error="x"), answer(error="y")) == []
    assert [each.difference for each in compare_answers(RULES, answer(zero), answer(error="y"))] == [
        Difference.ERROR
    ]
    found = compare_answers(RULES, answer(zero, one), answer(zero))
    assert [each.difference for each in found] == [Difference.RESPONSES, None]
    cut = answer(zero)
    cut.cut = True
    assert [each.difference for each in compare_answers(RULES, answer(zero, one), cut)] == [None]
    unread = answer(one)
    unread.unread.add("T")
    assert compare_answers(RULES, answer(zero), unread) == []


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=80))
def test_a_report_keeps_the_worst_pairs_and_counts_all(values: list[float]) -> None:
    report = ShadowReport()
    for number, value in enumerate(values):
        difference = Difference.VALUES if value else None
        report.add(str(number), 0.0, [Figures("T", difference, max_abs=value)], {})
    shown = report.as_json()
    assert (shown["compared"], shown["mismatches"]) == (len(values), sum(map(bool, values)))
    order = sorted((number for number, value in enumerate(values) if value), key=lambda n: (-values[n], n))
    assert [pair["request_id"] for pair in shown["worst"]] == list(map(str, order[:WORST_PAIRS]))
    counts = report.spreads()["T"].counts
    for place, edge in enumerate(EDGES):
        assert sum(counts[: place + 1]) == sum(value <= edge for value in values)
    assert sum(count for _, count in shown["max_abs"]["T"]) == len(values)


def test_errors_are_the_worst_pairs() -> None:
    report = ShadowReport()
    report.add("far", 0.0, [Figures("T", Difference.VALUES, max_abs=1e30)], {})
    report.add("error", 0.0, [Figures("", Difference.ERROR, 0.0)], {})
    assert [pair.request_id for pair in report.worst()] == ["error", "far"]
