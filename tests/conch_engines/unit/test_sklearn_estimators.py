"""Each estimator of scikit-learn and common pipelines: served as the library answers, as the page says."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from sklearn.utils import all_estimators
from tests.support.backend_harness import Harness
from tests.support.sklearn_estimators import PAGE, PIPELINES, Served, Trained, served, trained

from conch.core.tensor import Array
from conch_engines.trees.sklearn_backend import SklearnBackend

NAMES = [name for name, _ in all_estimators()]
PARTS = 4


@cache
def documented() -> dict[str, tuple[str, ...]]:
    """The cells of the page beside each estimator or pipeline."""
    found: dict[str, tuple[str, ...]] = {}
    for line in PAGE.read_text().splitlines():
        cells = [each.strip() for each in line.strip("|").split(" | ")]
        if not line.startswith("| "):
            continue
        if cells[0] in PIPELINES:
            found[cells[0]] = tuple(cells[1:])
        else:
            found |= dict.fromkeys(cells[-1].split(", "), tuple(cells[:-1]))
    return found


def check(row: Served, model: Trained, harness: Harness, path: Path) -> None:
    """Compares all outputs with the library's, for all rows and for the first alone."""
    star = "\\*" * (row.own_types and row.name not in PIPELINES)
    if row.offer is None:
        assert documented()[row.name] == (row.reason,)
        return
    assert documented()[row.name + star] == (row.input, row.outputs)
    own = {name: each for output in model.methods for name, each in model.own(output).items()}
    assert own.keys() == row.offer.outputs.keys() - {"leaf"}
    spec = harness.spec("m")
    function = SklearnBackend().open_model(path, "sklearn", spec, 1, row.offer)
    for count in (len(model.rows), 1):
        found = function({name: each[:count] for name, each in model.inputs.items()}, tuple(own))
        for name, array in found.items():
            same(array, own[name][:count], 1e-12 if count > 1 else 1e-9)


def same(found: Array, own: Array, tolerance: float) -> None:
    assert found.shape == own.shape
    if own.dtype.kind in "OU":
        assert [each.decode() for each in found.ravel()] == [str(each) for each in own.ravel()]
    else:
        np.testing.assert_allclose(found, own.astype(float), tolerance, tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of trainings that end early
@pytest.mark.parametrize("part", range(PARTS))
def test_estimators_are_served_as_the_library_answers(harness: Harness, part: int) -> None:
    path = harness.root / "model.skops"
    failed = []
    for name in [*NAMES, *PIPELINES][part::PARTS]:
        model = trained(name)
        try:
            check(served(name, model.estimator, path), model, harness, path)
        except (AssertionError, KeyError) as error:
            failed.append(f"{name}: {type(error).__name__} {error}")
    assert not failed, "\n".join([*failed, "python scripts/generate_estimators.py writes the page"])


def test_the_page_has_no_others() -> None:
    names = {re.sub(r"\\\*", "", each) for each in documented()}
    assert names - {"estimators", "pipeline", "outputs"} == {*NAMES, *PIPELINES}
