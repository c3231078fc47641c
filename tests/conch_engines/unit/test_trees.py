"""Backend `fil`: answers beside the libraries' own, parameters, completion, and files that it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import treelite
from tests.support.backend_harness import Harness, tensor_specs
from tests.support.tree_models import (
    FEATURES,
    OLD_XGBOOST,
    gtil,
    lightgbm_model,
    samples,
    sklearn_model,
    xgboost_model,
)
from treelite.sklearn import import_model

from conch.core.errors import (
    ConchError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
    UnsupportedError,
)
from conch.core.model_version import Model
from conch.core.spec import InstanceGroup, ModelSpec, TensorSpec
from conch.core.tensor import Array
from conch.protocol.model_config_pb2 import DataType
from conch_control.config.schema import WIRE_NAMES
from conch_engines.trees.fil_backend import FilBackend

SHAP_WIDTH = FEATURES + 1


@pytest.fixture(scope="module")
def backend() -> FilBackend:
    return FilBackend()


@pytest.fixture(autouse=True)
def count_no_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """scikit-learn's histogram trees count physical cores with a process of their own otherwise."""
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")


def spec_of(harness: Harness, config: dict[str, Any], backend: str = "fil", **changes: Any) -> ModelSpec:
    """The spec of a completed config."""
    inputs, outputs = (
        tuple(
            TensorSpec(each["name"], WIRE_NAMES[DataType.Value(each["data_type"])], tuple(each["dims"]))
            for each in config[key]
        )
        for key in ("input", "output")
    )
    parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
    file = config.get("default_model_filename", "")
    changes = {"max_batch_size": config["max_batch_size"], "parameters": parameters, **changes}
    return harness.spec("m", inputs, outputs, file, backend=backend, config=config, **changes)


def config_of(*outputs: str, **parameters: str) -> dict[str, Any]:
    given = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    return {"name": "m", "output": [{"name": name} for name in outputs], **given}


def load(harness: Harness, backend: FilBackend, config: dict[str, Any], **changes: Any) -> Model:
    completed = backend.complete_config(config, harness.root / "m" / "1", {})
    spec = spec_of(harness, completed, **changes)
    backend.check(spec)
    return harness.load(backend, spec)


def answers(harness: Harness, model: Model, rows: Array, *outputs: str) -> list[Array]:
    answer = harness.infer(model, {"input__0": rows})
    return [answer.array(name) for name in outputs or ("output__0",)]


Written = tuple[Any, Callable[[Array], Array]]


def written(path: Path, source: str, kind: str) -> Written:
    """Writes a model; returns it as treelite has it, and its own library's results in FP32."""
    if source == "xgboost.old":
        path.joinpath("xgboost.model").write_bytes(OLD_XGBOOST)
        old = treelite.frontend.load_xgboost_model_legacy_binary(path / "xgboost.model")
        return old, lambda rows: gtil(old, rows)
    if source.startswith("xgboost"):
        booster = xgboost_model(kind, path / source)
        return treelite.frontend.from_xgboost(booster), booster.inplace_predict
    if source == "model.txt":
        model = lightgbm_model(kind, path / source)
        return treelite.frontend.from_lightgbm(model), model.predict
    if source == "checkpoint.tl":
        forest = treelite.frontend.from_xgboost(xgboost_model(kind))
        forest.serialize(path / source)
        return forest, lambda rows: gtil(forest, rows)
    estimator = sklearn_model(source, kind, path / "model.skops")
    name = "predict" if kind == "regression" else "predict_proba"
    own = (
        (lambda rows: getattr(estimator, name)(rows)[:, -1:])
        if kind == "binary"
        else getattr(estimator, name)
    )
    return import_model(estimator), lambda rows: own(np.nan_to_num(rows))


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("xgboost.json", "binary"),
        ("xgboost.ubj", "multi"),
        ("xgboost.model", "regression"),  # UBJSON under the name of the old format
        ("xgboost.old", "binary"),
        ("model.txt", "binary"),
        ("model.txt", "multi"),
        ("model.txt", "regression"),
        ("checkpoint.tl", "multi"),
        ("RandomForestClassifier", "multi"),
        ("GradientBoostingClassifier", "binary"),
        ("HistGradientBoostingRegressor", "regression"),
    ],
)
def test_results_are_those_of_the_engine(
    harness: Harness, backend: FilBackend, source: str, kind: str
) -> None:
    directory = harness.directory("m", {}) / "1"
    forest, own = written(directory, source, kind)
    model = load(
        harness,
        backend,
        config_of(is_classifier="true" if kind == "multi" else "false", predict_proba="true"),
    )
    rows = np.nan_to_num(samples()) if source[0].isupper() else samples()
    (found,) = answers(harness, model, rows)
    expected = gtil(forest, rows).astype(np.float32)
    np.testing.assert_array_equal(found, expected if kind == "multi" else expected[:, 0])
    np.testing.assert_allclose(found.ravel(), own(rows).ravel(), 1e-6, 1e-6)


