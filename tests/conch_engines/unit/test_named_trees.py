"""Backends `xgboost`, `lightgbm` and `sklearn`: outputs by name, each as the library itself returns it."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from tests.conch_engines.unit.test_trees import config_of, spec_of
from tests.support.backend_harness import Harness, tensor_specs
from tests.support.tree_models import FEATURES, labels, lightgbm_model, samples, sklearn_model, xgboost_model

from conch.core.errors import InternalError, InvalidArgumentError, UnavailableError
from conch.core.model_version import Model
from conch.core.tensor import NUMPY_DTYPES, Array
from conch_engines.trees.fil_backend import FilBackend
from conch_engines.trees.lightgbm_backend import LightgbmBackend
from conch_engines.trees.named_outputs import NamedOutputsBackend
from conch_engines.trees.sklearn_backend import SklearnBackend
from conch_engines.trees.xgboost_backend import XgboostBackend

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


def codes() -> Any:
    """A DataFrame whose first column has categories."""
    import pandas as pd

    table = pd.DataFrame(CLEAN, columns=list("abcd"))
    return table.assign(a=pd.Categorical(np.array(["x", "y", "z"])[labels("multi")]))


# Cut within a letter, and between two.
@pytest.mark.parametrize("names", [["\u00c4", "b", "c"], ["\u00c4b", "c", "d"]])
def test_categories_that_xgboost_cuts_are_the_configs(harness: Harness, names: list[str]) -> None:
    import pandas as pd
    import xgboost

    frame = pd.DataFrame(CLEAN, columns=list("xyzw"))
    frame["x"] = pd.Categorical.from_codes(labels("multi"), names)
    matrix = xgboost.DMatrix(frame, labels("binary"), enable_categorical=True)
    booster = xgboost.train({"nthread": 1}, matrix, 3)
    booster.save_model(harness.directory("m", {}) / "1" / "xgboost.ubj")
    with pytest.raises(InvalidArgumentError, match="column 'x' has categories with letters beyond ASCII"):
        load(harness, XgboostBackend(), "predict")
    columns = json.dumps([{"name": "x", "categories": names, "codes": True}, "y", "z", "w"])
    model = load(harness, XgboostBackend(), "predict", CONCH_COLUMNS=columns)
    rows = np.column_stack((labels("multi"), CLEAN[:, 1:])).astype(np.float32)
    assert np.array_equal(answers(harness, model, rows)["predict"][:, 0], booster.predict(matrix))


@pytest.mark.filterwarnings("ignore:.*gblinear:UserWarning")  # of XGBoost 3.4
@pytest.mark.parametrize("file", ["xgboost.json", "xgboost.ubj"])
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"objective": "binary:logistic"}, "categories of a DataFrame, which treelite does not support"),
        ({"objective": "reg:squarederror"}, "Multi-target model not supported"),
        ({"multi_strategy": "multi_output_tree"}, "Multi-target model not supported"),
        ({"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.5, 0.9]}, "Multi-target model not"),
        ({"booster": "gblinear"}, r"a linear booster \(gblinear\) has no trees"),
        ({"booster": "gblinear", "objective": "multi:softmax", "num_class": 3}, r"a linear booster"),
    ],
)
def test_xgboost_serves_what_treelite_does_not(
    harness: Harness, file: str, settings: dict[str, Any], reason: str
) -> None:
    import xgboost

    rows, target = CLEAN, labels("regression")
    matrix = xgboost.DMatrix(CLEAN)
    if reason.startswith("categories"):
        rows = np.column_stack((labels("multi"), CLEAN[:, 1:])).astype(np.float32)
        target = labels("binary")
        matrix = xgboost.DMatrix(codes(), enable_categorical=True)
    elif "num_class" in settings:
        target = labels("multi")
    elif reason == "Multi-target model not supported":
        target = np.column_stack((target, -target))
    matrix.set_label(target)
    booster = xgboost.train({"nthread": 1, **settings}, matrix, 3)
    path = harness.directory("m", {}) / "1" / file
    booster.save_model(path)

    names = ["predict", "margin"]
    names += ["contributions"] * ("multi_strategy" not in settings)
    names += ["leaf"] * (not {"multi_strategy", "booster"} & settings.keys())
    found = answers(harness, load(harness, XgboostBackend(), *names), rows)
    count = len(rows)
    own = booster.predict(matrix, output_margin=True).reshape(count, -1)
    np.testing.assert_array_equal(found["margin"], own)
    values = booster.predict(matrix).reshape(count, -1)
    if settings.get("objective") == "binary:logistic":
        values = values > 0.5
    np.testing.assert_array_equal(found["predict"], values)
    for name, options in (("contributions", {"pred_contribs": True}), ("leaf", {"pred_leaf": True})):
        if name in names:
            own = booster.predict(matrix, **options).reshape(count, -1)
            np.testing.assert_array_equal(found[name].reshape(count, -1), own)
    offered = XgboostBackend().describe(path, f"xgboost_{file[8:]}", "m", {}).outputs
    assert set(names) == offered.keys() - {"predict_proba"}
    with pytest.raises(InvalidArgumentError, match=reason + r".*; serve '.*' with backend 'xgboost'"):
        FilBackend().complete_config({"name": "m"}, path.parent, {})


def test_vectors_in_leaves_of_older_xgboost_are_refused(harness: Harness) -> None:
    """XGBoost 3.2 crashes on them."""
    booster = xgboost_model("multi", multi_strategy="multi_output_tree")
    document = json.loads(booster.save_raw("json"))
    for tree in document["learner"]["gradient_booster"]["model"]["trees"]:
        for field in ("leaf_weights", "loss_changes", "sum_hessian"):
            del tree[field]
    (harness.directory("m", {}) / "1" / "xgboost.json").write_text(json.dumps(document))
    with pytest.raises(InvalidArgumentError, match=r"XGBoost before 3.2 wrote the trees of '.*'"):
        load(harness, XgboostBackend())


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("xgboost.ubj", {"num_parallel_tree": 2}),
        ("xgboost.json", {"objective": "multi:softprob", "num_class": 3}),
        ("xgboost.ubj", {"booster": "dart", "rate_drop": 0.5}),
        ("xgboost.json", {"booster": "dart", "rate_drop": 0.5}),
    ],
)
def test_early_stopping_leaves_the_choice_to_the_config(
    harness: Harness, file: str, settings: dict[str, Any]
) -> None:
    import xgboost

    kind = "multi" if "num_class" in settings else "regression"
    booster = xgboost.train({"nthread": 1, **settings}, xgboost.DMatrix(CLEAN, labels(kind)), 6)
    booster.set_attr(best_iteration="2")  # as early stopping does
    booster.save_model(harness.directory("m", {}) / "1" / file)
    text = (
        "model 'm': early stopping found iteration 3 of 6 the best, and all are used; set parameter "
        "'CONCH_BEST_ITERATION' to 'true' to stop there, as XGBoost's classes for scikit-learn do, or to "
        "'false' to use all"
    )
    matrix, count = xgboost.DMatrix(CLEAN), len(CLEAN)
    for choice, end in (("", 0), ("false", 0), ("true", 3)):
        given = {"CONCH_BEST_ITERATION": choice} if choice else {}
        warnings = () if choice else (text,)
        options = {"iteration_range": (0, end)}
        named = XgboostBackend()
        model = load(harness, named, "margin", "leaf", "contributions", **given)
        assert model.notes == tuple(named.warnings(model.spec)) == warnings
        found = answers(harness, model, CLEAN)
        for name, option in (("margin", "output_margin"), ("leaf", "pred_leaf"), ("contributions", "")):
            own = booster.predict(matrix, **{option or "pred_contribs": True}, **options)
            # XGBoost adds up a `dart` in place in another order.
            np.testing.assert_allclose(found[name].reshape(count, -1), own.reshape(count, -1), 1e-6)

        fil = FilBackend()
        config = config_of("output__0", "treeshap_output", is_classifier="false", **given)
        completed = fil.complete_config(config, harness.root / "m" / "1", {})
        model = harness.load(fil, spec_of(harness, completed))
        assert model.notes == tuple(fil.warnings(model.spec)) == warnings
        results = harness.infer(model, {"input__0": CLEAN})
        for name, contributions in (("output__0", False), ("treeshap_output", True)):
            own = booster.predict(matrix, pred_contribs=contributions, **options).reshape(count, -1)
            np.testing.assert_allclose(results.array(name).reshape(count, -1), own, 1e-5, 1e-6)


def test_a_best_iteration_that_no_file_names_is_refused(harness: Harness) -> None:
    directory = harness.directory("m", {}) / "1"
    xgboost_model("binary", directory / "xgboost.json")
    lightgbm_model("binary", directory / "model.txt")
    fil: Any = FilBackend()
    for backend in (XgboostBackend(), LightgbmBackend(), fil):
        with pytest.raises(
            InvalidArgumentError, match=r"'CONCH_BEST_ITERATION' is 'true', but '.*' names no best"
        ):
            load(harness, backend, CONCH_BEST_ITERATION="true")


@pytest.mark.parametrize("kind", ["binary", "multi", "regression", "linear"])
def test_lightgbm(harness: Harness, kind: str) -> None:
    linear = {"linear_tree": True} if kind == "linear" else {}
    kind = "regression" if linear else kind
    booster = lightgbm_model(kind, harness.directory("m", {}) / "1" / "model.txt", **linear)
    names = ["predict", "margin", "leaf"] + ["predict_proba"] * (kind != "regression")
    path = harness.root / "m" / "1" / "model.txt"
    if "contributions" in LightgbmBackend().describe(path, "lightgbm", "m", {}).outputs:
        names.append("contributions")
    assert (names[-1] != "contributions") == bool(linear)  # of which LightGBM has none
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


def test_zeros_as_missing_values_are_refused_where_they_are_ignored(harness: Harness) -> None:
    import lightgbm

    rows = np.where(np.abs(CLEAN) < 0.4, 0, CLEAN)
    path = harness.directory("m", {}) / "1" / "model.txt"
    data = lightgbm.Dataset(rows, rows[:, 0] + (rows[:, 1] == 0))
    booster = lightgbm.train({"zero_as_missing": True, "verbose": -1}, data, 3)
    booster.save_model(path)
    found = answers(harness, load(harness, LightgbmBackend(), "predict"), rows.astype(np.float64))
    np.testing.assert_array_equal(found["predict"][:, 0], booster.predict(rows))
    given = {"model_type": {"string_value": "lightgbm"}, "output_class": {"string_value": "false"}}
    with pytest.raises(InvalidArgumentError, match=r'trained with zero_as_missing.*backend: "lightgbm"'):
        FilBackend().complete_config({"name": "m", "parameters": given}, path.parent, {})


def test_lightgbm_with_an_objective_of_several_outputs_that_are_no_classes(harness: Harness) -> None:
    import lightgbm

    def own(predictions: Array, data: Any) -> tuple[Array, Array]:
        return predictions - data.get_label()[:, None] * [1, 2, 3], np.ones_like(predictions)

    data = lightgbm.Dataset(samples(), labels("regression"))
    settings = {"objective": own, "num_class": 3, "min_data_in_leaf": 2, "verbose": -1}
    booster = lightgbm.train(settings, data, 3)
    booster.save_model(harness.directory("m", {}) / "1" / "model.txt")
    found = answers(harness, load(harness, LightgbmBackend(), "predict"), samples().astype(np.float64))
    np.testing.assert_array_equal(found["predict"], booster.predict(samples()))
    assert found["predict"].shape == (len(samples()), 3)


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
    rows[3, 1], rows[4, 0] = np.nan, np.inf
    error = harness.infer(load(harness, SklearnBackend()), {"input": rows}).one.error
    text = "input 'input', column 0, has infinity; input 'input', column 1, has null (NaN), which the model"
    assert isinstance(error, InvalidArgumentError) and text in error.message and "Input X" in error.message


def estimators() -> dict[str, Any]:
    """Estimators that need types which skops does not trust."""
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.cluster import BisectingKMeans
    from sklearn.ensemble import RandomForestClassifier, StackingClassifier, VotingClassifier
    from sklearn.feature_selection import SelectKBest
    from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import DotProduct, Matern, WhiteKernel
    from sklearn.linear_model import LogisticRegression, Ridge, TweedieRegressor
    from sklearn.model_selection import GridSearchCV, StratifiedKFold, TunedThresholdClassifierCV
    from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor, RadiusNeighborsRegressor
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import KBinsDiscretizer, SplineTransformer

    logistic = LogisticRegression()
    forest = RandomForestClassifier(2, n_jobs=2, random_state=0)
    parts = [("linear", logistic), ("forest", forest)]
    kernel = Matern() + WhiteKernel() + DotProduct() ** 2
    found = [
        *(KNeighborsClassifier(), KNeighborsRegressor(algorithm="ball_tree", metric="manhattan")),
        *(RadiusNeighborsRegressor(9, p=3), TweedieRegressor(power=1.5), BisectingKMeans(2)),
        *(MLPClassifier(max_iter=3), MLPRegressor(max_iter=3, solver="sgd")),
        *(StackingClassifier(parts), VotingClassifier(parts, voting="soft")),
        *(CalibratedClassifierCV(logistic), CalibratedClassifierCV(forest, method="isotonic")),
        GridSearchCV(forest, {"max_depth": [1, 2]}, scoring=["f1", "roc_auc"], refit="f1", n_jobs=1),
        GridSearchCV(logistic, {"C": [1, 2]}, cv=StratifiedKFold(2)),
        *(TunedThresholdClassifierCV(logistic), GaussianProcessClassifier(DotProduct())),
        *(GaussianProcessRegressor(kernel), make_pipeline(SelectKBest(k=2), Ridge())),
        make_pipeline(SplineTransformer(), KBinsDiscretizer(2, quantile_method="linear"), Ridge()),
    ]
    return {f"{number} {type(each).__name__}": each for number, each in enumerate(found)}


@pytest.mark.filterwarnings("ignore")  # of trainings that end early
@pytest.mark.parametrize("name", estimators())
def test_estimators_of_scikit_learn_are_served(harness: Harness, name: str) -> None:
    import skops.io

    estimator = estimators()[name].fit(CLEAN.astype(np.float64), labels("binary"))
    path = harness.directory("m", {}) / "1" / "model.skops"
    skops.io.dump(estimator, path)
    assert skops.io.get_untrusted_types(file=path), "is of no use here"
    found = answers(harness, load(harness, SklearnBackend(), "predict"), CLEAN.astype(np.float64))
    np.testing.assert_array_equal(
        found["predict"].ravel(), estimator.predict(CLEAN.astype(np.float64)).ravel()
    )


def test_fitted_estimators_within_others_use_one_thread(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    import skops.io
    from sklearn.utils.parallel import Parallel

    voting = estimators()["8 VotingClassifier"].fit(CLEAN.astype(np.float64), labels("binary"))
    skops.io.dump(voting, harness.directory("m", {}) / "1" / "model.skops")
    model = load(harness, SklearnBackend(), "predict")
    used: list[int] = []
    create: Any = Parallel.__init__

    def counted(self: Any, n_jobs: int | None = None, **options: Any) -> None:
        used.append(n_jobs or 1)
        create(self, n_jobs, **options)

    monkeypatch.setattr(Parallel, "__init__", counted)
    voting.predict(CLEAN)
    assert used == [2]
    answers(harness, model, CLEAN.astype(np.float64))
    assert used[1:] == [1]


@pytest.mark.parametrize("counts", [True, False])
def test_a_pipeline_of_texts_takes_texts(harness: Harness, counts: bool) -> None:
    import skops.io
    from sklearn.feature_extraction.text import HashingVectorizer, TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    texts = ["ein guter Tag", "kein Tag", "gute Äpfel", "keine Äpfel"]
    vectorizer = TfidfVectorizer() if counts else HashingVectorizer(n_features=64)
    pipeline = make_pipeline(vectorizer, LogisticRegression()).fit(texts, ["good", "bad", "good", "bad"])
    directory = harness.directory("m", {}) / "1"
    skops.io.dump(pipeline, directory / "model.skops")
    completed = SklearnBackend().complete_config({"name": "m"}, directory, {})
    assert completed["input"] == [{"name": "input", "data_type": "TYPE_STRING", "dims": [1]}]
    rows = np.array([[each.encode()] for each in texts], object)
    found = answers(harness, load(harness, SklearnBackend()), rows)
    assert found["predict"].ravel().tolist() == [each.encode() for each in pipeline.predict(texts)]
    np.testing.assert_array_equal(found["predict_proba"], pipeline.predict_proba(texts))


def doubled(rows: Array) -> Array:
    """A function of the user's own."""
    twice: Array = 2 * rows
    return twice


