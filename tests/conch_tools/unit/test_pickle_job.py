"""The job of `conch convert` and its comparison, without the sandbox: the pickles are the tests' own."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import pytest
import sklearn
from tests.support.sklearn_estimators import PIPELINES, trained

from conch_testing.loaded_model import LoadedModel, load
from conch_tools.convert.answer_comparison import compare
from conch_tools.convert.model_folder import write_model
from conch_tools.convert.pickle_job import RefusedError, convert, sklearn_version


class Exploding:
    """An object that can't be unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it was unpickled",)


COMPRESSIONS: dict[str, Callable[[Any, Path], object]] = {
    "pickle": lambda what, path: path.write_bytes(pickle.dumps(what)),
    "protocol 0": lambda what, path: path.write_bytes(pickle.dumps(what, 0)),
    "protocol 2": lambda what, path: path.write_bytes(pickle.dumps(what, 2)),
    "gzip": lambda what, path: path.write_bytes(gzip.compress(pickle.dumps(what))),
    "bz2": lambda what, path: path.write_bytes(bz2.compress(pickle.dumps(what))),
    "xz": lambda what, path: path.write_bytes(lzma.compress(pickle.dumps(what))),
    "joblib": joblib.dump,
    "joblib zlib": lambda what, path: joblib.dump(what, path, compress=("zlib", 3)),
    "joblib lzma": lambda what, path: joblib.dump(what, path, compress=("lzma", 3)),
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_versions_are_found_without_unpickling(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "m.pkl"
    COMPRESSIONS[compression]((Exploding(), trained("Ridge").estimator), path)
    assert sklearn_version(str(path)) == sklearn.__version__
    COMPRESSIONS[compression]([1], path)
    assert sklearn_version(str(path)) == ""


def test_a_version_is_found_across_chunks(tmp_path: Path) -> None:
    tail = pickle.dumps(trained("Ridge").estimator)
    at = tail.index(b"_sklearn_version")
    for start in (at + 5, at + 18):
        (tmp_path / "m.pkl").write_bytes(bytes((1 << 17) - start) + tail)
        assert sklearn_version(str(tmp_path / "m.pkl")) == sklearn.__version__


def converted(model: Any, folder: Path, data: Path | None = None) -> dict[str, Any]:
    """Converts a model as the command does, but in this process; the folder has model ``m`` then."""
    source = folder / "model.joblib"
    joblib.dump(model, source)
    job = {"source": str(source), "data": str(data or ""), "rows": 50}
    facts, content = convert(job)
    (folder / "content").write_bytes(content)
    facts = dict(json.loads(json.dumps(facts)))
    write_model(folder / "m", folder / "content", facts, [], data is not None)
    return facts


def checked(folder: Path, facts: dict[str, Any]) -> dict[str, int]:
    """Number of rows that differ, by output."""
    with load(folder / "m") as model:
        return differing(model, facts)


def differing(model: LoadedModel, facts: dict[str, Any]) -> dict[str, int]:
    return {each.output: len(each.differing) for each in compare(model, facts, None)}


@pytest.mark.filterwarnings("ignore")  # of trainings that end early
@pytest.mark.parametrize("name", PIPELINES)
def test_made_rows_are_predicted_alike(tmp_path: Path, name: str) -> None:
    facts = converted(trained(name).estimator, tmp_path)
    texts = [each["values"] for each in facts["rows"].values() if each["type"] == "text"]
    several = all(len({*values}) > 1 for values in texts)
    assert several or name == "most frequent words", "rows of one text would show little"
    output, prediction = next(iter(facts["predictions"].items()))
    changed = prediction["values"][-1]
    others: dict[type, Any] = {str: "other"}
    if not isinstance(changed, str):
        others = {float: changed + 1e-9, int: changed + 1}
    with load(tmp_path / "m") as model:
        found = differing(model, facts)
        prediction["values"][-1] = others[type(changed)]
        assert differing(model, facts)[output] == 1
    assert found
    assert not any(found.values()), found


def booster(library: str) -> Any:
    """A classifier of texts as classes, trained on numbers, one of which may be missing."""
    rows, target = trained("transformed target").rows, trained("RidgeClassifier").estimator
    labels = target.predict(trained("RidgeClassifier").rows)
    if library == "xgboost":
        import xgboost

        return xgboost.XGBClassifier(n_estimators=3, n_jobs=1).fit(rows, labels == "low")
    if library == "lightgbm":
        import lightgbm

        return lightgbm.LGBMClassifier(n_estimators=3, verbose=-1, n_jobs=1).fit(rows, labels)
    catboost = pytest.importorskip("catboost")
    settings = {"iterations": 3, "verbose": 0, "allow_writing_files": False, "thread_count": 1}
    return catboost.CatBoostClassifier(**settings).fit(rows, labels)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["xgboost", "lightgbm", "catboost"])
def test_boosters_get_their_own_files(tmp_path: Path, library: str) -> None:
    facts = converted(booster(library), tmp_path)
    assert facts["kind"] == library
    assert checked(tmp_path, facts) == {"predict": 0, "predict_proba": 0}
    config = (tmp_path / "m" / "config.pbtxt").read_text()
    assert ("labels.txt" in config) == (library == "lightgbm")


@pytest.mark.filterwarnings("ignore")
def test_numbers_of_catboost_are_floats_where_the_data_has_whole_ones(tmp_path: Path) -> None:
    """Its file does not tell of types, and the model would refuse 2.5 ever after."""
    model = booster("catboost")
    names = model.feature_names_
    data = tmp_path / "data.csv"
    data.write_text("".join(f"{','.join(line)}\n" for line in (names, ["1"] * len(names))))
    facts = converted(model, tmp_path, data)
    assert checked(tmp_path, facts) == {"predict": 0, "predict_proba": 0}
    config = (tmp_path / "m" / "config.pbtxt").read_text()
    assert config.count("TYPE_FP64") == len(names)


@pytest.mark.filterwarnings("ignore")
def test_boosters_without_a_class_of_scikit_learn(tmp_path: Path) -> None:
    for library, outputs in (("xgboost", {"predict_proba": 0}), ("lightgbm", {"predict_proba": 0})):
        made = booster(library)
        raw = made.get_booster() if library == "xgboost" else made.booster_
        folder = tmp_path / library
        folder.mkdir()
        facts = converted(raw, folder)
        facts["predictions"] = {"predict": facts["predictions"]["predict"]}
        assert checked(folder, facts) == outputs


def table(**files: str) -> Callable[[Path], Path]:
    """A function that writes a file of the data; its suffix is the keyword."""

    def write(folder: Path) -> Path:
        (suffix, text), *_ = files.items()
        path = folder / f"data.{suffix}"
        path.write_text(text)
        return path

    return write


HEADER = "word,size,gaps,count,text,more\n"
GOOD: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "csv": (
        table(csv=HEADER + "good,1,,2,NA,x\nbad,1e-300,3.5,0,007,y\n,1,1,1,a,z\n"),
        {"word": ["good", "bad"], "size": [1, 1e-300], "gaps": [None, 3.5], "text": ["NA", "007"]},
    ),
    "json": (
        table(json='[{"word": "good", "size": 0.1, "gaps": null, "count": 9, "text": "ä"}]'),
        {"word": ["good"], "size": [0.1], "gaps": [None], "count": [9], "text": ["ä"]},
    ),
    "jsonl": (
        table(jsonl='{"count": 1, "text": "a", "size": 2, "word": "bad", "gaps": 1}\n'),
        {"word": ["bad"], "size": [2], "gaps": [1]},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", GOOD)
def test_data_is_read_by_what_the_model_knows(tmp_path: Path, kind: str) -> None:
    write, expected = GOOD[kind]
    model = trained("columns: TF-IDF, one-hot, imputer").estimator
    facts = converted(model, tmp_path, write(tmp_path))
    assert {name: facts["rows"][name]["values"] for name in expected} == expected
    assert facts["dropped"] == (kind == "csv")
    assert not any(checked(tmp_path, facts).values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("write", "text"),
    [
        (
            table(csv="word,size\ngood,1\n"),
            "--data has no column gaps, count, text; its columns are word, size",
        ),
        (table(csv=HEADER + "good,big,1,1,a,x\n"), "--data has 'big' in column size, where the model takes"),
        (table(csv=HEADER + "good,1,1\n"), "--data has 3 fields in row 0, not 6"),
        (table(csv=HEADER + ",1,1,1,a,x\n"), "no row has a value in each column of texts"),
        (table(json='[{"word": "a", "size": [1], "gaps": 1, "count": 1, "text": "a"}]'), "one value belongs"),
        (table(json='[{"word": 0, "size": 1, "gaps": 1, "count": 1, "text": "a"}]'), "has 0 in column word"),
        (
            table(json='[{"word": 3, "size": 1, "gaps": 1, "count": 1, "text": "a"}]'),
            "--data has 3 in column wo",
        ),
        (table(json='{"word": ["good"]}'), "--data is no JSON list of objects"),
        (table(txt=""), r"must end with \.csv"),
    ],
)
def test_data_that_can_not_be_meant_is_refused(
    tmp_path: Path, write: Callable[[Path], Path], text: str
) -> None:
    with pytest.raises(RefusedError, match=text):
        converted(trained("columns: TF-IDF, one-hot, imputer").estimator, tmp_path, write(tmp_path))


def category_booster() -> Any:
    import pandas as pd
    import xgboost

    frame = pd.DataFrame({"c": pd.Categorical(list("abab")), "n": [1.0, 2, 3, 4]})
    return xgboost.XGBRegressor(n_estimators=1, enable_categorical=True).fit(frame, frame["n"])


def zero_booster() -> Any:
    import xgboost

    return xgboost.XGBRegressor(n_estimators=1, missing=0.0).fit([[1.0], [2]], [1, 2])


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: {"a": 1}, r"holds a builtins\.dict, which has no 'predict'"),
        (lambda: trained("Birch").estimator, "skops can't write it"),
        (category_booster, "trained on categories of a DataFrame"),
        (zero_booster, r"its missing values are 0\.0, not NaN"),
    ],
)
def test_models_that_are_not_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Callable[[], Any], text: str
) -> None:
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")  # joblib's, which starts a process to count cores
    with pytest.raises(RefusedError, match=text):
        converted(model(), tmp_path)


@pytest.mark.parametrize(("cells", "values"), [("true False", [True, False]), ("1 0", [1, 0])])
def test_bools_are_read_where_a_column_has_nothing_else(
    tmp_path: Path, cells: str, values: list[Any]
) -> None:
    from sklearn.linear_model import LinearRegression

    (tmp_path / "data.csv").write_text("\n".join(["a", *cells.split()]))
    facts = converted(LinearRegression().fit([[0.0], [1]], [0, 1]), tmp_path, tmp_path / "data.csv")
    assert facts["rows"]["x0"]["values"] == values
    assert not any(checked(tmp_path, facts).values())


def test_infinity_and_nothing_survive_json(tmp_path: Path) -> None:
    from sklearn.preprocessing import FunctionTransformer

    (tmp_path / "data.csv").write_text("a,b\ninf,\n-inf,1\n")
    model = FunctionTransformer().fit([[1.0, 2.0]])
    facts = converted(model, tmp_path, tmp_path / "data.csv")
    assert facts["rows"]["x0"]["values"] == ["inf", "-inf"]
    assert math.isnan(float("nan") if facts["rows"]["x1"]["values"][0] is None else 0)
    assert checked(tmp_path, facts) == {"transform": 0}