def test_large_batches_use_threads_with_the_same_results(harness: Harness, backend: FilBackend) -> None:
    xgboost_model("multi", harness.directory("m", {}) / "1" / "xgboost.ubj")
    config = config_of(is_classifier="false", cpu_nthread="2")
    model = load(harness, backend, config)
    rows = np.tile(samples(), (40, 1))
    (found,) = answers(harness, model, rows)
    for start in range(0, len(rows), 1000):
        (part,) = answers(harness, model, rows[start : start + 100])
        np.testing.assert_array_equal(found[start : start + 100], part)


@pytest.mark.parametrize("kind", ["binary", "multi"])
def test_classes_and_probabilities(harness: Harness, backend: FilBackend, kind: str) -> None:
    booster = xgboost_model(kind, harness.directory("m", {}) / "1" / "xgboost.json")
    scores = gtil(treelite.frontend.from_xgboost(booster), samples())

    def answer(dims: list[int] | None = None, **parameters: str) -> Array:
        config = config_of(**parameters)
        if dims:
            config["output"] = [{"name": "output__0", "dims": dims}]
        return answers(harness, load(harness, backend, config), samples())[0]

    if kind == "binary":
        threshold = float(scores[7, 0])  # a row at the threshold is of class 0
        found = answer(threshold=repr(threshold))
        np.testing.assert_array_equal(found, (scores[:, 0] > np.float32(threshold)).astype(np.float32))
        assert found[7] == 0 and found.any()
        np.testing.assert_array_equal(answer(predict_proba="true"), scores[:, 0])
        both = answer([2], predict_proba="true")
        np.testing.assert_array_equal(both, np.stack((1 - scores[:, 0], scores[:, 0]), 1))
    else:
        np.testing.assert_array_equal(answer(), scores.argmax(1).astype(np.float32))
        np.testing.assert_array_equal(answer([3], predict_proba="true"), scores)
        np.testing.assert_array_equal(answer([1, 3, 1], is_classifier="false"), scores)


def test_probabilities_of_one_against_all_are_made_by_softmax(harness: Harness, backend: FilBackend) -> None:
    path = harness.directory("m", {}) / "1" / "model.txt"
    booster = lightgbm_model("multi", path, objective="multiclassova")
    (found,) = answers(harness, load(harness, backend, config_of(predict_proba="true")), samples())
    margins = np.exp(booster.predict(samples(), raw_score=True))
    np.testing.assert_allclose(found, margins / margins.sum(1, keepdims=True), 1e-5)


def test_scores_not_above_zero_never_win_over_class_0(harness: Harness, backend: FilBackend) -> None:
    booster = xgboost_model("multi")
    forest = treelite.frontend.from_xgboost(booster)
    header = forest.get_header_accessor()
    header.set_field("postprocessor", "identity_multiclass")
    forest.serialize(harness.directory("m", {}) / "1" / "checkpoint.tl")
    scores = gtil(forest, samples())
    assert ((scores <= 0).all(1) & (scores.argmax(1) > 0)).any()
    (found,) = answers(harness, load(harness, backend, config_of()), samples())
    np.testing.assert_array_equal(found, np.where(scores.max(1) > 0, scores.argmax(1), 0))