def test_other_types_are_loaded_only_where_the_config_trusts_them(harness: Harness) -> None:
    import skops.io
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.model_selection import RandomizedSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    path = harness.directory("m", {}) / "1" / "model.skops"
    pipeline = make_pipeline(FunctionTransformer(doubled), Ridge()).fit(CLEAN, CLEAN[:, 0])
    skops.io.dump(pipeline, path)
    name = f"{__name__}.doubled"
    refusal = rf"loaded: {name}; .* name them in parameter 'CONCH_TRUSTED_TYPES' if you trust the file"
    for other in ({}, {"CONCH_TRUSTED_TYPES": __name__}):
        with pytest.raises(InvalidArgumentError, match=refusal):
            load(harness, SklearnBackend(), "predict", **other)
    rows = CLEAN.astype(np.float64)
    found = answers(
        harness, load(harness, SklearnBackend(), "predict", CONCH_TRUSTED_TYPES=f"a.b, {name}"), rows
    )
    np.testing.assert_array_equal(found["predict"][:, 0], pipeline.predict(rows))

    # These compile a text of the file.
    search = RandomizedSearchCV(
        LogisticRegression(), {"C": import_module("scipy.stats").loguniform(0.1, 10)}, n_iter=2
    )
    skops.io.dump(search.fit(CLEAN, labels("binary")), path)
    with pytest.raises(InvalidArgumentError, match=r"loaded: scipy\.stats\..*rv_continuous_frozen; save"):
        load(harness, SklearnBackend(), "predict")


