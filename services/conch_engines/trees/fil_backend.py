"""The backend ``fil``: Triton's interface to forests, with the numbers of its CPU path.

Triton's backend computes with treelite's GTIL, and so does this. It turns scores into classes or
probabilities as the parameters say, and drops output dims of 1. Contributions (``treeshap_output``) come from
the library that wrote the file. Threads and locks: none; instances share one forest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from conch.backends.signature import ModelTensor, Signature, validate
from conch.core.backend import Backend, BackendModel
from conch.core.errors import UnsupportedError
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Array
from conch_engines.model_config import parameter_texts
from conch_engines.trees import fil_parameters
from conch_engines.trees.boosters import Contributions, has_contributions, open_contributions
from conch_engines.trees.feature_columns import add_columns
from conch_engines.trees.fil_parameters import FilParameters, read_parameters, warn_of_removed
from conch_engines.trees.forest import Forest, Gtil, TreeliteEngine
from conch_engines.trees.model_files import FILE_NAMES, OF_XGBOOST, find_model, text_of, wrong_kind
from conch_engines.trees.shared_model import (
    SharedFunction,
    SharedModel,
    check_rows,
    complete_batching,
    complete_tensors,
)

log = logging.getLogger(__name__)

INPUT = "input__0"
OUTPUT = "output__0"
SHAP = "treeshap_output"

_DATATYPES = ("FP32",)

Convert = Callable[[Array], Array]


class FilBackend(Backend):
    """Forests of XGBoost, LightGBM, scikit-learn and treelite, served as Triton's backend ``fil`` does."""

    # The file's name depends on its type, so the folder is the default, as in Triton.
    default_model_file = ""
    parameters = fil_parameters.NAMES
    passes_parameters = False
    uses_gpus = False

    def __init__(self) -> None:
        self._engine = TreeliteEngine()

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Takes parameters, batching, inputs and outputs that are left out from the model."""
        name = config.get("name", "")
        given = config.setdefault("parameters", {})
        parameters = parameter_texts(config)
        if _is_complete(config, parameters):
            log.info("skipping model configuration auto-complete for '%s': nothing is left out", name)
            return config
        path, kind = _find(version_directory, config.get("default_model_filename", ""), parameters, name)
        allow = bool(fil_parameters.boolean(parameters, fil_parameters.ALLOW_UNKNOWN_FIELD))
        forest = self._engine.open(path, kind, name, allow)
        added: dict[str, str] = {}
        if fil_parameters.MODEL_TYPE not in parameters:
            named = next((each for each, file in FILE_NAMES.items() if file == path.name), kind)
            # The default name leads to the file also where XGBoost has written another format to it.
            added[fil_parameters.MODEL_TYPE] = named if {named, kind} <= OF_XGBOOST else kind
        classifier = fil_parameters.is_classifier(parameters)
        if classifier is None:
            classifier = forest.is_classifier
            added[fil_parameters.IS_CLASSIFIER] = "true" if classifier else "false"
        if classifier and fil_parameters.THRESHOLD not in parameters:
            added[fil_parameters.THRESHOLD] = "0.5"
        given |= {key: {"string_value": value} for key, value in added.items()}
        add_columns(config, forest.columns)
        proba = bool(fil_parameters.boolean(parameters, fil_parameters.PREDICT_PROBA))
        complete_batching(config)
        values = _values(forest, classifier, proba)
        inputs, outputs = _tensors(forest, (values,), (forest.classes, forest.features + 1))
        complete_tensors(config, "input", inputs, [INPUT])
        complete_tensors(config, "output", outputs, [OUTPUT])
        return config

    def check(self, spec: ModelSpec) -> None:
        """Checks parameters, file and tensors, without opening XGBoost or LightGBM."""
        self._open(spec)

    def warnings(self, spec: ModelSpec) -> Iterable[str]:
        """Choices that the config leaves open."""
        return self._open(spec).forest.warnings

    def load(self, spec: ModelSpec) -> BackendModel:
        """Loads the forest, which all instances share."""
        warn_of_removed(spec.parameters)
        found = self._open(spec)
        parameters, forest = found.parameters, found.forest
        if parameters.is_classifier and parameters.predict_proba and forest.classes > 1:
            forest.force_probabilities()
        seen = tuple(_without_ones(spec, tensor) for tensor in spec.outputs)
        dims = {tensor.name: _row_dims(spec, tensor) for tensor in seen}
        shap = None
        if SHAP in dims:
            shap = open_contributions(
                found.path, found.kind, spec.name, parameters.threads, forest.iterations
            )
        gtil = Gtil(forest, parameters.threads)
        gtil(np.zeros((1, forest.features), np.float32))  # errors of the model itself appear now
        convert = _conversion(parameters, forest.classes, prod(dims.get(OUTPUT, ())))
        function = FilFunction(gtil, forest.features, convert, dims, shap)
        log.info(
            "model '%s': %s with %d trees of %d features, up to %d threads in each instance",
            spec.name,
            text_of(found.kind),
            forest.trees,
            forest.features,
            parameters.threads,
        )
        return SharedModel(replace(spec, outputs=seen), function, forest.warnings)

    def _open(self, spec: ModelSpec) -> _Found:
        parameters = read_parameters(spec)
        path, kind = _find(spec.version_directory, spec.model_file, spec.parameters, spec.name)
        forest = self._engine.open(
            path, kind, spec.name, parameters.allow_unknown_field, parameters.best_iteration
        )
        _check_tensors(spec, forest, parameters)
        wants_shap = any(tensor.name == SHAP for tensor in spec.outputs)
        if wants_shap and forest.has_vectors and has_contributions(kind):
            raise UnsupportedError(
                f"unable to load model '{spec.name}': no '{SHAP}' for leaves with a value for each class, of "
                f"which XGBoost computes none; train it without multi_strategy 'multi_output_tree'"
            )
        if wants_shap and not has_contributions(kind):
            raise UnsupportedError(
                f"unable to load model '{spec.name}': no '{SHAP}' for {text_of(kind)}: XGBoost and LightGBM "
                f"compute it, each from its own file; serve that in JSON, UBJSON or LightGBM's text"
            )
        return _Found(parameters, path, kind, forest)


@dataclass(frozen=True, slots=True)
class _Found:
    """Model of a spec: its parameters, its file, the file's type and the forest."""

    parameters: FilParameters
    path: Path
    kind: str
    forest: Forest


