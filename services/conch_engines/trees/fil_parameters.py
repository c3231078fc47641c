"""Parameters of models of backend `fil`, with Triton's names, defaults and errors.

Those that shape trees on a GPU are checked, and have no effect on the CPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from conch.core.errors import InternalError, InvalidArgumentError, UnsupportedError
from conch.core.spec import ModelSpec
from conch_engines.model_config import threads_per_instance
from conch_engines.trees.model_files import FILE_NAMES, XGBOOST

log = logging.getLogger(__name__)

MODEL_TYPE = "model_type"
IS_CLASSIFIER = "is_classifier"
OLD_IS_CLASSIFIER = "output_class"
THRESHOLD = "threshold"
PREDICT_PROBA = "predict_proba"
ALLOW_UNKNOWN_FIELD = "xgboost_allow_unknown_field"
CPU_THREADS = "cpu_nthread"
BEST_ITERATION = "CONCH_BEST_ITERATION"
_LAYOUT = "layout"

NAMES = (
    MODEL_TYPE,
    IS_CLASSIFIER,
    OLD_IS_CLASSIFIER,
    THRESHOLD,
    PREDICT_PROBA,
    ALLOW_UNKNOWN_FIELD,
    CPU_THREADS,
    BEST_ITERATION,
    _LAYOUT,
    "algo",
    "blocks_per_sm",
    "chunk_size",
    "storage_type",
    "threads_per_tree",
    "transfer_threshold",
    "use_experimental_optimizations",
)
"""All parameters, old ones and conch's own included."""

_LAYOUTS = ("depth_first", "breadth_first", "layered")
_REMOVED = {
    "algo": _LAYOUT,
    "threads_per_tree": "chunk_size",
    OLD_IS_CLASSIFIER: IS_CLASSIFIER,
    "storage_type": "",
    "blocks_per_sm": "",
}
"""Parameters that Triton 25.09 has removed, and their successors."""


@dataclass(frozen=True, slots=True)
class FilParameters:
    """Checked parameters of a model.

    Attributes:
        is_classifier: True if outputs are classes, or probabilities of classes.
        threshold: Score above which a row is of class 1 in a binary classifier.
        predict_proba: True if a classifier returns probabilities.
        allow_unknown_field: True if unknown fields of XGBoost's formats are ignored.
        threads: Threads of an instance for large batches.
        best_iteration: True if trees after the best iteration are left out; None if the config does not say.
    """

    is_classifier: bool
    threshold: float
    predict_proba: bool
    allow_unknown_field: bool
    threads: int
    best_iteration: bool | None


def read_parameters(spec: ModelSpec) -> FilParameters:
    """Checks the parameters of a complete config."""
    parameters = spec.parameters
    model_type(parameters)
    layout = parameters.get(_LAYOUT)
    if layout is not None and layout not in _LAYOUTS:
        raise InvalidArgumentError(f"Unknown nvForest layout name: {layout}")
    classifier = is_classifier(parameters)
    if classifier is None:
        raise InvalidArgumentError("Required parameter is_classifier not found in config")
    boolean(parameters, "use_experimental_optimizations")
    return FilParameters(
        is_classifier=classifier,
        threshold=_threshold(parameters) if classifier else 0.0,
        predict_proba=bool(boolean(parameters, PREDICT_PROBA)),
        allow_unknown_field=bool(boolean(parameters, ALLOW_UNKNOWN_FIELD)),
        threads=cpu_threads(spec),
        best_iteration=boolean(parameters, BEST_ITERATION),
    )


def model_type(parameters: Mapping[str, str]) -> str:
    """The type of the model's file."""
    name = parameters.get(MODEL_TYPE, XGBOOST)
    if name not in FILE_NAMES:
        raise UnsupportedError(f"{name} not recognized as a valid serialization format.")
    return name


def is_classifier(parameters: Mapping[str, str]) -> bool | None:
    """The parameter under its new name, or else its old one; None without both."""
    found = boolean(parameters, IS_CLASSIFIER)
    return boolean(parameters, OLD_IS_CLASSIFIER) if found is None else found


def boolean(parameters: Mapping[str, str], key: str) -> bool | None:
    """A parameter that is exactly ``true`` or ``false``; None if it is left out."""
    text = parameters.get(key)
    if text is None or text in ("true", "false"):
        return None if text is None else text == "true"
    raise InternalError(f"Expected 'true' or 'false' for parameter '{key}', got: '{text}'")


def cpu_threads(spec: ModelSpec) -> int:
    """Threads of an instance; its share of the cores without a positive number, as Triton ignores others."""
    try:
        threads = int(spec.parameters.get(CPU_THREADS, ""))
    except ValueError:
        threads = 0
    return threads if threads > 0 else threads_per_instance(spec, on_cpu=True)


def warn_of_removed(parameters: Mapping[str, str]) -> None:
    """Logs Triton's warnings about parameters that it has removed."""
    for name, successor in _REMOVED.items():
        if name in parameters:
            advice = f" Use `{successor}` instead." if successor else ""
            log.warning("The `%s` parameter has been removed in 25.09 release.%s", name, advice)


def _threshold(parameters: Mapping[str, str]) -> float:
    text = parameters.get(THRESHOLD)
    if text is None:
        raise InvalidArgumentError("Required parameter threshold not found in config")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise InvalidArgumentError("Bad input for parameter threshold")
    return value
