"""Base of the backends that give each library's results by name, such as ``predict_proba`` or ``margin``.

A backend describes what a model file offers, and opens it as a function that computes the outputs which are
requested and no others. Threads and locks: none; instances share one function.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from conch.backends.signature import ModelTensor, Signature, validate
from conch.core.backend import Backend, BackendModel
from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import NUMPY_DTYPES, Array
from conch_engines.model_config import parameter_texts
from conch_engines.trees.feature_columns import Columns, add_columns
from conch_engines.trees.fil_parameters import CPU_THREADS, cpu_threads
from conch_engines.trees.model_files import find_model, hint_of, wrong_kind
from conch_engines.trees.shared_model import (
    SharedFunction,
    SharedModel,
    check_rows,
    complete_batching,
    complete_tensors,
)

log = logging.getLogger(__name__)

INPUT = "input"
PREDICT = "predict"
PREDICT_PROBA = "predict_proba"
TRANSFORM = "transform"
MARGIN = "margin"
LEAF = "leaf"
CONTRIBUTIONS = "contributions"

_FLOATS = ("FP32", "FP64")
_TEXTS = frozenset({"BYTES"})
_DATATYPES = frozenset({"FP32", "FP64", "INT32", "INT64", "BOOL", "BYTES"})


@dataclass(frozen=True, slots=True)
class Offer:
    """Inputs and outputs that a model file offers.

    Attributes:
        features: Columns of the input.
        datatype: Datatype of the input, unless the config names the other kind of float.
        outputs: Datatype and dims per row of each output, by name; a config may name the other kind of float.
        optional: Datatype and dims per row of inputs that a config may add, by name.
        columns: Datatypes of the columns by name, unless the config names others. Each may be an input.
        rows: True if the columns may come as rows of one input.
        text_datatypes: Datatypes that a config may give columns of texts, by name; BYTES for all others.
        features_by_name: Names and categories of the features of rows.
        column_rules: Rules of columns that are inputs, where they have more than a datatype.
        nulls: The null of the training by column of texts that may be missing.
        iterations: Iterations of a booster that are used; 0 for all.
        warnings: Choices that the config leaves open.
    """

    features: int
    datatype: str
    outputs: Mapping[str, tuple[str, tuple[int, ...]]]
    optional: Mapping[str, tuple[str, tuple[int, ...]]]
    columns: Mapping[str, str] = field(default_factory=dict)
    rows: bool = True
    text_datatypes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    features_by_name: Columns = ()
    column_rules: Columns = ()
    nulls: Mapping[str, Any] = field(default_factory=dict)
    iterations: int = 0
    warnings: tuple[str, ...] = ()

    def widths(self, inputs: Iterable[str]) -> dict[str, int]:
        """Columns of each input, of a config with these inputs: all in one, unless the config names them."""
        if not self.rows or not self.columns.keys().isdisjoint(inputs):
            return dict.fromkeys(self.columns, 1)
        return {INPUT: self.features}

    def signature(self, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Signature:
        """Tensors of the model, for the datatypes of a config."""
        offered = {
            name: (_chosen(inputs, name, self.columns[name], self._column_datatypes(name)), (1,))
            if name in self.columns
            else (_chosen(inputs, name, self.datatype, _FLOATS), (width,))
            for name, width in self.widths(inputs).items()
        }
        results = {
            name: (_chosen(outputs, name, datatype, _FLOATS) if datatype in _FLOATS else datatype, dims)
            for name, (datatype, dims) in self.outputs.items()
        }
        return Signature(tuple(_tensors(offered)), tuple(_tensors(results)), tuple(_tensors(self.optional)))

    def _column_datatypes(self, name: str) -> frozenset[str]:
        # A number in place of a text is an unknown category without an error.
        return self.text_datatypes.get(name, _TEXTS) if self.columns[name] == "BYTES" else _DATATYPES


class NamedFunction(Protocol):
    """Computes outputs of one model, on several threads at the same time."""

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...], /) -> dict[str, Array]:
        """The requested outputs; inputs as for `ArrayFunction`, of the model's number of features."""