def test_categories_and_missing_values(harness: Harness, backend: FilBackend) -> None:
    import lightgbm
    import xgboost

    random = np.random.default_rng(2)
    rows = random.standard_normal((400, 2), np.float32)
    rows[:, 0] = random.integers(0, 6, 400)
    truth = (rows[:, 0] % 3 == 0).astype(int)
    data = xgboost.DMatrix(rows, truth, feature_types=["c", "q"], enable_categorical=True)
    booster = xgboost.train({"objective": "binary:logistic", "max_cat_to_onehot": 1, "nthread": 1}, data, 4)
    settings = {"objective": "binary", "verbose": -1, "num_threads": 1, "min_data_per_group": 5}
    trees = lightgbm.train(settings, lightgbm.Dataset(rows, truth, categorical_feature=[0]), 4)
    assert "num_cat=1" in trees.model_to_string()
    rows[::7, 0] = np.nan
    rows[1::7, 0] = 77  # a category that training never saw
    directory = harness.directory("m", {}) / "1"
    booster.save_model(directory / "xgboost.json")
    (found,) = answers(harness, load(harness, backend, config_of(is_classifier="false")), rows)
    np.testing.assert_allclose(found, booster.inplace_predict(rows), 1e-6)
    (directory / "xgboost.json").unlink()
    trees.save_model(directory / "model.txt")
    (found,) = answers(harness, load(harness, backend, config_of(is_classifier="false")), rows)
    np.testing.assert_allclose(found, trees.predict(rows), 1e-6)


def test_completion(harness: Harness, backend: FilBackend) -> None:
    directory = harness.directory("m", {}) / "1"
    xgboost_model("binary", directory / "xgboost.model")
    config = backend.complete_config({"name": "m"}, directory, {})
    assert config == {
        "name": "m",
        "max_batch_size": 32768,
        "dynamic_batching": {},
        "input": [{"name": "input__0", "data_type": "TYPE_FP32", "dims": [FEATURES]}],
        "output": [{"name": "output__0", "data_type": "TYPE_FP32", "dims": [1]}],
        "parameters": {
            "model_type": {"string_value": "xgboost"},
            "is_classifier": {"string_value": "true"},
            "threshold": {"string_value": "0.5"},
        },
    }
    xgboost_model("multi", directory / "own.bin")
    given: dict[str, Any] = {
        "name": "m",
        "default_model_filename": "own.bin",
        "max_batch_size": 16,
        "sequence_batching": {},
        "input": [{"name": "input__0", "data_type": "TYPE_FP32", "dims": [9]}],
        "output": [{"name": "treeshap_output"}, {"name": "output__0", "dims": [3, 1]}],
        "parameters": {"output_class": {"string_value": "false"}},
    }
    config = backend.complete_config(given, directory, {})
    assert config["max_batch_size"] == 16 and "dynamic_batching" not in config
    assert config["input"][0]["dims"] == [9]
    shap, output = config["output"]
    assert shap == {"name": "treeshap_output", "data_type": "TYPE_FP32", "dims": [3, SHAP_WIDTH]}
    assert output == {"name": "output__0", "data_type": "TYPE_FP32", "dims": [3, 1]}
    assert config["parameters"] == {
        "output_class": {"string_value": "false"},
        "model_type": {"string_value": "xgboost_ubj"},
    }
    # Nothing is left out, so the file is not opened.
    whole = backend.complete_config(config | {"dynamic_batching": {}}, directory / "gone", {})
    assert whole["input"][0]["dims"] == [9]


