"""Decorators between requests and functions of arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conch
from conch.api.context import ModelContext, running_for
from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Array

CONTEXT = ModelContext("m", 1, "m_0", ("X",), ("Y",), max_batch_size=8, preferred_batch_sizes=(4,))


def request(rows: int | None = None, **inputs: Any) -> conch.Request:
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    return conch.Request(arrays, rows=rows)


def rows_of(*sizes: int) -> list[conch.Request]:
    """Requests with so many rows, each row different."""
    starts = np.cumsum([0, *sizes])
    return [
        request(size, X=np.arange(start, start + size, dtype=np.float32).reshape(size, 1))
        for start, size in zip(starts, sizes, strict=False)
    ]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_batch_joins_and_splits_what_it_gets_in_order(sizes: list[int]) -> None:
    seen: list[int] = []

    @conch.batch
    def double(X: Array) -> dict[str, Array]:
        seen.append(len(X))
        return {"Y": 2 * X}

    requests = rows_of(*sizes)
    answers = double(requests)
    assert seen == [sum(sizes)]
    for asked, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer["Y"], 2 * asked["X"])


@pytest.mark.parametrize("form", [list, tuple, lambda pair: {"A": pair[0], "B": pair[1]}])
def test_batch_splits_outputs_in_every_form(form: Any) -> None:
    answers = conch.batch(lambda X: form([X, -X]))(rows_of(2, 1))
    assert [len(answer) for answer in answers] == [2, 2]
    second = answers[1]["B"] if isinstance(answers[1], dict) else answers[1][1]
    np.testing.assert_array_equal(second, [[-2.0]])


def test_batch_takes_one_array_alone() -> None:
    answers = conch.batch(lambda X: X + 1)(rows_of(1, 2))
    np.testing.assert_array_equal(answers[1], [[2.0], [3.0]])


def test_batch_says_how_many_rows_an_output_should_have() -> None:
    with pytest.raises(
        ValueError, match=r"output has shape \[1, 1\], but the inputs of the batch have 3 rows"
    ):
        conch.batch(lambda X: X[:1])(rows_of(1, 2))


def test_batch_does_not_join_different_inputs() -> None:
    with pytest.raises(ValueError, match="group_by_keys or fill_optionals"):
        conch.batch(lambda **inputs: inputs)([request(1, X=[1.0]), request(1, X=[1.0], Z=[2.0])])


def test_batch_of_a_generator_splits_each_thing_it_yields() -> None:
    @conch.batch
    def count(X: Array) -> Iterator[dict[str, Array]]:
        yield {"Y": X}
        yield {"Y": X + 10}

    steps = list(count(rows_of(1, 1)))
    assert [[float(answer["Y"][0, 0]) for answer in step] for step in steps] == [[0, 1], [10, 11]]


def test_decorators_leave_methods_methods() -> None:
    class Model:
        factor = 3

        @conch.fill_optionals(Z=1.0)
        @conch.batch
        @conch.pad_batch(sizes=[4])
        @conch.first_value("Z")
        def run(self, X: Array, Z: float) -> Array:
            assert len(X) == 4
            return X * self.factor + Z

    np.testing.assert_array_equal(Model().run(rows_of(2))[0], [[1.0], [4.0]])


def test_sample_calls_once_for_each_request() -> None:
    answers = conch.sample(lambda X: {"Y": X.sum()})([request(X=[1, 2]), request(X=[3, 4])])
    assert [int(answer["Y"]) for answer in answers] == [3, 7]


def test_sample_of_generators_gives_a_turn_of_each_at_a_time() -> None:
    @conch.sample
    def count(N: Array) -> Iterator[int]:
        yield from range(int(N))

    assert list(count([request(N=3), request(N=1)])) == [[0, 0], [1, None], [2, None]]


@given(st.integers(1, 12))
def test_pad_batch_gives_the_next_size_and_cuts_back(rows: int) -> None:
    seen: list[Array] = []

    @conch.batch
    @conch.pad_batch
    def same(X: Array) -> Array:
        seen.append(X)
        return X

    (asked,) = rows_of(rows)
    with running_for(CONTEXT):
        (answer,) = same([asked])
    np.testing.assert_array_equal(answer, asked["X"])
    assert len(seen[0]) == (4 if rows <= 4 else 8 if rows <= 8 else rows)
    np.testing.assert_array_equal(seen[0][rows:], np.repeat(asked["X"][-1:], len(seen[0]) - rows, axis=0))


def test_pad_batch_without_sizes_needs_a_model() -> None:
    with pytest.raises(RuntimeError, match="there is no model here"):
        conch.batch(conch.pad_batch(lambda X: X))(rows_of(3))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_group_by_values_calls_once_for_each_value_and_keeps_the_order(values: list[int]) -> None:
    calls: list[set[int]] = []

    @conch.group_by_values("V")
    @conch.batch
    def run(X: Array, V: Array) -> dict[str, Array]:
        calls.append(set(V.ravel().tolist()))
        return {"Y": X * 10 + V}

    requests = [
        request(2, X=np.full((2, 1), place), V=np.full((2, 1), value)) for place, value in enumerate(values)
    ]
    answers = run(requests)
    assert sorted(map(sorted, calls)) == [[value] for value in sorted(set(values))]
    for place, value in enumerate(values):
        np.testing.assert_array_equal(answers[place]["Y"], np.full((2, 1), place * 10 + value))


def test_group_by_values_groups_by_strings_and_by_what_is_missing() -> None:
    sizes: list[int] = []

    @conch.group_by_values("S")
    def run(requests: list[conch.Request]) -> list[int]:
        sizes.append(len(requests))
        return [len(requests)] * len(requests)

    text = np.array([b"a"], object)
    assert run([request(1, S=text), request(1), request(3, S=np.repeat(text, 3)), request(1)]) == [2, 2, 2, 2]
    assert sizes == [2, 2]


def test_groups_of_generators_follow_each_other() -> None:
    @conch.group_by_keys
    @conch.sample
    def run(**inputs: Array) -> Iterator[str]:
        yield from sorted(inputs)

    assert list(run([request(A=1), request(A=1, B=1)])) == [["A", None], [None, "A"], [None, "B"]]


def test_groups_name_a_function_that_returns_too_little() -> None:
    with pytest.raises(ValueError, match="must return a list of 2 answers, not 1 of them"):
        conch.group_by_keys(lambda requests: [1])(rows_of(1, 1))


def test_fill_optionals_fills_only_what_is_missing() -> None:
    @conch.fill_optionals(T=np.array([0.5], np.float32), S="x")
    def run(requests: list[conch.Request]) -> list[conch.Request]:
        return requests

    first, second = run(
        [request(2, X=np.zeros((2, 1))), request(1, T=np.ones((1, 1)), S=np.array([[b"y"]], object))]
    )
    np.testing.assert_array_equal(first["T"], [[0.5], [0.5]])
    assert first["S"].tolist() == [b"x", b"x"]
    assert second["T"].tolist() == [[1.0]]
    assert second["S"].tolist() == [[b"y"]]
    (plain,) = run([request(X=np.zeros(3))])
    assert plain["T"].shape == (1,)


def test_first_value_gives_one_value_of_equal_rows() -> None:
    run = conch.first_value("T", "V", "W")(lambda **inputs: inputs)
    given = run(T=np.full((3, 1), 2, np.int32), V=np.tile([1, 2], (3, 1)), X=np.zeros((3, 1)))
    assert given["T"] == 2
    assert given["T"].dtype == np.int32
    assert given["V"].tolist() == [1, 2]
    assert given["X"].shape == (3, 1)
    assert "W" not in given


def test_first_value_tells_the_client_of_rows_that_differ() -> None:
    with pytest.raises(InvalidArgumentError, match="input 'T' must have the same value in all rows"):
        conch.first_value("T")(lambda T: T)(T=np.array([[1], [2]]))
    assert conch.first_value("T", strict=False)(lambda T: T)(T=np.array([[1], [2]])) == 1


@pytest.mark.parametrize("decorator", [conch.first_value, conch.group_by_values, conch.fill_optionals])
def test_decorators_with_names_want_names(decorator: Any) -> None:
    with pytest.raises(TypeError, match="at least one"):
        decorator()