class FilFunction(SharedFunction):
    """Rows to the outputs of the config."""

    def __init__(
        self,
        gtil: Gtil,
        features: int,
        convert: Convert | None,
        dims: Mapping[str, tuple[int, ...]],
        shap: Contributions | None,
    ) -> None:
        self._gtil: Gtil | None = gtil
        self._features = features
        self._convert = convert
        self._dims = dims
        self._shap = shap

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        """The requested outputs."""
        rows = inputs[INPUT]
        check_rows(INPUT, rows, self._features)
        found: dict[str, Array] = {}
        if OUTPUT in outputs:
            assert self._gtil is not None, "closed functions are not called"
            scores = self._gtil(rows)
            values = scores if self._convert is None else self._convert(scores)
            found[OUTPUT] = values.reshape(len(rows), *self._dims[OUTPUT])
        if SHAP in outputs:
            assert self._shap is not None, "checked before the load"
            shap = self._shap(rows).astype(np.float32, copy=False)
            found[SHAP] = shap.reshape(len(rows), *self._dims[SHAP])
        return found

    def release(self) -> None:
        """Frees the forest."""
        self._gtil = self._shap = None


def _is_complete(config: Mapping[str, Any], parameters: Mapping[str, str]) -> bool:
    classifier = fil_parameters.is_classifier(parameters)
    tensors = [*config.get("input", ()), *config.get("output", ())]
    return (
        fil_parameters.MODEL_TYPE in parameters
        and (classifier is False or (classifier is True and fil_parameters.THRESHOLD in parameters))
        and bool(config.get("input") and config.get("output") and config.get("max_batch_size"))
        and all(
            tensor.get("dims") and tensor.get("data_type", "TYPE_INVALID") != "TYPE_INVALID"
            for tensor in tensors
        )
        and ("dynamic_batching" in config or "sequence_batching" in config)
    )