def test_a_model_without_batching(harness: Harness, backend: FilBackend) -> None:
    booster = xgboost_model("binary", harness.directory("m", {}) / "1" / "xgboost.json")
    config = config_of(is_classifier="false")
    config["input"] = [{"name": "input__0", "dims": [-1, FEATURES]}]
    completed = backend.complete_config(config, harness.root / "m" / "1", {})
    assert "max_batch_size" not in completed and completed["output"][0]["dims"] == [-1, 1]
    model = harness.load(backend, spec_of(harness, completed | {"max_batch_size": 0}))
    (found,) = answers(harness, model, samples()[:3])
    np.testing.assert_array_equal(found, gtil(treelite.frontend.from_xgboost(booster), samples()[:3])[:, 0])


@pytest.mark.parametrize(
    ("parameters", "error", "text"),
    [
        ({"model_type": "onnx"}, UnsupportedError, "onnx not recognized as a valid serialization format."),
        (
            {"is_classifier": None},
            InvalidArgumentError,
            "Required parameter is_classifier not found in config",
        ),
        (
            {"is_classifier": "1"},
            InternalError,
            "Expected 'true' or 'false' for parameter 'is_classifier', got: '1'",
        ),
        (
            {"predict_proba": "yes"},
            InternalError,
            "Expected 'true' or 'false' for parameter 'predict_proba', got: 'yes'",
        ),
        ({"threshold": None}, InvalidArgumentError, "Required parameter threshold not found in config"),
        ({"threshold": "half"}, InvalidArgumentError, "Bad input for parameter threshold"),
        ({"layout": "flat"}, InvalidArgumentError, "Unknown nvForest layout name: flat"),
        ({"cpu_nthread": "many", "chunk_size": "x", "is_classifier": None, "output_class": "true"}, None, ""),
    ],
)
def test_parameters(
    harness: Harness,
    backend: FilBackend,
    parameters: dict[str, str | None],
    error: type[ConchError] | None,
    text: str,
) -> None:
    xgboost_model("binary", harness.directory("m", {}) / "1" / "xgboost.ubj")
    defaults = {"model_type": "xgboost_ubj", "is_classifier": "true", "threshold": "0.5"}
    merged = {key: value for key, value in {**defaults, **parameters}.items() if value is not None}
    tensors = tensor_specs(input__0=("FP32", (FEATURES,))), tensor_specs(output__0=("FP32", (1,)))
    spec = harness.spec("m", *tensors, "", backend="fil", parameters=merged)
    if error is None:
        backend.check(spec)
        return
    with pytest.raises(error) as caught:
        backend.check(spec)
    assert caught.value.message == text


def test_removed_parameters_are_named(
    harness: Harness, backend: FilBackend, caplog: pytest.LogCaptureFixture
) -> None:
    xgboost_model("binary", harness.directory("m", {}) / "1" / "xgboost.ubj")
    load(harness, backend, config_of(algo="ALGO_AUTO", output_class="true", storage_type="AUTO"))
    messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert messages == [
        "The `algo` parameter has been removed in 25.09 release. Use `layout` instead.",
        "The `output_class` parameter has been removed in 25.09 release. Use `is_classifier` instead.",
        "The `storage_type` parameter has been removed in 25.09 release.",
    ]


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (
            {"input": {"INPUT": ("FP32", (4,))}},
            "unexpected inference input 'INPUT', allowed inputs are: input__0",
        ),
        ({"input": {"input__0": ("FP64", (4,))}}, "unsupported datatype TYPE_FP64 for input 'input__0'"),
        ({"input": {"input__0": ("FP32", (5,))}}, "the model expects 2 dimensions (shape [-1,4])"),
        ({"output": {"OUTPUT__0": ("FP32", (1,))}}, "allowed outputs are: output__0, treeshap_output"),
        ({"output": {"output__0": ("FP32", (2,))}}, "the model expects 2 dimensions (shape [-1,1])"),
        ({"output": {"treeshap_output": ("FP32", (4,))}}, "the model expects 3 dimensions (shape [-1,1,5])"),
    ],
)
def test_tensors_that_are_not_the_models(
    harness: Harness,
    backend: FilBackend,
    tensors: dict[str, dict[str, tuple[str, tuple[int, ...]]]],
    text: str,
) -> None:
    xgboost_model("binary", harness.directory("m", {}) / "1" / "xgboost.json")
    inputs = tensors.get("input", {"input__0": ("FP32", (FEATURES,))})
    outputs = tensors.get("output", {"output__0": ("FP32", (1,))})
    parameters = {"model_type": "xgboost_json", "is_classifier": "false"}
    spec = harness.spec("m", tensor_specs(**inputs), tensor_specs(**outputs), "", parameters=parameters)
    with pytest.raises(ConchError) as caught:
        backend.check(spec)
    assert text in caught.value.message


