"""Backend `catboost`: each output as CatBoost's own class returns it, columns of all kinds, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import catboost
import numpy as np
import pandas as pd
import pytest
from tests.conch_engines.unit.test_named_trees import answers, load
from tests.conch_engines.unit.test_trees import spec_of
from tests.support.backend_harness import Harness

from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.tensor import Array
from conch_engines.catboost.catboost_backend import CatboostBackend
from conch_engines.trees.xgboost_backend import XgboostBackend

ROWS = np.random.default_rng(0).normal(size=(60, 3))
FIRST = ROWS[:, 0]
THREE = np.digitize(FIRST, [-0.5, 0.5])
SHORT = {"iterations": 4, "depth": 3, "verbose": 0, "allow_writing_files": False, "thread_count": 1}
CASES: dict[str, tuple[str, Any]] = {
    "RMSE": ("Regressor", FIRST),
    "Poisson": ("Regressor", np.abs(FIRST)),
    "MultiRMSE": ("Regressor", ROWS[:, :2]),
    "RMSEWithUncertainty": ("Regressor", FIRST),
    "MultiQuantile:alpha=0.1,0.5": ("Regressor", FIRST),
    "Logloss": ("Classifier", FIRST > 0),
    "CrossEntropy": ("Classifier", 1 / (1 + np.exp(-FIRST))),
    "MultiClass": ("Classifier", np.array(["low", "mid", "top"])[THREE]),
    "MultiClassOneVsAll": ("Classifier", THREE + 0.5),
    "MultiLogloss": ("Classifier", (ROWS[:, :2] > 0).astype(int)),
}


@pytest.mark.parametrize("objective", CASES)
def test_outputs_are_those_of_the_library(harness: Harness, objective: str) -> None:
    kind, target = CASES[objective]
    settings = SHORT | {"loss_function": objective}
    booster = getattr(catboost, f"CatBoost{kind}")(**settings).fit(ROWS, target)
    booster.save_model(harness.directory("m", {}) / "1" / "model.cbm")
    pool = catboost.Pool(ROWS)
    own = {
        "predict": booster.predict(ROWS),
        "margin": booster.predict(ROWS, prediction_type="RawFormulaVal"),
        "leaf": booster.calc_leaf_indexes(pool),
        "contributions": booster.get_feature_importance(pool, type="ShapValues"),
    }
    if kind == "Classifier":
        own["predict_proba"] = booster.predict_proba(ROWS)
    found = answers(harness, load(harness, CatboostBackend(), *own, cpu_nthread="2"), ROWS)
    for name, array in own.items():
        expected = array.reshape(len(ROWS), *(array.shape[1:] or (1,)))
        if expected.dtype.kind == "O":
            expected = np.array([[each.encode() for each in row] for row in expected], object)
        np.testing.assert_array_equal(found[name], expected)


def shop() -> Any:
    """A DataFrame of columns of all kinds."""
    random = np.random.default_rng(1)
    return pd.DataFrame(
        {
            "old price": np.where(random.random(80) < 0.1, np.nan, random.normal(size=80)),
            "color": random.choice(["rot", "grün"], 80),
            "new": random.choice([True, False], 80),
            "rooms": random.integers(1, 5, 80),
            "note": random.choice(["a good one", "a bad one", "no idea"], 80),
        }
    )


CATEGORIES = ["color", "new", "rooms"]
INPUTS = [
    {"name": "note"},
    {"name": "rooms", "data_type": "TYPE_INT64"},
    {"name": "new", "data_type": "TYPE_BOOL"},
    {"name": "color"},
    {"name": "old price"},
]


@pytest.fixture
def saved(harness: Harness) -> Any:
    """A classifier of `shop`, saved for model `m`."""
    table = shop()
    target = np.where((table["old price"] > 0) ^ (table["color"] == "rot") ^ table["new"], "yes", "no")
    settings: dict[str, Any] = {"cat_features": CATEGORIES, "text_features": ["note"], "one_hot_max_size": 2}
    booster = catboost.CatBoostClassifier(**SHORT | {"iterations": 30} | settings).fit(table, target)
    booster.save_model(harness.directory("m", {}) / "1" / "model.cbm")
    return booster


def loaded(harness: Harness, inputs: list[dict[str, Any]], **parameters: str) -> Any:
    backend = CatboostBackend()
    config: dict[str, Any] = {"name": "m", "input": [dict(each) for each in inputs]}
    config["parameters"] = {key: {"string_value": value} for key, value in parameters.items()}
    spec = spec_of(harness, backend.complete_config(config, harness.root / "m" / "1", {}), "catboost")
    backend.check(spec)
    return harness.load(backend, spec)


def request_of(table: Any, *, as_texts: tuple[str, ...] = ()) -> dict[str, Array]:
    found = {}
    for name in table:
        array = table[name].to_numpy().reshape(-1, 1)
        if name in as_texts or array.dtype.kind == "O":
            array = np.array([[str(each).encode()] for each in array.ravel().tolist()], object)
        found[name] = array
    return found


def test_columns_keep_their_types(harness: Harness, saved: Any) -> None:
    table = shop()
    expected = saved.predict_proba(table)
    model = loaded(harness, INPUTS)
    found = harness.infer(model, request_of(table)).array("predict_proba")
    np.testing.assert_array_equal(found, expected)
    flipped = table.assign(new=~table["new"])
    assert not np.array_equal(saved.predict_proba(flipped), expected), "the bool matters"
    given = request_of(table)
    with ThreadPoolExecutor(4) as threads:
        for array in threads.map(lambda _: harness.infer(model, given).array("predict_proba"), range(16)):
            np.testing.assert_array_equal(array, expected)


def test_without_a_config_categories_are_texts(harness: Harness, saved: Any) -> None:
    directory = harness.root / "m" / "1"
    completed = CatboostBackend().complete_config({"name": "m"}, directory, {})
    kinds = {each["name"]: each["data_type"] for each in completed["input"]}
    assert kinds == {name: "TYPE_FP64" if name == "old price" else "TYPE_STRING" for name in shop()}
    table = shop().assign(new=shop()["new"].map({True: "1", False: "0"}))
    given = request_of(table, as_texts=("rooms",))
    model = loaded(harness, [])
    np.testing.assert_array_equal(
        harness.infer(model, given).array("predict_proba"), saved.predict_proba(shop())
    )
    given["new"][3, 0] = b"True"
    refusal = (
        "input 'new' has 'True' in row 3, which CatBoost does not know where the training had a bool: give"
    )
    assert refusal in harness.infer(model, given).error
    permissive = loaded(harness, [], CONCH_BOOL_TEXTS="true")
    assert harness.infer(permissive, given).array("predict").shape == (80, 1)
    given["color"][5, 0] = b"\xff"
    assert "input 'color' has no UTF-8 in row 5" in harness.infer(permissive, given).error


def damaged(harness: Harness) -> CatboostBackend:
    path = harness.root / "m" / "1" / "model.cbm"
    path.write_bytes(path.read_bytes()[:500])
    return CatboostBackend()


def embedded(harness: Harness) -> CatboostBackend:
    table = pd.DataFrame({"e": [[0.1 * each, 1.0] for each in range(20)], "n": np.arange(20.0)})
    booster = catboost.CatBoostRegressor(**SHORT, embedding_features=["e"]).fit(table, np.arange(20))
    booster.save_model(harness.root / "m" / "1" / "model.cbm")
    return CatboostBackend()


def of_floats(harness: Harness) -> CatboostBackend:
    loaded(
        harness, [each | ({"data_type": "TYPE_FP64"} if each["name"] == "rooms" else {}) for each in INPUTS]
    )
    return CatboostBackend()


def of_one_input(harness: Harness) -> CatboostBackend:
    loaded(harness, INPUTS[2:3])
    return CatboostBackend()


def as_xgboost(harness: Harness) -> XgboostBackend:
    path = harness.root / "m" / "1" / "model.cbm"
    path.rename(path.with_name("xgboost.json"))
    return XgboostBackend()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (damaged, "can't be read as a CatBoost model: "),
        (embedded, "has columns of embeddings, which have no input here"),
        (of_floats, "expects datatype TYPE_FP64 for input 'rooms', model provides TYPE_STRING"),
        (
            of_one_input,
            "expects 1 inputs, model provides 5: list all of them, also 'old price', 'color'",
        ),
        (as_xgboost, "is a CatBoost model, which another backend serves"),
    ],
)
@pytest.mark.usefixtures("saved")
def test_refusals(harness: Harness, make: Callable[[Harness], Any], text: str) -> None:
    with pytest.raises((InvalidArgumentError, InternalError), match=text):
        load(harness, make(harness), "predict")