def data_frame_pipeline(harness: Harness, selector: bool) -> tuple[Any, Any]:
    """A pipeline that selects columns of a DataFrame by name, saved for model `m`, and the DataFrame."""
    import pandas as pd
    import skops.io
    from sklearn.compose import ColumnTransformer, make_column_selector
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

    table = pd.DataFrame(
        {
            "age of client": [20, 30, 40, 50],
            "income": [1.5, np.nan, 3, 4],
            "city": ["Köln", "Bonn", None, "Köln"],
            "floor": [1, 2, 2, 1],
            "note": ["late", "on time", "late", "on time"],
            "member": [True, False, True, True],
        }
    )
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    cities = make_pipeline(SimpleImputer(strategy="constant", fill_value="?"), OneHotEncoder())
    chosen = make_column_selector("age|income") if selector else ["age of client", "income"]
    parts = [
        ("numbers", numbers, chosen),
        ("cities", cities, ["city"]),
        ("floors", OrdinalEncoder(), slice("floor", "floor")),
        ("notes", TfidfVectorizer(), "note"),
    ]
    pipeline = make_pipeline(ColumnTransformer(parts, remainder="passthrough"), LogisticRegression())
    pipeline.fit(table, np.array(["stays", "goes", "stays", "goes"]))
    skops.io.dump(pipeline, harness.directory("m", {}) / "1" / "model.skops")
    return pipeline, table


