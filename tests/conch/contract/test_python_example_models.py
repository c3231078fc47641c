"""The models of examples/models/python with bad input: it is its own client's trouble only."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.servers import PYTHON_EXAMPLES

import conch.testing
from conch.testing import ModelError

TOGETHER = {"dynamic_batching": {"preferred_batch_size": [2], "max_queue_delay_microseconds": 600_000_000}}


def texts(*values: bytes) -> Any:
    return np.array([list(values)], object)


def png(side: int) -> bytes:
    """A file that is small whatever its side is."""
    file = io.BytesIO()
    Image.new("1", (side, side)).save(file, "PNG")
    return file.getvalue()


def good_and_bad(name: str, *many: Any, **config: Any) -> list[Any]:
    with conch.testing.load(PYTHON_EXAMPLES / name, config=config) as model:
        return model.run_all(many)


def refused(answer: Any) -> bool:
    return isinstance(answer, ModelError) and answer.code == "INVALID_ARG"


@pytest.mark.parametrize("bad", [lambda: b"no image", lambda: png(20_000), lambda: png(8)[:-30] + bytes(30)])
def test_preprocessing(bad: Callable[[], bytes]) -> None:
    images = ({"IMAGE": texts(png(8))}, {"IMAGE": texts(bad())})
    answer, error = good_and_bad("preprocessing", *images, **TOGETHER)
    assert answer["PIXELS"].shape == (1, 3, 224, 224)
    assert refused(error)


def test_auto_complete() -> None:
    together = {"max_queue_delay_microseconds": 100_000}
    answer, error = good_and_bad(
        "auto_complete", {"TEXT": texts(b"a b")}, {"TEXT": texts(b"\xff")}, dynamic_batching=together
    )
    assert answer["WORDS"].tolist() == [[2]]
    assert refused(error)


def test_iterative() -> None:
    most = np.iinfo(np.int64).max
    many = [{"START": np.array([[start]], np.int64)} for start in (6, most, most - 1)]
    answers, *errors = good_and_bad("iterative", *many)
    assert [answer["NUMBER"].item() for answer in answers] == [6, 3, 10, 5, 16, 8, 4, 2, 1]
    assert all(refused(error) for error in errors)


def test_repeat() -> None:
    with conch.testing.load(PYTHON_EXAMPLES / "repeat") as model:
        (error,) = model.run_all([{"IN": [1, 2], "DELAY": [0], "WAIT": [0]}])
        assert refused(error)
        answers = model.run({"IN": [1, 2], "DELAY": [0, 0], "WAIT": [0]})
        assert [answer["OUT"].item() for answer in answers] == [1, 2]


def test_square_ends_with_its_client() -> None:
    with conch.testing.load(PYTHON_EXAMPLES / "square") as model:
        answers = model.stream({"IN": [2**31 - 1]})
        next(answers)
        answers.close()  # type: ignore[attr-defined]
        assert [answer["OUT"].item() for answer in model.run({"IN": [2]})] == [2, 2]
