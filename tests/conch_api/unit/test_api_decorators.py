"""Decorators between requests and functions of arrays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conch
from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Array
from conch_api.model_context import ModelContext, use_context

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


@pytest.mark.parametrize("sizes", [[0], [0, 2], [1, 0], [0, 0]])
def test_requests_without_rows_get_answers_without_rows(sizes: list[int]) -> None:
    answers = conch.batch(conch.pad_batch(sizes=[4])(lambda X: 2 * X))(rows_of(*sizes))
    assert [answer.shape for answer in answers] == [(size, 1) for size in sizes]


def test_no_rows_have_no_first_value() -> None:
    with pytest.raises(InvalidArgumentError, match="input 'X' has no rows"):
        conch.batch(conch.first_value("X")(lambda X: X))(rows_of(0))


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
    with use_context(CONTEXT):
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


def picky(**inputs: Array) -> Array:
    """Does not take values below 0."""
    if (inputs["V"] < 0).any():
        raise InvalidArgumentError("V must not be negative")
    return inputs["X"]


def pickily(**inputs: Array) -> Iterator[Array]:
    yield inputs["X"]
    yield picky(**inputs)


BAD_AND_GOOD = [request(1, X=[[7]], V=[[value]]) for value in (-1, 1)]


@pytest.mark.parametrize("grouped", [conch.group_by_values("V"), conch.group_by_keys, conch.sample])
def test_what_one_group_raises_is_its_own(grouped: Any) -> None:
    inner = conch.batch if grouped is not conch.sample else lambda function: function
    requests = (
        BAD_AND_GOOD if grouped is not conch.group_by_keys else [*BAD_AND_GOOD[:1], request(1, X=[[7]])]
    )

    def run(**inputs: Array) -> Array:
        return picky(**{"V": np.ones(1), **inputs})

    error, answer = grouped(inner(run))(requests)
    assert isinstance(error, InvalidArgumentError)
    assert answer.tolist() == [[7]]
    with pytest.raises(InvalidArgumentError, match="must not be negative"):
        grouped(inner(run))(requests[:1])  # no other request has to be spared


@pytest.mark.parametrize("grouped", [conch.group_by_values("V"), conch.sample])
def test_what_one_group_raises_while_it_yields_is_its_own(grouped: Any) -> None:
    inner = conch.batch if grouped is not conch.sample else lambda function: function
    steps = list(grouped(inner(pickily))(BAD_AND_GOOD))
    assert [type(step[0]) for step in steps if step[0] is not None] == [np.ndarray, InvalidArgumentError]
    assert [step[1].tolist() for step in steps if step[1] is not None] == [[[7]], [[7]]]


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=4), st.lists(st.text(max_size=3), min_size=4))
def test_strings_in_lists_stay_as_they_are(blobs: list[bytes], texts: list[str]) -> None:
    rows = len(blobs)
    (answer,) = conch.batch(lambda X: {"A": blobs, "B": texts[:rows]})(
        [request(rows, X=np.zeros((rows, 1)))] if len(texts) >= rows else []
    )
    assert answer["A"].tolist() == blobs
    assert answer["B"].tolist() == texts[:rows]
    (filled,) = conch.fill_optionals(A=blobs, B=texts, C=np.array(texts, object))(lambda requests: requests)(
        [request()]
    )
    assert filled["A"].tolist() == blobs
    assert filled["B"].tolist() == filled["C"].tolist() == [text.encode() for text in texts]


def filling(**defaults: Any) -> Any:
    return conch.fill_optionals(**defaults)(conch.batch(lambda X, **inputs: inputs))


@pytest.mark.parametrize(
    ("default", "filled"),
    [(2.0, [2.0]), ([2], [2.0]), (np.float64(2), [2.0]), (np.array([2], np.float32), [2.0])],
)
def test_defaults_are_as_clients_would_give_them(default: Any, filled: list[float]) -> None:
    context = replace(CONTEXT, inputs=("X", "T"), input_datatypes=("FP32", "FP32"), input_dims=((-1,), (1,)))
    X = np.zeros((2, 3), np.float32)
    with use_context(context):
        first, second = conch.fill_optionals(T=default)(lambda requests: requests)(
            [request(2, X=X), request(2, X=X, T=np.ones((2, 1), np.float32))]
        )
        conch.batch(lambda X, T: X * T)([first, second])
    assert first["T"].dtype == np.float32
    assert first["T"].tolist() == [filled, filled]


@pytest.mark.parametrize(
    ("datatype", "dims", "default", "text"),
    [
        ("FP32", (1,), [1.0, 2.0], r"has shape \[2\], but the input's is \[1\]"),
        ("FP32", (2, -1), [1.0, 2.0], r"has shape \[2\], but the input's is \[2,-1\]"),
        ("INT32", (1,), 1.5, "INT32"),
        ("FP32", (1,), np.zeros(1), "has datatype FP64, but the input's is FP32"),
        ("FP32", (1,), "x", "FP32"),
        ("BYTES", (1,), 3, "among its strings"),
    ],
)
def test_a_default_that_no_client_could_give_is_named(
    datatype: str, dims: tuple[int, ...], default: Any, text: str
) -> None:
    context = replace(CONTEXT, inputs=("T",), input_datatypes=(datatype,), input_dims=(dims,))
    with use_context(context), pytest.raises(ValueError, match=f"fill_optionals: .*'T'.*{text}"):
        filling(T=default)(rows_of(1))


def test_a_default_that_is_no_value_is_named() -> None:
    with pytest.raises(
        ValueError, match="fill_optionals: the default of input 'T': it has an element of NoneType"
    ):
        conch.fill_optionals(T=None)


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


def test_coroutines_of_a_batch_run_side_by_side() -> None:
    arrived = 0

    @conch.sample
    async def meet(X: Array) -> Array:
        nonlocal arrived
        arrived += 1
        while arrived < 3:
            await asyncio.sleep(0)
        if X[0] == 1:
            raise InvalidArgumentError("one")
        return X

    answers = meet([request(X=[number]) for number in range(3)])
    assert (answers[0].tolist(), answers[2].tolist()) == ([0], [2])
    assert isinstance(answers[1], InvalidArgumentError)


def test_decorators_take_coroutine_functions() -> None:
    @conch.fill_optionals(K=np.float32(1))
    @conch.group_by_values("K")
    @conch.batch
    @conch.pad_batch(sizes=[4])
    @conch.first_value("K")
    async def add(X: Array, K: float) -> Array:
        assert len(X) == 4
        return X + K

    first, second, third = rows_of(1, 2, 1)
    second = second.with_more({"K": np.full((2, 1), 2, np.float32)})
    answers = add([first, second, third])
    assert [answer.ravel().tolist() for answer in answers] == [[1], [3, 4], [4]]


def test_only_inputs_that_are_looked_at_are_copied() -> None:
    copied: list[int] = []
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    one = conch.Request({"A": array, "B": array}, rows=4, on_copy=copied.append)
    assert one.shared("A") is array and not copied
    assert one["A"] is one["A"] is not array and one["A"].flags.writeable
    assert one.with_more({"C": array}).shared("B") is array
    assert copied == [16]