@pytest.mark.parametrize("selector", [False, True])
def test_a_pipeline_of_a_data_frame_has_an_input_for_each_column(harness: Harness, selector: bool) -> None:
    pipeline, table = data_frame_pipeline(harness, selector)
    completed = SklearnBackend().complete_config({"name": "m"}, harness.root / "m" / "1", {})
    assert {each["name"]: each["data_type"] for each in completed["input"]} == {
        "age of client": "TYPE_FP64",
        "income": "TYPE_FP64",
        "city": "TYPE_STRING",
        "floor": "TYPE_INT64",
        "note": "TYPE_STRING",
        "member": "TYPE_FP64",
    }
    assert all(each["dims"] == [1] for each in completed["input"])
    model = load(harness, SklearnBackend())
    known = table.fillna({"city": "?"})
    rows: dict[str, Any] = {
        name: np.array(
            [[each.encode() if isinstance(each, str) else each] for each in known[name]],
            object if each["data_type"] == "TYPE_STRING" else NUMPY_DTYPES[each["data_type"][5:]],
        )
        for name, each in ((each["name"], each) for each in completed["input"])
    }
    response = harness.infer(model, rows).one
    assert response.error is None, response.error
    found = {each.name: each.numpy() for each in response.outputs}
    assert found["predict"].ravel().tolist() == [each.encode() for each in pipeline.predict(known)]
    np.testing.assert_array_equal(found["predict_proba"], pipeline.predict_proba(known))


