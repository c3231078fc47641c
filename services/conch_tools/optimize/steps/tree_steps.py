"""Steps of models of trees, and of scikit-learn: to treelite and to ONNX.

The originals' outputs have the names that conch's backends give them: ``predict`` and ``predict_proba``.
"""

from __future__ import annotations

import json
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from conch_tools.optimize.steps.step_main import Arrays, Job, Opened

INPUT, PREDICT, PREDICT_PROBA = "input", "predict", "predict_proba"
_CHECKPOINT = "checkpoint.tl"
_ONNX_FILE = "model.onnx"
_CLASSIFIES = ("binary:logistic", "multi:softprob", "multi:softmax")
_CLASSIFIES_LIGHTGBM = ("binary", "multiclass", "multiclassova")
_DATATYPES = {"f": "FP64", "i": "INT64", "u": "INT64", "b": "BOOL", "U": "BYTES", "S": "BYTES", "O": "BYTES"}
_ONNX_DATATYPES = {1: "FP32", 7: "INT64", 8: "BYTES", 11: "FP64"}
_TRUSTED = frozenset(
    {
        "builtins.object",
        "numpy.dtype",
        "sklearn.compose._column_transformer.make_column_selector",
        "sklearn.tree._tree.Tree",
        "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
        "sklearn.ensemble._hist_gradient_boosting.binning._BinMapper",
    }
)
"""Types that run no code though skops does not trust them: those of trees and columns."""


def keep(job: Job) -> None:
    """Copies the original."""
    shutil.copyfile(job.source, job.folder / job.options["file"])


def open_sklearn(job: Job) -> Opened:
    """Opens an estimator with one thread."""
    estimator = _estimator(job)
    features = getattr(estimator, "n_features_in_", None)
    if features is None or not hasattr(estimator, "predict"):
        raise ValueError(f"{type(estimator).__name__} is not fitted, or has no 'predict'")
    jobs = [name for name in estimator.get_params() if name.split("__")[-1] == "n_jobs"]
    estimator.set_params(**dict.fromkeys(jobs, 1))
    methods = [name for name in (PREDICT, PREDICT_PROBA) if hasattr(estimator, name)]

    def run(arrays: Arrays) -> Arrays:
        rows = arrays[INPUT]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rows without the names of a DataFrame
            found = {name: np.asarray(getattr(estimator, name)(rows)) for name in methods}
        return {name: _typed(array).reshape(len(rows), -1) for name, array in found.items()}

    try:
        example = run({INPUT: np.zeros((1, features))})
    except ValueError as error:
        raise ValueError(
            f"{type(estimator).__name__} can't predict rows of {features} numbers: {error}"
        ) from error
    return _signature(int(features), "FP64", example), run


def open_xgboost(job: Job) -> Opened:
    """Opens a booster of XGBoost with one thread."""
    booster = _xgboost(job)
    classifies = _objective(booster) in _CLASSIFIES
    if classifies and _objective(booster) == "multi:softmax":
        booster.set_param({"objective": "multi:softprob"})  # probabilities instead of classes

    def run(arrays: Arrays) -> Arrays:
        values = booster.inplace_predict(arrays[INPUT], validate_features=False, strict_shape=True)
        return _named(values, classifies)

    features = booster.num_features()
    return _signature(features, "FP32", run({INPUT: np.zeros((1, features), np.float32)})), run


def open_lightgbm(job: Job) -> Opened:
    """Opens a booster of LightGBM with one thread."""
    booster = _lightgbm(job)
    classifies = _lightgbm_classifies(booster)

    def run(arrays: Arrays) -> Arrays:
        rows = arrays[INPUT]
        return _named(booster.predict(rows, num_threads=1).reshape(len(rows), -1), classifies)

    features = booster.num_feature()
    return _signature(features, "FP64", run({INPUT: np.zeros((1, features))})), run


def sklearn_to_treelite(job: Job) -> dict[str, Any]:
    """Writes a checkpoint of a forest, or of gradient boosting."""
    import treelite

    estimator = _estimator(job)
    try:
        return _checkpoint(treelite.sklearn.import_model(estimator), job)
    except (NotImplementedError, treelite.TreeliteError) as error:
        name = type(estimator).__name__
        raise NotImplementedError(f"treelite reads forests and gradient boosting, no {name}") from error


def xgboost_to_treelite(job: Job) -> dict[str, Any]:
    """Writes a checkpoint of a booster of XGBoost."""
    import treelite

    form = (
        "json" if job.source.read_bytes()[:2].strip() not in (b"{L", b"{i", b"{I", b"{l", b"{U") else "ubjson"
    )
    return _checkpoint(treelite.frontend.load_xgboost_model(str(job.source), format_choice=form), job)


def lightgbm_to_treelite(job: Job) -> dict[str, Any]:
    """Writes a checkpoint of a booster of LightGBM."""
    import treelite

    return _checkpoint(treelite.frontend.load_lightgbm_model(str(job.source)), job)


def sklearn_to_onnx(job: Job) -> dict[str, Any]:
    """Converts an estimator or a pipeline by skl2onnx."""
    import skl2onnx
    from skl2onnx.common.data_types import FloatTensorType

    estimator = _estimator(job)
    options = {id(estimator): {"zipmap": False}} if hasattr(estimator, PREDICT_PROBA) else None
    inputs = [(INPUT, FloatTensorType([None, estimator.n_features_in_]))]
    return _onnx(skl2onnx.to_onnx(estimator, initial_types=inputs, options=options), job)