def _find(directory: Path, file_name: str, parameters: Mapping[str, str], model: str) -> tuple[Path, str]:
    """The model's file and its real type, which is of the library that ``model_type`` names."""
    wanted = fil_parameters.model_type(parameters)
    given = fil_parameters.MODEL_TYPE in parameters
    path, kind = find_model(directory, file_name, (wanted,) if given else tuple(FILE_NAMES), model)
    if given and kind != wanted and not {kind, wanted} <= OF_XGBOOST:
        raise wrong_kind(
            path,
            kind,
            model,
            f"but parameter 'model_type' is '{wanted}'; set it to '{kind}', or leave it out",
        )
    return path, kind


def _values(forest: Forest, classifier: bool, proba: bool) -> int:
    """Values per row in the output."""
    if classifier and not proba:
        return 1
    # The probability of both classes of a binary classifier is returned only where the config has dims [2].
    return forest.classes


def _tensors(
    forest: Forest, dims: tuple[int, ...], shap_dims: tuple[int, ...]
) -> tuple[tuple[ModelTensor, ...], tuple[ModelTensor, ...]]:
    inputs = ModelTensor(INPUT, "FP32", (-1, forest.features))
    outputs = ModelTensor(OUTPUT, "FP32", (-1, *dims)), ModelTensor(SHAP, "FP32", (-1, *shap_dims))
    return (inputs,), outputs


def _check_tensors(spec: ModelSpec, forest: Forest, parameters: FilParameters) -> None:
    """Compares the config's tensors with the model; outputs may have any dims of the right values."""
    classifier, proba = parameters.is_classifier, parameters.predict_proba
    width = forest.features + 1
    allowed: dict[str, list[tuple[int, ...]]] = {
        OUTPUT: [(_values(forest, classifier, proba),)],
        SHAP: [(forest.classes, width), (forest.classes * width,)],
    }
    if classifier and proba and forest.classes == 1:
        allowed[OUTPUT].append((2,))
    dims = {name: shapes[0] for name, shapes in allowed.items()}
    for tensor in spec.outputs:
        for shape in allowed.get(tensor.name, ()):
            if _row_dims(spec, _without_ones(spec, tensor)) == tuple(size for size in shape if size != 1):
                dims[tensor.name] = _row_dims(spec, tensor)
    inputs, outputs = _tensors(forest, dims[OUTPUT], dims[SHAP])
    validate(spec, Signature(inputs, outputs), _DATATYPES)


def _row_dims(spec: ModelSpec, tensor: TensorSpec) -> tuple[int, ...]:
    """Dims of one row; a model without batching has that of the rows in its config."""
    return tensor.backend_dims if spec.max_batch_size > 0 else tensor.backend_dims[1:]


def _without_ones(spec: ModelSpec, tensor: TensorSpec) -> TensorSpec:
    """The output as clients get it: Triton's backend drops all dims of 1 but that of the rows."""
    skip = 0 if spec.max_batch_size > 0 else 1
    dims = tensor.backend_dims
    return replace(tensor, dims=(*dims[:skip], *(size for size in dims[skip:] if size != 1)), reshape=None)


def _conversion(parameters: FilParameters, classes: int, size: int) -> Convert | None:
    """Post-processing of the scores; None for none."""
    if not parameters.is_classifier:
        return None
    if parameters.predict_proba:
        return _both if classes == 1 and size == 2 else None
    if classes > 1:
        return _best
    threshold = np.float32(parameters.threshold)
    return lambda scores: (scores > threshold).astype(np.float32)


def _both(scores: Array) -> Array:
    """The probabilities of both classes from that of class 1."""
    return np.concatenate((1 - scores, scores), axis=1)


def _best(scores: Array) -> Array:
    """The class of the highest score, the first among equal ones; a score has to be above 0 to win."""
    classes: Array = np.argmax(np.maximum(scores, 0), axis=1)
    return classes.astype(np.float32)