def test_columns_of_numbers_come_as_rows_unless_the_config_names_them(harness: Harness) -> None:
    import pandas as pd
    import skops.io
    from sklearn.linear_model import LinearRegression

    table = pd.DataFrame({"a": [1.0, 2, 3], "b": [1.0, 0, 1]})
    model = LinearRegression().fit(table, [1.0, 2, 3])
    skops.io.dump(model, harness.directory("m", {}) / "1" / "model.skops")
    directory = harness.root / "m" / "1"
    completed = SklearnBackend().complete_config({"name": "m"}, directory, {})
    assert completed["input"] == [{"name": "input", "data_type": "TYPE_FP64", "dims": [2]}]
    named = {"name": "m", "input": [{"name": "a", "data_type": "TYPE_INT32"}, {"name": "b"}]}
    completed = SklearnBackend().complete_config(named, directory, {})
    assert completed["input"] == [
        {"name": "a", "data_type": "TYPE_INT32", "dims": [1]},
        {"name": "b", "data_type": "TYPE_FP64", "dims": [1]},
    ]
    loaded = harness.load(SklearnBackend(), spec_of(harness, completed))
    rows: dict[str, Any] = {"a": np.array([[5]], np.int32), "b": np.array([[0.5]])}
    expected = model.predict(pd.DataFrame({"a": [5], "b": [0.5]}))
    np.testing.assert_array_equal(harness.infer(loaded, rows).array("predict"), expected[:, None])


