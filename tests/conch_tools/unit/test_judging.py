"""The judgement of converted models: pure functions of arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.tensor import Array
from conch_tools.optimize.judging import Limits, difference, judge, loosest, noise_of

ROWS = 64
EXACT, REDUCED, QUANTISED = (Limits().of(each) for each in ("exact", "reduced", "quantised"))


def outputs(seed: int = 0) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    shapes = {"first": (ROWS, 3, 4), "second": (ROWS, 3, 4)}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@given(st.floats(0, 3), st.floats(1e-6, 1e-2), st.floats(0, 1e-2))
def test_exact_is_what_numpy_calls_close(exponent: float, atol: float, rtol: float) -> None:
    reference = outputs()
    limits = Limits(atol=atol, rtol=rtol).of("exact")
    other = {name: array + np.float32(atol * 10 ** (exponent - 1.5)) for name, array in reference.items()}
    close = all(
        np.allclose(other[name].astype(float), array.astype(float), rtol=rtol, atol=atol)
        for name, array in reference.items()
    )
    assert (not judge(reference, other, limits).reason) == close


@pytest.mark.parametrize("tolerances", [EXACT, REDUCED, QUANTISED])
def test_equal_outputs_pass_in_all_classes(tolerances: object) -> None:
    reference = outputs() | {"label": np.arange(ROWS), "text": np.array([b"a"] * ROWS)}
    verdict = judge(reference, reference, tolerances)  # type: ignore[arg-type]
    assert not verdict.reason
    assert verdict.outputs["first"].abs == 0
    assert verdict.outputs["first"].cosine_min == pytest.approx(1)
    assert verdict.outputs["label"].equal == verdict.outputs["text"].equal == 1


def test_swapped_outputs() -> None:
    reference = outputs()
    found = {"first": reference["second"], "second": reference["first"]}
    for tolerances in (EXACT, REDUCED, QUANTISED):
        assert judge(reference, found, tolerances).reason.endswith(
            "; outputs 'first' and 'second' are swapped"
        )


def test_a_wrong_transpose() -> None:
    reference = outputs()
    turned = {**reference, "first": reference["first"].transpose(0, 2, 1)}
    assert judge(reference, turned, EXACT).reason == (
        f"output 'first' has the shape [{ROWS}, 4, 3] where the original's has [{ROWS}, 3, 4]: its "
        f"dimensions are transposed"
    )
    shaped = {**turned, "first": turned["first"].reshape(ROWS, 3, 4)}
    assert "has the original's values in another order, as by a wrong transpose" in (
        judge(reference, shaped, REDUCED).reason
    )


def test_nan_and_infinity() -> None:
    reference = outputs()
    for value, text in ((np.nan, "NaN"), (np.inf, "infinity")):
        found = {**reference, "second": reference["second"].copy()}
        found["second"][5, 1, 1:3] = value
        assert judge(reference, found, QUANTISED).reason == (
            f"output 'second' has {text} in 2 of {12 * ROWS} values where the original has none (first in "
            f"sample 5)"
        )
        assert not judge(found, found, EXACT).reason
    assert "has numbers where the original has infinity" in judge(found, reference, EXACT).reason


def test_names_types_and_shapes() -> None:
    reference = outputs()
    missing = {"first": reference["first"]}
    assert judge(reference, missing, EXACT).reason == (
        "it returns 'first' where the original returns 'first', 'second'"
    )
    half = {**reference, "first": reference["first"].astype(np.float16)}
    assert judge(reference, half, EXACT).reason == "output 'first' is float16 where the original's is float32"


def test_a_difference_names_its_sample_and_count() -> None:
    reference = outputs()
    found = {**reference, "first": reference["first"].copy()}
    found["first"][7, 0, 0] += 1
    verdict = judge(reference, found, EXACT)
    assert verdict.reason == (
        f"output 'first' differs by up to 1 (worst in sample 7) and is beyond 0.0001 + 0.001·|original| in "
        f"1 of {12 * ROWS} values"
    )
    assert verdict.outputs["first"].worst_sample == 7


def test_noise_of_the_original_raises_the_tolerance() -> None:
    reference = outputs()
    other = {name: array + np.float32(0.01) for name, array in reference.items()}
    noise = noise_of(reference, [{name: array[:8] for name, array in other.items()}])
    assert noise["first"] == pytest.approx(0.01, rel=1e-3)
    assert judge(reference, other, EXACT).reason
    assert not judge(reference, other, EXACT, noise).reason


def test_best_classes() -> None:
    scores = np.zeros((100, 10), np.float32)
    scores[:, 0], scores[:, 1] = 10, 9.9
    other = scores.copy()
    other[:2, 1] = 10.1
    found = difference(scores, other)
    assert (found.top1, found.top5) == (0.98, 1)
    assert "the original's best class in 98.00% of the samples" in (
        judge({"y": scores}, {"y": other}, QUANTISED).reason
    )
    # Classes that are equally good may change places.
    scores[:, 1] = 10
    assert difference(scores, scores[:, [1, 0, *range(2, 10)]]).top1 == 1


def test_small_values_have_no_relative_difference() -> None:
    reference = np.array([[1000.0, 1e-6]])
    assert difference(reference, reference + 1e-3).rel == pytest.approx(1e-6)


def test_scores_of_one_value_are_one_vector() -> None:
    reference = np.linspace(-1, 1, 50, dtype=np.float32)[:, None]
    assert difference(reference, reference[::-1]).cosine_min == pytest.approx(-1)


def test_the_loosest_class_counts() -> None:
    assert loosest(["exact", "quantised", "reduced"]) == "quantised"
    assert loosest([]) == "exact"
