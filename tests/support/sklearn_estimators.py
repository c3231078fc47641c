"""Estimators and pipelines of scikit-learn trained on a small set, with the inputs of a request to each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Array
from conch_engines.trees.named_outputs import Offer
from conch_engines.trees.sklearn_backend import SklearnBackend

PAGE = Path(__file__).parents[2] / "docs" / "backends" / "sklearn-estimators.md"
"""Page of the table, which ``scripts/generate_estimators.py`` writes."""

METHODS = {
    "predict": "predict",
    "predict_proba": "predict_proba",
    "transform": "transform",
    "margin": "decision_function",
}
"""Outputs, and the method that each comes from."""

_ROWS = 40
_TEXTS = ("good day sun", "bad rain", "good sun tea", "rain and wind", "a good tea", "bad bad day")


@dataclass(frozen=True, slots=True)
class Trained:
    """A fitted estimator, rows as its methods take them, and the same rows as a request has them."""

    estimator: Any
    rows: Any
    inputs: dict[str, Array]

    @property
    def methods(self) -> list[str]:
        """Outputs that its class has a method for."""
        return [output for output, method in METHODS.items() if hasattr(self.estimator, method)]

    def own(self, output: str) -> dict[str, Array]:
        """The library's results of an output's method, a row each; several targets have an output each."""
        found = getattr(self.estimator, METHODS[output])(self.rows)
        parts = {f"{output}_{at}": each for at, each in enumerate(found)} if isinstance(found, list) else {}
        parts = parts or {output: found.toarray() if hasattr(found, "toarray") else found}
        return {name: np.asarray(each).reshape(len(self.rows), -1) for name, each in parts.items()}


@dataclass(frozen=True, slots=True)
class Served:
    """Row of the table: the model as the backend describes it, or the reason of a refusal."""

    name: str
    offer: Offer | None
    reason: str = ""
    own_types: bool = False

    @property
    def input(self) -> str:
        """Description of the inputs."""
        assert self.offer is not None
        if not self.offer.rows:
            return "columns of a DataFrame" if "x0" not in self.offer.columns else "columns `x0`, `x1`, ..."
        kind = {"BYTES": "text", "FP64": "number", "INT64": "whole number"}[self.offer.datatype]
        return kind if self.offer.features == 1 else f"row of {kind}s"

    @property
    def outputs(self) -> str:
        """The outputs, sorted as the methods are."""
        assert self.offer is not None
        return ", ".join(f"`{each}`" for each in self.offer.outputs if each != "leaf")


def served(name: str, estimator: Any, path: Path) -> Served:
    """Saves an estimator, and describes it as a load does."""
    import skops.io

    try:
        skops.io.dump(estimator, path)
    except skops.io.exceptions.UnsupportedTypeException:
        return Served(name, None, "skops can't write it")
    try:
        offer = SklearnBackend().describe(path, "sklearn", name, {})
    except InvalidArgumentError as error:
        text = str(error).partition(f"'{path}' ")[2]
        nothing = text.startswith("has no 'predict'")
        return Served(name, None, "no `predict` or `transform`" if nothing else "takes sets, dicts or images")
    return Served(name, offer, own_types=bool(skops.io.get_untrusted_types(file=path)))


def trained(name: str) -> Trained:
    """The estimator with a name of `all_estimators`, or of `PIPELINES`."""
    from sklearn.base import is_regressor

    estimator = PIPELINES[name]() if name in PIPELINES else _made(name)
    rows: Any = _ROWS_OF[name]() if name in _ROWS_OF else _table() if name in PIPELINES else numbers()
    target = _TARGETS.get(name, values if is_regressor(estimator) else classes)()
    if name in _OF_ROWS_ALONE:
        estimator.fit(rows)
    else:
        estimator.fit(rows, target)
    return Trained(estimator, rows, {} if name in _WITHOUT_TENSORS else request_of(rows))


def request_of(rows: Any) -> dict[str, Array]:
    """Inputs of a request: one of rows, texts or labels, or the columns of a DataFrame or of objects."""
    given = np.asarray(rows)
    given = given.reshape(len(given), -1)
    if hasattr(rows, "columns"):
        inputs = {str(name): rows[name].to_numpy().reshape(-1, 1) for name in rows}
    elif given.dtype.kind == "O" and not all(isinstance(each, str) for each in given[0]):
        inputs = {f"x{at}": np.array(given[:, [at]].tolist()) for at in range(given.shape[1])}
    else:
        inputs = {"input": given}
    return {name: _as_sent(each) for name, each in inputs.items()}


def _as_sent(array: Array) -> Array:
    if array.dtype.kind not in "OU":
        return array.astype(np.float64)
    found = np.empty(array.shape, object)
    found.reshape(-1)[:] = [each.encode() for each in array.reshape(-1).tolist()]
    return found


@cache
def numbers() -> Array:
    """Positive rows, as some estimators take no others."""
    return np.round(np.random.default_rng(7).uniform(0.1, 2, (_ROWS, 4)), 3)


def _score() -> Array:
    rows = numbers()
    score: Array = rows[:, 0] + rows[:, 1] * rows[:, 2]
    return score


def classes() -> Array:
    """A class of three for each row, as text."""
    return np.array(["low", "mid", "top"])[np.digitize(_score(), [1.6, 2.4])]


def values() -> Array:
    """A positive value for each row."""
    found: Array = _score() + numbers()[:, 3] ** 2 / 4
    return found


def _two_classes() -> Array:
    names = np.array(["no", "yes"])
    found: Array = names[(_score() > 2).astype(int)]
    return found


def _two_values() -> Array:
    return np.column_stack((values(), -_score()))


def _two_labels() -> Array:
    return np.column_stack((_score() > 2, numbers()[:, 3] > 1)).astype(int)


def _two_texts() -> Array:
    return np.column_stack((_two_classes(), classes()))


def _some_classes() -> Array:
    return np.where(numbers()[:, 3] > 1.7, -1, (_score() > 2).astype(int))


def _texts() -> list[str]:
    return [_TEXTS[number % len(_TEXTS)] for number in range(_ROWS)]


def _words() -> Array:
    return np.array([[each.split()[0], each.split()[-1]] for each in _texts()], object)


def _with_gaps() -> Array:
    rows = numbers().copy()
    rows[::5, 1] = rows[3::7, 2] = np.nan
    return rows


def _mixed() -> Array:
    return np.column_stack((_words()[:, 0], numbers()[:, :1].astype(object)))


def _table() -> Any:
    import pandas as pd

    return pd.DataFrame(
        {
            "size": numbers()[:, 0],
            "gaps": _with_gaps()[:, 1],
            "count": np.arange(_ROWS) % 3,
            "word": _words()[:, 0],
            "text": _texts(),
        }
    )


def _categories() -> Any:
    return _table().drop(columns="text").astype({"word": "category"})


_WITHOUT_TENSORS: dict[str, Callable[[], Any]] = {
    "DictVectorizer": lambda: [{each: 1} for each in _texts()],
    "FeatureHasher": lambda: [{each: 1} for each in _texts()],
    "MultiLabelBinarizer": lambda: [set(each.split()) for each in _texts()],
    "PatchExtractor": lambda: numbers().reshape(10, 4, 4),
}
"""Rows that no tensor is made of."""
_ROWS_OF: dict[str, Callable[[], Any]] = {
    **_WITHOUT_TENSORS,
    "CategoricalNB": lambda: np.floor(numbers() * 2),
    "ColumnTransformer": _table,
    "CountVectorizer": _texts,
    "HashingVectorizer": _texts,
    "IsotonicRegression": lambda: numbers()[:, 0],
    "KNNImputer": _with_gaps,
    "KernelCenterer": lambda: numbers()[:4] @ numbers()[:4].T,
    "LabelBinarizer": classes,
    "LabelEncoder": classes,
    "MissingIndicator": _with_gaps,
    "OneHotEncoder": _words,
    "OrdinalEncoder": _words,
    "Pipeline": _texts,
    "columns: categories, boosting": _categories,
    "SimpleImputer": _with_gaps,
    "TargetEncoder": _words,
    "TfidfVectorizer": _texts,
    "TF-IDF, logistic regression": _texts,
    "hashed texts, linear SVM": _texts,
    "TF-IDF, truncated SVD": _texts,
    "one-hot array": _words,
    "most frequent words": _words,
    "array of words and numbers": _mixed,
    "several classes of texts": numbers,
    "several classes of a forest": numbers,
    "transformed target": _with_gaps,
    "calibrated SVM": numbers,
    "fixed threshold": numbers,
    "logarithms": numbers,
    "numpy's logarithm": numbers,
    "scaled clusters": numbers,
}
_TARGETS: dict[str, Callable[[], Array]] = {
    **dict.fromkeys(
        ("FixedThresholdClassifier", "TunedThresholdClassifierCV", "fixed threshold"), _two_classes
    ),
    **dict.fromkeys(("SelfTrainingClassifier", "LabelPropagation", "LabelSpreading"), _some_classes),
    **dict.fromkeys(("MultiTaskElasticNet", "MultiTaskElasticNetCV", "MultiTaskLasso"), _two_values),
    **dict.fromkeys(("MultiTaskLassoCV", "RegressorChain", "MultiOutputRegressor"), _two_values),
    **dict.fromkeys(("PLSRegression", "PLSCanonical", "PLSSVD", "CCA"), _two_values),
    **dict.fromkeys(("ClassifierChain", "MultiOutputClassifier"), _two_labels),
    **dict.fromkeys(("several classes of texts", "several classes of a forest"), _two_texts),
}
_OF_ROWS_ALONE = ("LabelBinarizer", "LabelEncoder", "MultiLabelBinarizer")
_FEW: dict[str, Any] = {
    **{"n_estimators": 3, "max_iter": 20, "random_state": 0, "n_components": 2, "n_clusters": 3, "cv": 2},
    **{"n_quantiles": 9, "n_init": 1, "n_refinements": 1},
}
"""Parameters that keep trainings short, of the estimators that have them."""


def _made(name: str) -> Any:
    """An estimator with parameters that it needs, or that keep its training short."""
    from sklearn.utils import all_estimators

    if name in _parts():
        return _parts()[name]()
    estimator = dict(all_estimators())[name]()
    few = {key: value for key, value in _FEW.items() if key in estimator.get_params()}
    return estimator.set_params(**few | _PARAMETERS.get(name, {}))


_PARAMETERS: dict[str, dict[str, Any]] = {
    **{name: {"n_components": 1} for name in ("CCA", "PLSCanonical", "PLSSVD")},
    **{name: {"n_components": 3} for name in ("GaussianRandomProjection", "SparseRandomProjection")},
    **{f"HistGradientBoosting{kind}": {"max_iter": 2} for kind in ("Classifier", "Regressor")},
    **{f"RadiusNeighbors{kind}": {"radius": 9.0} for kind in ("Classifier", "Regressor")},
    **{name: {"alpha": 0.9} for name in ("SelectFdr", "SelectFpr", "SelectFwe")},
    "GenericUnivariateSelect": {"mode": "k_best", "param": 2},
    "HashingVectorizer": {"n_features": 16},
    "LocalOutlierFactor": {"novelty": True},
    "LogisticRegressionCV": {"Cs": 2},
    "NuSVC": {"nu": 0.1},
    "SelectKBest": {"k": 2},
    "SpectralBiclustering": {"n_best": 2},
    "TSNE": {"max_iter": 250, "perplexity": 5},
}


@cache
def _parts() -> dict[str, Callable[[], Any]]:
    """Estimators that hold others."""
    from sklearn import (
        compose,
        decomposition,
        ensemble,
        feature_selection,
        frozen,
        model_selection,
        multiclass,
        multioutput,
        pipeline,
        preprocessing,
        semi_supervised,
        svm,
    )
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, OrthogonalMatchingPursuitCV, Ridge

    logistic, ridge = LogisticRegression(), Ridge()
    grid = {"C": [0.5, 1.0]}
    classifiers = [("a", logistic), ("b", svm.SVC())]
    regressors = [("a", ridge), ("b", svm.SVR())]
    selection = {"n_features_to_select": 2}
    columns = [
        ("n", preprocessing.StandardScaler(), ["size"]),
        ("c", preprocessing.OneHotEncoder(), ["word"]),
        ("t", TfidfVectorizer(), "text"),
    ]
    return {
        "ClassifierChain": lambda: multioutput.ClassifierChain(logistic),
        "ColumnTransformer": lambda: compose.ColumnTransformer(columns),
        "FeatureUnion": lambda: pipeline.FeatureUnion(
            [("a", decomposition.PCA(2)), ("b", preprocessing.StandardScaler())]
        ),
        "FixedThresholdClassifier": lambda: model_selection.FixedThresholdClassifier(logistic, threshold=0.3),
        "FrozenEstimator": lambda: frozen.FrozenEstimator(LogisticRegression().fit(numbers(), classes())),
        "GridSearchCV": lambda: model_selection.GridSearchCV(logistic, grid, cv=2),
        "MultiOutputClassifier": lambda: multioutput.MultiOutputClassifier(logistic),
        "MultiOutputRegressor": lambda: multioutput.MultiOutputRegressor(ridge),
        "OneVsOneClassifier": lambda: multiclass.OneVsOneClassifier(logistic),
        "OneVsRestClassifier": lambda: multiclass.OneVsRestClassifier(logistic),
        "OrthogonalMatchingPursuitCV": lambda: OrthogonalMatchingPursuitCV(max_iter=3, cv=2),
        "OutputCodeClassifier": lambda: multiclass.OutputCodeClassifier(logistic, random_state=0),
        "Pipeline": lambda: pipeline.make_pipeline(TfidfVectorizer(), logistic),
        "RFE": lambda: feature_selection.RFE(logistic, **selection),
        "RFECV": lambda: feature_selection.RFECV(logistic, cv=2),
        "RandomizedSearchCV": lambda: model_selection.RandomizedSearchCV(logistic, grid, n_iter=2, cv=2),
        "RegressorChain": lambda: multioutput.RegressorChain(ridge),
        "SelectFromModel": lambda: feature_selection.SelectFromModel(logistic),
        "SelfTrainingClassifier": lambda: semi_supervised.SelfTrainingClassifier(logistic),
        "SequentialFeatureSelector": lambda: feature_selection.SequentialFeatureSelector(
            logistic, cv=2, **selection
        ),
        "SparseCoder": lambda: decomposition.SparseCoder(np.eye(4)),
        "StackingClassifier": lambda: ensemble.StackingClassifier(classifiers, cv=2),
        "StackingRegressor": lambda: ensemble.StackingRegressor(regressors, cv=2),
        "TunedThresholdClassifierCV": lambda: model_selection.TunedThresholdClassifierCV(logistic, cv=2),
        "VotingClassifier": lambda: ensemble.VotingClassifier(
            [("a", logistic), ("b", LogisticRegression(C=9))], voting="soft"
        ),
        "VotingRegressor": lambda: ensemble.VotingRegressor(regressors),
    }


def _pipelines() -> dict[str, Callable[[], Any]]:
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.cluster import KMeans
    from sklearn.compose import TransformedTargetRegressor, make_column_selector, make_column_transformer
    from sklearn.decomposition import TruncatedSVD
    from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestClassifier
    from sklearn.feature_extraction.text import HashingVectorizer, TfidfVectorizer
    from sklearn.impute import KNNImputer, SimpleImputer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.model_selection import FixedThresholdClassifier, StratifiedKFold
    from sklearn.multioutput import MultiOutputClassifier
    from sklearn.pipeline import make_pipeline, make_union
    from sklearn.preprocessing import (
        FunctionTransformer,
        OneHotEncoder,
        OrdinalEncoder,
        PowerTransformer,
        QuantileTransformer,
        StandardScaler,
        TargetEncoder,
    )
    from sklearn.svm import LinearSVC

    def by_columns(*, text: Any, word: Any) -> Any:
        scaled = make_pipeline(SimpleImputer(add_indicator=True), StandardScaler())
        return make_column_transformer(
            (text, "text"), (word, ["word"]), (scaled, ["size", "gaps"]), remainder="passthrough"
        )

    one_hot = OneHotEncoder(handle_unknown="ignore")
    filled = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder())
    return {
        "TF-IDF, logistic regression": lambda: make_pipeline(TfidfVectorizer(), LogisticRegression()),
        "hashed texts, linear SVM": lambda: make_pipeline(HashingVectorizer(n_features=64), LinearSVC()),
        "TF-IDF, truncated SVD": lambda: make_pipeline(TfidfVectorizer(), TruncatedSVD(2, random_state=0)),
        "columns: TF-IDF, one-hot, imputer": lambda: make_pipeline(
            by_columns(text=TfidfVectorizer(), word=one_hot), LogisticRegression()
        ),
        "columns: hashed texts, target encoder": lambda: make_pipeline(
            by_columns(text=HashingVectorizer(n_features=16), word=TargetEncoder(cv=StratifiedKFold(2))),
            LogisticRegression(),
        ),
        "columns: words filled, boosting": lambda: make_pipeline(
            make_column_transformer((OrdinalEncoder(), ["word"]), (KNNImputer(), ["gaps", "size"])),
            HistGradientBoostingRegressor(max_iter=3),
        ),
        "columns: categories, boosting": lambda: HistGradientBoostingRegressor(max_iter=3),
        "columns: most frequent words": lambda: make_pipeline(
            make_column_transformer(
                (filled, ["word"]), (StandardScaler(), make_column_selector("size|count")), remainder="drop"
            ),
            Ridge(),
        ),
        "one-hot array": lambda: make_pipeline(OneHotEncoder(), LogisticRegression()),
        "most frequent words": lambda: SimpleImputer(strategy="most_frequent"),
        "array of words and numbers": lambda: make_pipeline(
            make_column_transformer((one_hot, [0]), (StandardScaler(), [1])), Ridge()
        ),
        "several classes of texts": lambda: MultiOutputClassifier(LogisticRegression()),
        "several classes of a forest": lambda: RandomForestClassifier(3, random_state=0),
        "transformed target": lambda: TransformedTargetRegressor(
            make_pipeline(SimpleImputer(), Ridge()), transformer=QuantileTransformer(n_quantiles=9)
        ),
        "calibrated SVM": lambda: CalibratedClassifierCV(LinearSVC(), cv=2),
        "fixed threshold": lambda: FixedThresholdClassifier(LogisticRegression(), threshold=0.3),
        "logarithms": lambda: make_pipeline(PowerTransformer(method="box-cox"), Ridge()),
        "numpy's logarithm": lambda: make_pipeline(FunctionTransformer(np.log1p), Ridge()),
        "scaled clusters": lambda: make_pipeline(
            make_union(StandardScaler(), TruncatedSVD(2, random_state=0)), KMeans(3, n_init=1, random_state=0)
        ),
    }


PIPELINES = _pipelines()
"""Pipelines as data scientists make them, by their names in the table."""