def test_rows_of_another_length_do_not_reach_the_engine(harness: Harness, backend: FilBackend) -> None:
    xgboost_model("binary", harness.directory("m", {}) / "1" / "xgboost.json")
    config = config_of(is_classifier="false")
    config["input"] = [{"name": "input__0", "dims": [-1]}]
    model = load(harness, backend, config)
    error = harness.infer(model, {"input__0": samples()[:2, :3]}).error
    assert error == "input 'input__0' has shape [2, 3], and the model needs rows of 4 features"


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("library", "kind"), [("xgboost", "binary"), ("xgboost", "multi"), ("lightgbm", "multi")]
)
def test_contributions_add_up_to_the_margin(
    harness: Harness, backend: FilBackend, library: str, kind: str, flat: bool
) -> None:
    directory = harness.directory("m", {}) / "1"
    if library == "xgboost":
        booster = xgboost_model(kind, directory / "xgboost.json")
        margins = booster.inplace_predict(samples(), predict_type="margin")
    else:
        booster = lightgbm_model(kind, directory / "model.txt")
        margins = booster.predict(samples(), raw_score=True)
    classes = 1 if kind == "binary" else 3
    config = config_of("output__0", "treeshap_output")
    if flat:
        config["output"][1]["dims"] = [classes * SHAP_WIDTH]
    model = load(harness, backend, config)
    _, shap = answers(harness, model, samples(), "output__0", "treeshap_output")
    rest = (SHAP_WIDTH,) if classes == 1 else (classes * SHAP_WIDTH,) if flat else (classes, SHAP_WIDTH)
    assert shap.shape == (len(samples()), *rest) and shap.dtype == np.float32
    sums = shap.reshape(len(samples()), classes, SHAP_WIDTH).sum(-1)
    np.testing.assert_allclose(sums.ravel(), margins.ravel(), 1e-4, 1e-5)


def test_contributions_that_no_library_computes(harness: Harness, backend: FilBackend) -> None:
    treelite.frontend.from_xgboost(xgboost_model("binary")).serialize(
        harness.directory("m", {}) / "1" / "checkpoint.tl"
    )
    with pytest.raises(UnsupportedError, match="no 'treeshap_output' for a treelite checkpoint: XGBoost and"):
        load(harness, backend, config_of("treeshap_output"))


def test_files_of_other_types_are_named(harness: Harness, backend: FilBackend, tmp_path: Path) -> None:
    def refusal(
        name: str, content: bytes | None = None, error: type[ConchError] = InvalidArgumentError
    ) -> str:
        if content is not None:
            (directory / name).write_bytes(content)
        config = config_of(model_type="xgboost_json")
        if name:
            config["default_model_filename"] = name
        with pytest.raises(error) as caught:
            load(harness, backend, config)
        if name:
            (directory / name).unlink()
        return caught.value.message.replace(str(directory), "")

    directory = harness.directory("m", {}) / "1"
    assert refusal("", error=UnavailableError) == "unable to find '/xgboost.json' for model instance 'm'"
    lightgbm_model("binary", directory / "model.txt")
    assert refusal("model.txt") == (
        "unable to load model 'm': '/model.txt' is a LightGBM model, but parameter 'model_type' is "
        "'xgboost_json'; set it to 'lightgbm', or leave it out"
    )
    assert "a Python pickle, which can run any code" in refusal("model.pkl", b"\x80\x04\x95rest")
    assert 'which treelite does not read; serve it with backend "catboost"' in refusal("m.cbm", b"CBM1rest")
    assert "'/m.x' is of a kind that no tree backend reads" in refusal("m.x", b"what is this")
    (directory / "model.pkl").write_bytes(b"\x80\x04\x95rest")
    assert "a Python pickle" in refusal("")  # also where the config leads to no file


