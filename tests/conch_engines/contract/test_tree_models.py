"""Tree models as clients see them: found without a config, Triton's shapes, labels, steps of ensembles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.servers import client_of, serving, tensor
from tests.support.sklearn_estimators import trained
from tests.support.tree_models import FEATURES, gtil, samples, xgboost_model

from conch.core.tensor import Array

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 64
input { name: "ROWS" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "SCORE" data_type: TYPE_FP32 dims: [ 1 ] }
ensemble_scheduling { step {
  model_name: "raw" model_version: -1
  input_map { key: "input__0" value: "ROWS" } output_map { key: "output__0" value: "SCORE" }
} }
"""
RAW = 'backend: "fil" parameters { key: "is_classifier" value { string_value: "false" } }'
COLUMN = RAW + 'output { name: "output__0" data_type: TYPE_FP32 dims: [ 1 ] reshape: { shape: [ ] } }'
LABELS = """
backend: "fil"
output { name: "output__0" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels.txt" }
parameters { key: "predict_proba" value { string_value: "true" } }
"""
ESTIMATORS = {
    "texts": "TF-IDF, logistic regression",
    "columns": "columns: hashed texts, target encoder",
    "scaler": "StandardScaler",
    "labels": "LabelEncoder",
    "targets": "several classes of texts",
    "words": "one-hot array",
}
"""Models of scikit-learn, by their names in the table of all estimators."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trees")

    def directory(name: str, config: str = "") -> Path:
        version = root / name / "1"
        version.mkdir(parents=True)
        if config:
            (root / name / "config.pbtxt").write_text(config)
        return version

    import treelite

    xgboost_model("binary", directory("json") / "xgboost.json")
    xgboost_model("binary", directory("ubj") / "xgboost.ubj")
    forest = treelite.frontend.from_xgboost(xgboost_model("multi"))
    forest.serialize(directory("checkpoint") / "checkpoint.tl")
    xgboost_model("binary", directory("raw", RAW) / "xgboost.json")
    xgboost_model("binary", directory("column", COLUMN) / "xgboost.json")
    xgboost_model("multi", directory("labelled", LABELS) / "xgboost.json")
    (root / "labelled" / "labels.txt").write_text("low\nmiddle\nhigh\n")
    directory("ensemble", ENSEMBLE)
    import skops.io

    for name, model in ESTIMATORS.items():
        skops.io.dump(trained(model).estimator, directory(name) / "model.skops")
    return root


@pytest.fixture(scope="module")
def client(repository: Path) -> Iterator[Any]:
    with serving(repository) as server, client_of(server) as client:
        yield client


def scores(kind: str, rows: Array) -> Array:
    import treelite

    return gtil(treelite.frontend.from_xgboost(xgboost_model(kind)), rows)


def test_models_without_a_config_are_found_by_their_files(client: Any) -> None:
    rows = samples()[:5]
    for name in ("json", "ubj", "checkpoint"):
        config = client.get_model_config(name).config
        assert (config.backend, config.max_batch_size) == ("fil", 32768)
        assert list(config.input[0].dims) == [FEATURES]
        found = client.infer(name, [tensor("input__0", rows)]).as_numpy("output__0")
        multi, binary = scores("multi", rows).argmax(1), scores("binary", rows)[:, 0] > 0.5
        expected = multi if name == "checkpoint" else binary
        np.testing.assert_array_equal(found, expected)


def test_answers_have_no_dims_of_one(client: Any) -> None:
    """Triton's backend drops them, although the metadata has them; a reshape brings them back."""
    rows = samples()[:3]
    (output,) = client.get_model_metadata("raw").outputs
    assert list(output.shape) == [-1, 1]
    for count in (1, 3):
        found = client.infer("raw", [tensor("input__0", rows[:count])]).as_numpy("output__0")
        assert found.shape == (count,)
        np.testing.assert_array_equal(found, scores("binary", rows[:count])[:, 0])
        column = client.infer("column", [tensor("input__0", rows[:count])]).as_numpy("output__0")
        assert column.shape == (count, 1)


def test_a_forest_is_a_step_of_an_ensemble(client: Any) -> None:
    rows = samples()[:3]
    found = client.infer("ensemble", [tensor("ROWS", rows)]).as_numpy("SCORE")
    np.testing.assert_array_equal(found.reshape(-1), scores("binary", rows)[:, 0])


def test_classes_have_labels(client: Any) -> None:
    rows = samples()[:4]
    wanted = [triton.InferRequestedOutput("output__0", class_count=1)]
    found = client.infer("labelled", [tensor("input__0", rows)], outputs=wanted).as_numpy("output__0")
    best = scores("multi", rows).argmax(1)
    labels = [text.decode().split(":")[1:] for text in found[:, 0]]
    assert labels == [[str(each), ("low", "middle", "high")[each]] for each in best]


@pytest.mark.filterwarnings("ignore")  # of trainings that end early
@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_of_scikit_learn_answer_by_themselves(client: Any, name: str) -> None:
    model = trained(ESTIMATORS[name])
    inputs = [
        tensor(each, array, "BYTES" if array.dtype.kind == "O" else "FP64")
        for each, array in model.inputs.items()
    ]
    found = client.infer(name, inputs)
    outputs = [each.name for each in client.get_model_config(name).config.output]
    own = {each: array for output in model.methods for each, array in model.own(output).items()}
    assert outputs == [each for each in own if each.startswith("predict")] or outputs == ["transform"]
    for output in outputs:
        array = found.as_numpy(output)
        if array.dtype.kind == "O":
            array = np.array([each.decode() for each in array.ravel()]).reshape(array.shape)
            np.testing.assert_array_equal(array, own[output].astype(str))
        else:
            np.testing.assert_allclose(array, own[output], 1e-12)
