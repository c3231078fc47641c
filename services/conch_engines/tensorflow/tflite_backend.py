"""`TfLiteBackend`: TF-Lite models in process, through LiteRT; one interpreter per instance.

Inputs and outputs have the names of the model's signature where it has one, else those of its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conch.backends.arrays import ArrayBackend, ArrayFunction
from conch.backends.signature import ModelTensor, Signature, complete, validate
from conch.core.engine_text import engine_text
from conch.core.errors import ConchError, InternalError, InvalidArgumentError, UnavailableError
from conch.core.execution.placement import Placement
from conch.core.file_formats import TFLITE, describe, identify
from conch.core.spec import ModelSpec
from conch.core.tensor import Array, datatype_of
from conch_engines.model_config import integer, parameter_texts, threads_per_instance

_THREADS = "NUM_THREADS"
_SIGNATURE = "SIGNATURE"


class TfLiteBackend(ArrayBackend):
    """The backend ``tflite``."""

    default_model_file = "model.tflite"
    parameters = (_THREADS, _SIGNATURE)
    passes_parameters = False
    uses_gpus = False

    def __init__(self) -> None:
        # Imported late: configs can be read without the framework.
        from ai_edge_litert.interpreter import Interpreter

        self._interpreter: Any = Interpreter

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Takes inputs, outputs and batching from the model."""
        if config.get("input") and config.get("output"):
            return config
        path = version_directory / (config.get("default_model_filename") or self.default_model_file)
        chosen = parameter_texts(config).get(_SIGNATURE, "")
        return complete(config, _Model(self._interpreter, path, chosen, 1).signature, options)

    def check(self, spec: ModelSpec) -> None:
        """Compares the config with the model."""
        self._open(spec)

    def open(self, spec: ModelSpec, placement: Placement) -> ArrayFunction:
        """Makes an interpreter."""
        if placement.kind == "GPU":
            raise InvalidArgumentError(
                f"unable to load model '{spec.name}': backend 'tflite' runs on the CPU; set the kind of "
                f"instance_group to KIND_CPU"
            )
        return self._open(spec)

    def _open(self, spec: ModelSpec) -> _Model:
        threads = integer(spec.parameters, _THREADS, 0, least=0) or threads_per_instance(spec)
        path = spec.version_directory / spec.model_file
        model = _Model(self._interpreter, path, spec.parameters.get(_SIGNATURE, ""), threads)
        validate(spec, model.signature, model.datatypes)
        return model


class _Model:
    """An interpreter as a function of arrays."""

    def __init__(self, interpreter: Any, path: Path, chosen: str, threads: int) -> None:
        if not path.is_file():
            raise UnavailableError(f"unable to find '{path}' for backend 'tflite'")
        if identify(path) is not TFLITE:
            is_what = describe(path) or "is none that LiteRT wrote, or a damaged one"
            raise InvalidArgumentError(f"unable to load TF-Lite model '{path}': the file {is_what}")
        try:
            self._model = interpreter(model_path=str(path), num_threads=threads)
            self._runner: Any = None
            self._inputs, self._outputs = self._details(chosen, path)
            if self._runner is None:  # which allocates itself, and counts as a reference to internal data
                self._model.allocate_tensors()
        except ConchError:
            raise
        except Exception as error:  # of the engine
            raise InternalError(f"unable to load TF-Lite model '{path}': {engine_text(error)}") from error
        self.signature = Signature(
            tuple(_tensor(name, detail) for name, detail in self._inputs.items()),
            tuple(_tensor(name, detail) for name, detail in self._outputs.items()),
        )
        tensors = (*self.signature.inputs, *self.signature.outputs)
        self.datatypes = frozenset(tensor.datatype for tensor in tensors if tensor.datatype)
        self._shapes = {name: tuple(detail["shape"]) for name, detail in self._inputs.items()}
        # LiteRT reads an object array of rank 0 as text of its pointer; of strings it takes one element.
        self._scalars = [
            tensor.name for tensor in self.signature.inputs if not tensor.dims and tensor.datatype != "BYTES"
        ]

    def _details(self, chosen: str, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Details of inputs and outputs by name."""
        signatures = self._model.get_signature_list()
        if chosen and chosen not in signatures:
            raise InvalidArgumentError(
                f"'{path}' has no signature '{chosen}', which parameter '{_SIGNATURE}' names; it has: "
                f"{', '.join(signatures) or 'none'}"
            )
        if not signatures:
            given, made = self._model.get_input_details(), self._model.get_output_details()
            return {each["name"]: each for each in given}, {each["name"]: each for each in made}
        # A signature may have a graph of its own, which only its runner can run.
        self._runner = self._model.get_signature_runner(chosen or next(iter(signatures)))
        inputs, outputs = self._runner.get_input_details(), self._runner.get_output_details()
        return dict(sorted(inputs.items())), dict(sorted(outputs.items()))

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> Mapping[str, Array]:
        model = self._model
        try:
            for name in self._scalars:
                inputs[name] = inputs[name].reshape(())
            if self._runner is not None:
                found = self._runner(**{name: inputs[name] for name in self._inputs})
                return {name: _plain(found[name]) for name in outputs}
            if any(inputs[name].shape != shape for name, shape in self._shapes.items()):
                for name, detail in self._inputs.items():
                    model.resize_tensor_input(detail["index"], inputs[name].shape)
                model.allocate_tensors()
                self._shapes = {name: inputs[name].shape for name in self._inputs}
            for name, detail in self._inputs.items():
                model.set_tensor(detail["index"], inputs[name])
            model.invoke()
            return {name: _plain(model.get_tensor(self._outputs[name]["index"])) for name in outputs}
        except KeyError as error:
            raise InvalidArgumentError(f"input {error} is missing") from error
        except (RuntimeError, ValueError) as error:
            self._shapes = dict.fromkeys(self._shapes, ())  # the next run allocates again
            raise InternalError(f"LiteRT: {engine_text(error)}") from error

    def close(self) -> None:
        """Frees the interpreter."""
        del self._model, self._runner


def _tensor(name: str, detail: Mapping[str, Any]) -> ModelTensor:
    dims = detail["shape_signature"] if len(detail["shape_signature"]) else detail["shape"]
    try:
        datatype = datatype_of(np.empty(0, detail["dtype"]))
    except ConchError as error:
        return ModelTensor(name, "", tuple(map(int, dims)), f"tensor '{name}': {error.message}")
    return ModelTensor(name, datatype, tuple(map(int, dims)))


def _plain(array: Array) -> Array:
    """Strings as BYTES."""
    return array.astype(object) if array.dtype.kind == "S" else array
