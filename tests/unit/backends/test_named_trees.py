"""Backends `xgboost`, `lightgbm` and `sklearn`: outputs by name, each as the library itself returns it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.tree_models import FEATURES, lightgbm_model, samples, sklearn_model, xgboost_model
from tests.unit.backends.harness import Harness, tensor_specs
from tests.unit.backends.test_trees import config_of, spec_of

from conch.backends.trees.lightgbm_backend import LightgbmBackend
from conch.backends.trees.named_outputs import NamedOutputsBackend
from conch.backends.trees.sklearn_backend import SklearnBackend
from conch.backends.trees.xgboost_backend import XgboostBackend
from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.model_version import Model
from conch.core.tensor import Array

CLEAN = np.nan_to_num(samples())


def load(harness: Harness, backend: NamedOutputsBackend, *outputs: str, **parameters: str) -> Model:
    directory = harness.root / "m" / "1"
    completed = backend.complete_config(config_of(*outputs, **parameters), directory, {})
    spec = spec_of(harness, completed)
    backend.check(spec)
    return harness.load(backend, spec)


def answers(harness: Harness, model: Model, rows: Array) -> dict[str, Array]:
    response = harness.infer(model, {"input": rows}).one
    assert response.error is None, response.error
    return {each.name: each.numpy() for each in response.outputs}


@pytest.mark.parametrize("kind", ["binary", "multi", "regression"])
def test_xgboost(harness: Harness, kind: str) -> None:
    import xgboost

    objective = {"objective": "multi:softmax"} if kind == "multi" else {}
    booster = xgboost_model(kind, harness.directory("m", {}) / "1" / "xgboost.ubj", **objective)
    names = ["predict", "margin", "leaf", "contributions"] + ["predict_proba"] * (kind != "regression")
    found = answers(harness, load(harness, XgboostBackend(), *names, cpu_nthread="2"), samples())
    matrix = xgboost.DMatrix(samples())
    count = len(samples())
    np.testing.assert_array_equal(
        found["margin"], booster.predict(matrix, output_margin=True).reshape(count, -1)
    )
    np.testing.assert_array_equal(found["leaf"], booster.predict(matrix, pred_leaf=True))
    np.testing.assert_array_equal(found["contributions"], booster.predict(matrix, pred_contribs=True))
    own = booster.predict(matrix)
    if kind == "multi":
        np.testing.assert_array_equal(found["predict"][:, 0], own)  # class ids, as its objective is softmax
        assert found["predict_proba"].shape == (count, 3)
        np.testing.assert_allclose(found["predict_proba"].sum(1), 1, 1e-6)
    elif kind == "binary":
        np.testing.assert_array_equal(found["predict_proba"][:, 1], own)
        np.testing.assert_array_equal(found["predict"][:, 0], own > 0.5)
    else:
        np.testing.assert_array_equal(found["predict"][:, 0], own)


def test_a_base_margin_is_an_input_where_the_config_has_it(harness: Harness) -> None:
    booster = xgboost_model("binary", harness.directory("m", {}) / "1" / "model.json")
    backend = XgboostBackend()
    config = config_of("margin") | {"input": [{"name": "input"}, {"name": "base_margin"}]}
    model = harness.load(
        backend, spec_of(harness, backend.complete_config(config, harness.root / "m" / "1", {}))
    )
    base = np.linspace(-1, 1, len(samples()), dtype=np.float32).reshape(-1, 1)
    found = harness.infer(model, {"input": samples(), "base_margin": base}).array("margin")
    expected = booster.inplace_predict(samples(), predict_type="margin", base_margin=base)
    np.testing.assert_array_equal(found[:, 0], expected)


@pytest.mark.parametrize("kind", ["binary", "multi", "regression", "linear"])
def test_lightgbm(harness: Harness, kind: str) -> None:
    linear = {"linear_tree": True} if kind == "linear" else {}
    kind = "regression" if linear else kind
    booster = lightgbm_model(kind, harness.directory("m", {}) / "1" / "model.txt", **linear)
    names = ["predict", "margin", "leaf"] + ["predict_proba"] * (kind != "regression")
    names += [] if linear else ["contributions"]
    found = answers(harness, load(harness, LightgbmBackend(), *names), samples().astype(np.float64))
    rows, count = samples(), len(samples())
    np.testing.assert_array_equal(found["margin"], booster.predict(rows, raw_score=True).reshape(count, -1))
    np.testing.assert_array_equal(found["leaf"], booster.predict(rows, pred_leaf=True))
    if not linear:
        own = booster.predict(rows, pred_contrib=True)
        np.testing.assert_array_equal(found["contributions"].reshape(count, -1), own)
    own = booster.predict(rows)
    if kind == "multi":
        np.testing.assert_array_equal(found["predict_proba"], own)
        np.testing.assert_array_equal(found["predict"][:, 0], own.argmax(1))
    elif kind == "binary":
        np.testing.assert_array_equal(found["predict_proba"][:, 1], own)
        np.testing.assert_array_equal(found["predict"][:, 0], own > 0.5)
    else:
        np.testing.assert_array_equal(found["predict"][:, 0], own)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("RandomForestClassifier", "multi"),
        ("GradientBoostingClassifier", "binary"),
        ("RandomForestRegressor", "regression"),
    ],
)
def test_sklearn(harness: Harness, name: str, kind: str) -> None:
    jobs = {"n_jobs": 2} if name.startswith("Random") else {}
    estimator = sklearn_model(name, kind, harness.directory("m", {}) / "1" / "model.skops", **jobs)
    methods = {
        "predict": "predict",
        "predict_proba": "predict_proba",
        "margin": "decision_function",
        "leaf": "apply",
    }
    offered = {key: method for key, method in methods.items() if hasattr(estimator, method)}
    found = answers(harness, load(harness, SklearnBackend(), *offered), CLEAN.astype(np.float64))
    for key, method in offered.items():
        own = getattr(estimator, method)(CLEAN).reshape(len(CLEAN), -1)
        np.testing.assert_array_equal(found[key], own)


def test_sklearn_serves_what_is_no_tree_and_labels_that_are_texts(harness: Harness) -> None:
    import skops.io
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    names = np.array(["no", "yes"])[(CLEAN[:, 0] > 0).astype(int)]
    pipeline = make_pipeline(StandardScaler(), LogisticRegression()).fit(CLEAN, names)
    skops.io.dump(pipeline, harness.directory("m", {}) / "1" / "model.skops")
    rows = CLEAN[:5].astype(np.float64)
    found = answers(harness, load(harness, SklearnBackend()), rows)
    assert found["predict"].ravel().tolist() == [each.encode() for each in pipeline.predict(rows)]
    np.testing.assert_array_equal(found["predict_proba"], pipeline.predict_proba(rows))


def test_only_requested_outputs_are_computed(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightgbm

    lightgbm_model("binary", harness.directory("m", {}) / "1" / "model.txt")
    calls: list[dict[str, Any]] = []
    predict: Any = lightgbm.Booster.predict

    def counted(self: Any, rows: Array, **options: Any) -> Array:
        calls.append(options)
        found: Array = predict(self, rows, **options)
        return found

    monkeypatch.setattr(lightgbm.Booster, "predict", counted)
    model = load(harness, LightgbmBackend(), "predict", "predict_proba", "leaf", "contributions")
    rows = samples()[:1].astype(np.float64)
    harness.infer(model, {"input": rows}, requested=frozenset({"leaf"})).array("leaf")
    assert calls == [{"pred_leaf": True, "num_threads": 1}]
    harness.infer(model, {"input": rows}, requested=frozenset({"predict", "predict_proba"})).array("predict")
    assert calls[1:] == [{"num_threads": 1}]


def test_completion(harness: Harness) -> None:
    directory = harness.directory("m", {}) / "1"
    xgboost_model("multi", directory / "xgboost.json")
    assert XgboostBackend().complete_config({"name": "m"}, directory, {}) == {
        "name": "m",
        "max_batch_size": 32768,
        "dynamic_batching": {},
        "input": [{"name": "input", "data_type": "TYPE_FP32", "dims": [FEATURES]}],
        "output": [
            {"name": "predict", "data_type": "TYPE_INT64", "dims": [1]},
            {"name": "predict_proba", "data_type": "TYPE_FP32", "dims": [3]},
        ],
    }


def test_what_is_refused(harness: Harness) -> None:
    import skops.io
    from sklearn.linear_model import LinearRegression

    directory = harness.directory("m", {}) / "1"
    lightgbm_model("binary", directory / "xgboost.json")
    with pytest.raises(InvalidArgumentError, match=r"is a LightGBM model, which another backend serves"):
        load(harness, XgboostBackend())
    xgboost_model("regression", directory / "xgboost.json", booster="gblinear", max_depth=None)
    with pytest.raises(InternalError, match="can't be read as an XGBoost model in JSON"):
        load(harness, XgboostBackend())
    skops.io.dump(LinearRegression(), directory / "model.skops")
    with pytest.raises(InvalidArgumentError, match=r"LinearRegression of '.*' is not fitted, or"):
        load(harness, SklearnBackend())
    lightgbm_model("binary", directory / "model.txt")
    tensors = tensor_specs(input=("FP32", (FEATURES,))), tensor_specs(probability=("FP64", (1,)))
    spec = harness.spec("m", *tensors, "", backend="lightgbm")
    with pytest.raises(InvalidArgumentError, match="allowed outputs are: contributions, leaf, margin"):
        LightgbmBackend().check(spec)