class NamedOutputsBackend(Backend):
    """A library's models with outputs by name.

    Attributes:
        kinds: File types that it serves, in the order in which their default names are looked for.
        file_names: Further default names.
    """

    default_model_file = ""
    parameters: ClassVar[tuple[str, ...]] = (CPU_THREADS,)
    passes_parameters = False
    uses_gpus = False
    kinds: ClassVar[tuple[str, ...]]
    file_names: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def describe(self, path: Path, kind: str, model: str, parameters: Mapping[str, str]) -> Offer:
        """Checks a model file and says what it offers with the parameters of a config."""

    @abstractmethod
    def open_model(self, path: Path, kind: str, spec: ModelSpec, threads: int, offer: Offer) -> NamedFunction:
        """Opens a model file that was described."""

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Takes batching, inputs and outputs that are left out from the model."""
        name = config.get("name", "")
        path, kind = self._find(version_directory, config.get("default_model_filename", ""), name)
        offer = self.describe(path, kind, name, parameter_texts(config))
        complete_batching(config)
        names = [each.get("name", "") for each in config.get("input") or ()]
        signature = offer.signature(dict.fromkeys(names, ""), {})
        complete_tensors(config, "input", (*signature.inputs, *signature.initialized), offer.widths(names))
        by_rows = offer.widths(names).keys() == {INPUT}
        add_columns(config, offer.features_by_name if by_rows else offer.column_rules)
        by_default = [name for name in offer.outputs if name.startswith(PREDICT)]
        if not by_default and TRANSFORM in offer.outputs:
            by_default = [TRANSFORM]
        complete_tensors(config, "output", signature.outputs, by_default)
        return config

    def check(self, spec: ModelSpec) -> None:
        """Compares the config with what the file offers."""
        self._describe(spec)

    def warnings(self, spec: ModelSpec) -> Iterable[str]:
        """Choices that the config leaves open."""
        return self._describe(spec)[2].warnings

    def load(self, spec: ModelSpec) -> BackendModel:
        """Opens the model, which all instances share."""
        path, kind, offer = self._describe(spec)
        threads = cpu_threads(spec)
        function = _RowFunction(self.open_model(path, kind, spec, threads, offer), spec, offer)
        log.info("model '%s': up to %d threads in each instance", spec.name, threads)
        return SharedModel(spec, function, offer.warnings)

    def _describe(self, spec: ModelSpec) -> tuple[Path, str, Offer]:
        path, kind = self._find(spec.version_directory, spec.model_file, spec.name)
        offer = self.describe(path, kind, spec.name, spec.parameters)
        given = _by_name(spec.inputs)
        signature = offer.signature(given, _by_name(spec.outputs))
        missing = [each.name for each in signature.inputs if each.name not in given]
        if missing and not given.keys().isdisjoint(offer.columns):
            raise InvalidArgumentError(
                f"unable to load model '{spec.name}', configuration expects {len(given)} inputs, model "
                f"provides {len(signature.inputs)}: list all of them, also {', '.join(map(repr, missing))}"
            )
        validate(spec, signature, _DATATYPES)
        return path, kind, offer

    def _find(self, directory: Path, file_name: str, model: str) -> tuple[Path, str]:
        path, kind = find_model(directory, file_name, self.kinds, model, self.file_names)
        if kind not in self.kinds:
            raise wrong_kind(path, kind, model, f"which another backend serves: {hint_of(kind)}")
        return path, kind


class _RowFunction(SharedFunction):
    """Checks the rows before the library sees them, and gives results the config's kind of float."""

    def __init__(self, function: NamedFunction, spec: ModelSpec, offer: Offer) -> None:
        self._function: NamedFunction | None = function
        self._widths = offer.widths(_by_name(spec.inputs))
        self._other_floats = {
            each.name: NUMPY_DTYPES[each.datatype]
            for each in spec.outputs
            if each.datatype != offer.outputs[each.name][0]
        }

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        for name, width in self._widths.items():
            check_rows(name, inputs[name], width)
        assert self._function is not None, "closed functions are not called"
        found = self._function(inputs, outputs)
        for name, dtype in self._other_floats.items():
            if name in found:
                found[name] = found[name].astype(dtype)
        return found

    def release(self) -> None:
        """Frees the model."""
        self._function = None


def _by_name(tensors: Iterable[TensorSpec]) -> dict[str, str]:
    return {each.name: each.datatype for each in tensors}


def _chosen(given: Mapping[str, str], name: str, offered: str, allowed: Container[str]) -> str:
    """The config's datatype if it may differ so, else the one offered."""
    return given[name] if given.get(name) in allowed else offered


def _tensors(described: Mapping[str, tuple[str, tuple[int, ...]]]) -> Iterable[ModelTensor]:
    return (ModelTensor(name, datatype, (-1, *dims)) for name, (datatype, dims) in described.items())


def contribution_dims(classes: int, features: int) -> tuple[int, ...]:
    """Dims per row of contributions: a column for each feature, and one for the bias."""
    return (features + 1,) if classes == 1 else (classes, features + 1)


def classes_and_probabilities(values: Array) -> dict[str, Array]:
    """The outputs of a classifier whose booster returns a probability for each class, or that of class 1."""
    if values.shape[1] == 1:
        return {
            PREDICT: (values > 0.5).astype(np.int64),
            PREDICT_PROBA: np.concatenate((1 - values, values), axis=1),
        }
    return {PREDICT: np.argmax(values, axis=1).reshape(-1, 1), PREDICT_PROBA: values}