def xgboost_to_onnx(job: Job) -> dict[str, Any]:
    """Converts a booster of XGBoost by onnxmltools."""
    import onnxmltools
    from onnxmltools.convert.common.data_types import FloatTensorType

    booster = _xgboost(job)
    booster.feature_names = None  # the converter wants none, or f0, f1, ...
    inputs = [(INPUT, FloatTensorType([None, booster.num_features()]))]
    return _onnx(onnxmltools.convert_xgboost(booster, initial_types=inputs), job)


def lightgbm_to_onnx(job: Job) -> dict[str, Any]:
    """Converts a booster of LightGBM by onnxmltools."""
    import onnxmltools
    from onnxmltools.convert.common.data_types import FloatTensorType

    booster = _lightgbm(job)
    inputs = [(INPUT, FloatTensorType([None, booster.num_feature()]))]
    return _onnx(onnxmltools.convert_lightgbm(booster, initial_types=inputs, zipmap=False), job)


def _checkpoint(model: Any, job: Job) -> dict[str, Any]:
    """Saves a model of treelite; tells what the backend ``fil`` makes of it."""
    model.serialize(str(job.folder / _CHECKPOINT))
    outputs = {each["name"]: each for each in job.signature["outputs"]}
    classifies = PREDICT_PROBA in outputs
    stands_for = outputs[PREDICT_PROBA if classifies else PREDICT]
    output: dict[str, Any] = {
        "name": "output__0",
        "datatype": "FP32",
        "dims": stands_for["dims"],
        "reference": stands_for["name"],
    }
    if stands_for["dims"] == [1]:
        output["reshape"] = []  # as in Triton, answers have no dims of 1
    (given,) = job.signature["inputs"]
    parameters = {"model_type": "treelite_checkpoint", "is_classifier": str(classifies).lower()}
    if classifies:
        parameters |= {"predict_proba": "true", "threshold": "0.5"}
    return {
        "inputs": [{**given, "name": "input__0", "datatype": "FP32", "reference": given["name"]}],
        "outputs": [output],
        "parameters": parameters,
    }


def _onnx(model: Any, job: Job) -> dict[str, Any]:
    """Saves an ONNX model; tells which outputs stand for which."""
    import onnx

    originals = {each["name"]: each for each in job.signature["outputs"]}
    outputs = []
    for value in model.graph.output:
        kind = value.type.tensor_type
        datatype = _ONNX_DATATYPES.get(kind.elem_type)
        rank = len(kind.shape.dim)
        kind.shape.dim[0].dim_param = "N"  # some converters write 1, though any number of rows comes
        scores = PREDICT_PROBA in originals and datatype in ("FP32", "FP64")
        stands_for = originals[PREDICT_PROBA if scores else PREDICT]
        output = {
            "name": value.name,
            "datatype": datatype,
            "dims": stands_for["dims"],
            "reference": stands_for["name"],
        }
        if rank == 1:
            output["reshape"] = []
        outputs.append(output)
    onnx.save(model, job.folder / _ONNX_FILE)
    (given,) = job.signature["inputs"]
    return {"inputs": [{**given, "datatype": "FP32"}], "outputs": outputs}


def _estimator(job: Job) -> Any:
    import skops.io

    untrusted = skops.io.get_untrusted_types(file=job.source)
    foreign = sorted(set(untrusted) - _TRUSTED)
    if foreign:
        raise ValueError(
            f"the file has types that could run code when they are loaded: {', '.join(foreign)}; save a "
            f"model of scikit-learn's own types"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other versions of scikit-learn, which mostly work
        return skops.io.load(job.source, trusted=untrusted)


def _xgboost(job: Job) -> Any:
    import xgboost

    # From memory, as XGBoost judges a file by its name.
    booster = xgboost.Booster({"nthread": 1}, model_file=bytearray(job.source.read_bytes()))
    booster.set_param({"nthread": 1})
    return booster


def _objective(booster: Any) -> str:
    return str(json.loads(booster.save_config())["learner"]["objective"]["name"])


def _lightgbm(job: Job) -> Any:
    import lightgbm

    return lightgbm.Booster(model_str=job.source.read_text())


def _lightgbm_classifies(booster: Any) -> bool:
    lines = booster.model_to_string().splitlines()
    objective = next((line for line in lines if line.startswith("objective=")), "")
    return objective.removeprefix("objective=").split(" ")[0] in _CLASSIFIES_LIGHTGBM


def _named(values: np.ndarray[Any, Any], classifies: bool) -> Arrays:
    """Values, or classes and the probability of each."""
    if not classifies:
        return {PREDICT: values}
    if values.shape[1] == 1:
        both = np.concatenate((1 - values, values), axis=1)
        return {PREDICT: (values > 0.5).astype(np.int64), PREDICT_PROBA: both}
    return {PREDICT: np.argmax(values, axis=1).reshape(-1, 1), PREDICT_PROBA: values}


def _typed(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """With the type of its datatype; texts stay as they are."""
    types = {"f": np.float64, "i": np.int64, "u": np.int64}
    return array.astype(types.get(array.dtype.kind, array.dtype))


def _signature(features: int, datatype: str, example: Arrays) -> dict[str, Any]:
    outputs = []
    for name, array in example.items():
        of_floats = "FP32" if array.dtype == np.float32 else "FP64"
        kind = array.dtype.kind
        found = of_floats if kind == "f" else _DATATYPES[kind]
        outputs.append({"name": name, "datatype": found, "dims": list(array.shape[1:])})
    given = {"name": INPUT, "datatype": datatype, "dims": [features]}
    return {"batching": True, "inputs": [given], "outputs": outputs}
