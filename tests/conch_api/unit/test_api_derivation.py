"""Inputs and outputs of functions, derived from type hints or from one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt
import pytest

import conch
from conch.core.errors import InvalidArgumentError
from conch_api.derivation import from_example, hinted_inputs, hinted_outputs

Rows = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Pixels = np.ndarray[tuple[int, int, Literal[3]], np.dtype[np.uint8]]
Texts = np.ndarray[tuple[int, int], np.dtype[np.object_]]
Unknown = npt.NDArray[np.float32]
Scores = Annotated[Any, conch.Tensor(dtype=np.float64, shape=(5,))]


class Named(TypedDict):
    LABEL: Texts
    SCORES: Scores


@conch.batch
def named(X: Rows, IMAGE: Pixels, K: Scores | None = None) -> Named: ...  # type: ignore[empty-body]


@conch.sample
async def pair(A: Rows) -> tuple[Rows, Scores]: ...  # type: ignore[empty-body]


@conch.sample
def stream(A: Rows) -> Iterator[Scores]:
    yield A


class Called:
    def __call__(self, A: Rows) -> Rows:
        return A


def told(tensors: Any) -> list[tuple[Any, ...]]:
    return [(each.name, each.datatype, tuple(each.shape), each.optional) for each in tensors]


def test_hints_with_a_batch_dimension() -> None:
    assert told(hinted_inputs("m", named, True)) == [
        ("X", "FP32", (-1,), False),
        ("IMAGE", "UINT8", (-1, 3), False),
        ("K", "FP64", (5,), True),
    ]
    assert told(hinted_outputs("m", named, True)) == [
        ("LABEL", "BYTES", (-1,), False),
        ("SCORES", "FP64", (5,), False),
    ]


@pytest.mark.parametrize("function", [pair, stream, Called(), Called().__call__])
def test_hints_without_a_batch_dimension(function: Callable[..., Any]) -> None:
    assert told(hinted_inputs("m", function, False)) == [("A", "FP32", (-1, -1), False)]
    first = (None, "FP32", (-1, -1), False)
    scores = (None, "FP64", (5,), False)
    wanted = {pair: [first, scores], stream: [scores]}.get(function, [first])
    assert told(hinted_outputs("m", function, False)) == wanted


def unranked(X: Unknown) -> Rows: ...  # type: ignore[empty-body]
def unhinted(X): ...  # type: ignore[no-untyped-def]
def keywords(**arrays: Rows) -> Rows: ...  # type: ignore[empty-body]
def unknown(X: nothing) -> Rows: ...  # type: ignore[name-defined,empty-body]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (unranked, "model 'm': the type hints do not say enough of parameter 'X': give inputs=["),
        (unhinted, "do not say enough of parameter 'X'"),
        (keywords, "do not say enough of parameter 'arrays'"),
        (unknown, "can't be read (name 'nothing' is not defined)"),
    ],
)
def test_hints_that_do_not_say_enough(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        hinted_inputs("m", function, True)
    assert text in caught.value.message


def test_an_example() -> None:
    @conch.batch
    def scale(X: Any, TEXT: Any) -> dict[str, Any]:
        X *= 2  # its own
        return {"Y": X, "FIRST": [[text[:1] for text in row] for row in TEXT.tolist()]}

    given = np.ones((2, 3), np.float32)
    derived = from_example("m", [scale], {"X": given, "TEXT": [["ab"], ["c"]]}, None, None, True)
    assert told(derived.inputs) == [("X", "FP32", (3,), False), ("TEXT", "BYTES", (1,), False)]
    assert told(derived.outputs) == [("Y", "FP32", (-1,), False), ("FIRST", "BYTES", (-1,), False)]
    assert given.tolist() == [[1] * 3] * 2
    known = [conch.Tensor("X", np.int16)]
    derived = from_example("m", [conch.sample(lambda X: (X, X[None]))], {"X": [1]}, known, None, False)
    assert derived.inputs is known
    assert told(derived.outputs) == [(None, "INT16", (-1,), False), (None, "INT16", (-1, -1), False)]


@pytest.mark.parametrize(
    ("function", "example", "text"),
    [
        (
            lambda X: X[:, 9],
            {"X": [[1.0]]},
            "model 'm': the call with the example failed: IndexError: index 9",
        ),
        (lambda X: X, {"X": 1.0}, "tensor 'X' of the example has shape []: it must have a dim besides"),
        (lambda X: X, {"X": [{}]}, "input 'X' can't be made an array"),
    ],
)
def test_examples_that_can_not_be(function: Any, example: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        from_example("m", [conch.batch(function)], example, None, None, True)
    assert text in caught.value.message


def test_a_function_is_bound_by_what_was_derived() -> None:
    @conch.batch
    def double(X: Rows) -> Annotated[Any, conch.Tensor("Y")]:
        return 2 * X

    server = conch.Server(grpc_port=None, http_port=None, metrics_port=None)
    server.bind("hinted", double)
    sums = {"labels": lambda X: X.sum(1).astype(str), "sums": lambda X: X.sum(1)}
    for name, function in sums.items():
        server.bind(name, conch.batch(function), example={"X": np.zeros((2, 3), np.float32)})
    server.bind(
        "example", conch.sample(lambda X: X), example={"X": [1]}, config=conch.ModelConfig(batching=False)
    )
    with pytest.raises(InvalidArgumentError, match="an example has no effect"):
        server.bind("both", double, [conch.Tensor("X")], [conch.Tensor("Y")], example={"X": [[1.0]]})
    with server:
        assert server.infer("hinted", {"X": [[1.0]]})["Y"].tolist() == [[2]]
        assert server.infer("example", {"X": [5]})["OUTPUT_1"].tolist() == [5]
        rows = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
        assert server.infer("sums", {"X": rows})["OUTPUT_1"].tolist() == [[6], [15]]
        assert server.infer("labels", {"X": rows})["OUTPUT_1"].tolist() == [[b"6.0"], [b"15.0"]]
        with pytest.raises(InvalidArgumentError, match=r"input 'X' for model 'sums'. Expected \[-1,3\], got"):
            server.infer("sums", {"X": rows[:, :2]})