def test_a_pipeline_of_a_data_frame_needs_pandas(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    data_frame_pipeline(harness, False)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        UnavailableError, match=r"columns by name needs the Python package 'pandas', .* `pip install pandas`"
    ):
        load(harness, SklearnBackend())


def test_a_config_may_have_the_other_kind_of_float(harness: Harness) -> None:
    estimator = sklearn_model(
        "GradientBoostingClassifier", "binary", harness.directory("m", {}) / "1" / "model.skops"
    )
    config = config_of() | {
        "input": [{"name": "input", "data_type": "TYPE_FP32"}],
        "output": [{"name": "predict_proba", "data_type": "TYPE_FP32"}, {"name": "margin"}],
    }
    backend = SklearnBackend()
    completed = backend.complete_config(config, harness.root / "m" / "1", {})
    found = answers(harness, harness.load(backend, spec_of(harness, completed)), CLEAN)
    np.testing.assert_array_equal(found["predict_proba"], estimator.predict_proba(CLEAN).astype(np.float32))
    assert [found[name].dtype.name for name in ("predict_proba", "margin")] == ["float32", "float64"]


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
    harness.infer(model, {"input": rows}, requested=("leaf",)).array("leaf")
    assert calls == [{"pred_leaf": True, "num_threads": 1}]
    harness.infer(model, {"input": rows}, requested=("predict", "predict_proba")).array("predict")
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
    (directory / "xgboost.json").write_text('{"learner": {}}')
    with pytest.raises(InternalError, match="can't be read as an XGBoost model in JSON: learner_model_param"):
        load(harness, XgboostBackend())
    skops.io.dump(LinearRegression(), directory / "model.skops")
    with pytest.raises(InvalidArgumentError, match=r"LinearRegression of '.*' is not fitted"):
        load(harness, SklearnBackend())
    lightgbm_model("binary", directory / "model.txt")
    tensors = tensor_specs(input=("FP32", (FEATURES,))), tensor_specs(probability=("FP64", (1,)))
    spec = harness.spec("m", *tensors, "", backend="lightgbm")
    with pytest.raises(InvalidArgumentError, match="allowed outputs are: contributions, leaf, margin"):
        LightgbmBackend().check(spec)