def test_a_file_that_is_cut_off_says_where(harness: Harness, backend: FilBackend) -> None:
    path = harness.directory("m", {}) / "1" / "xgboost.ubj"
    xgboost_model("binary", path)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(InternalError, match=r"as an XGBoost model in UBJSON: it ends too early"):
        load(harness, backend, config_of())


def test_skops_files_with_foreign_types_are_refused(harness: Harness, backend: FilBackend) -> None:
    import skops.io
    from sklearn.preprocessing import FunctionTransformer

    path = harness.directory("m", {}) / "1" / "model.skops"
    skops.io.dump(FunctionTransformer(written), path)
    with pytest.raises(
        InvalidArgumentError, match=r"types that could run code when they are loaded: .*written"
    ):
        load(harness, backend, config_of(is_classifier="false"))
    skops.io.dump(FunctionTransformer(), path)
    with pytest.raises(
        InvalidArgumentError, match=r"treelite can't convert FunctionTransformer .* backend 'sklearn'"
    ):
        load(harness, backend, config_of(is_classifier="false"))


def test_instances_of_kind_gpu_run_on_the_cpu(harness: Harness, backend: FilBackend) -> None:
    xgboost_model("binary", harness.directory("m", {}) / "1" / "xgboost.json")
    group = InstanceGroup("m_0", "GPU", 2, (0,))
    model = load(harness, backend, config_of(), instance_groups=(group,))
    assert answers(harness, model, samples())[0].shape == (len(samples()),)
    assert model.notes == (
        "model 'm': its instances of KIND_GPU run on the CPU, as backend 'fil' has no GPU engine",
    )


def test_instances_that_stay_keep_the_forest(harness: Harness, backend: FilBackend) -> None:
    xgboost_model("binary", harness.directory("m", {}) / "1" / "xgboost.json")
    config = backend.complete_config(config_of(), harness.root / "m" / "1", {})
    spec = spec_of(harness, config, instance_groups=(InstanceGroup("m_0", count=3),))
    model = harness.load(backend, spec)
    fewer = spec_of(harness, config, instance_groups=(InstanceGroup("m_0", count=1),))
    resize = model.prepare_resize(fewer)
    resize.commit()
    resize.finish()
    assert answers(harness, model, samples())[0].shape == (len(samples()),)


def test_several_targets_are_refused(harness: Harness, backend: FilBackend) -> None:
    import xgboost

    both = np.stack((samples()[:, 0], samples()[:, 1]), 1)
    data = xgboost.DMatrix(samples(), np.nan_to_num(both))
    xgboost.train({"nthread": 1}, data, 2).save_model(harness.directory("m", {}) / "1" / "xgboost.json")
    with pytest.raises(InvalidArgumentError, match="Multi-target model not supported"):
        load(harness, backend, config_of())


def test_a_warning_of_treelite_is_not_the_reason_of_an_error(harness: Harness, backend: FilBackend) -> None:
    path = harness.directory("m", {}) / "1" / "xgboost.json"
    xgboost_model("binary", path)
    document = json.loads(path.read_bytes())
    document["learner"] |= {"unknown": 1, "objective": {"name": "binary:of_mine"}}
    path.write_text(json.dumps(document))
    with pytest.raises(InternalError, match="Unrecognized XGBoost objective"):
        load(harness, backend, config_of(xgboost_allow_unknown_field="true"))


def test_contributions_of_vectors_are_refused(harness: Harness, backend: FilBackend) -> None:
    path = harness.directory("m", {}) / "1" / "xgboost.ubj"
    xgboost_model("multi", path, multi_strategy="multi_output_tree")
    with pytest.raises(UnsupportedError, match="no 'treeshap_output' for leaves with a value for each class"):
        load(harness, backend, config_of("treeshap_output"))
