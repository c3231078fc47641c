"""`OpenVinoBackend`: completes, checks and loads OpenVINO models.

A version is compiled once; each instance has an infer request of it. Owns: per version, the compiled model
and the watch over its runs.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from conch.backends.arrays import AsyncArrayInstance, PaddedFunction
from conch.backends.signature import Signature, complete, made_tensors, scalar_dims, validate
from conch.core.backend import Backend, BackendInstance, BackendModel
from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch.core.execution.placement import Placement, place
from conch.core.spec import ModelSpec
from conch_engines.model_config import lists_tensors, parameter_texts
from conch_engines.openvino.infer_function import FailureWatch, InferFunction, InputTensor, OutputTensor
from conch_engines.openvino.openvino_engine import Engine, engine_errors, import_openvino
from conch_engines.openvino.openvino_model import ELEMENT_TYPES, ModelGraph, model_path
from conch_engines.openvino.openvino_settings import PARAMETERS, OpenVinoSettings

log = logging.getLogger(__name__)


class OpenVinoBackend(Backend):
    """The backend ``openvino``."""

    default_model_file = "model.xml"
    parameters = PARAMETERS
    passes_parameters = False
    uses_gpus = False  # of NVIDIA, so that KIND_AUTO is the CPU

    def __init__(self) -> None:
        self._ov = import_openvino()

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Takes inputs, outputs and batching from the model unless the config has both inputs and outputs."""
        if lists_tensors(config):
            return config
        name = config.get("name", "")
        path = model_path(
            version_directory, config.get("default_model_filename") or self.default_model_file, name
        )
        extension = parameter_texts(config).get("CPU_EXTENSION_PATH", "")
        engine = Engine(self._ov, OpenVinoSettings("CPU", {}, extension, False))
        size = int(config.get("max_batch_size") or 0)
        return complete(config, self._signature(engine, path, name, size), options)

    def _signature(self, engine: Engine, path: Path, name: str, size: int) -> Signature:
        """The model's signature; the batch dimension is variable if it is to be and can be.

        A model that needs batches of one size, that of the config, batches too: its runs are padded.
        """
        graph = ModelGraph(self._ov, engine, path, name)
        if not (size or graph.has_batch_layout):
            return _with_batch(graph)
        for batch in (0, size) if size else (0,):
            inputs = range(len(graph.model.inputs))
            try:
                if batch:
                    graph.fix_batch(inputs, batch)
                else:
                    graph.free_batch(inputs)
            except InternalError:  # its operations rely on a size
                log.debug("the batch dimension of model '%s' can't vary", name, exc_info=True)
            signature = _with_batch(graph)
            if signature.supports_batching:
                return signature
            graph = ModelGraph(self._ov, engine, path, name)
        return _with_batch(graph)

    def check(self, spec: ModelSpec) -> None:
        """Compares the config with the model."""
        settings = OpenVinoSettings.of(spec)
        self._graph(spec, settings, Engine(self._ov, settings))

    def load(self, spec: ModelSpec) -> BackendModel:
        """Compiles a model version."""
        settings = OpenVinoSettings.of(spec)
        engine = Engine(self._ov, settings)
        graph = self._graph(spec, settings, engine)
        return _OpenVinoModel(self._ov, spec, graph, engine.compile(graph.model, spec.name))

    def _graph(self, spec: ModelSpec, settings: OpenVinoSettings, engine: Engine) -> ModelGraph:
        """The model as the config wants it, checked against it."""
        if any(group.kind != "CPU" for group in spec.instance_groups):
            raise InvalidArgumentError(
                f"unable to load model '{spec.name}', Triton OpenVINO backend supports only Kind CPU and AUTO"
            )
        path = model_path(spec.version_directory, spec.model_file, spec.name)
        graph = ModelGraph(self._ov, engine, path, spec.name)
        if graph.keeps_state and (spec.max_batch_size > 0 or len(place(spec.instance_groups)) > 1):
            raise InvalidArgumentError(
                f"unable to load model '{spec.name}', its operations ReadValue and Assign keep state in the "
                f"instance from one request to the next: set max_batch_size to 0 and have one instance, or "
                f"export the state as inputs and outputs"
            )
        try:
            return self._adapted(graph, spec, settings, 0)
        except ConchError as error:
            if not _may_pad(spec):
                raise
            try:
                graph = ModelGraph(self._ov, engine, path, spec.name)
                padded = self._adapted(graph, spec, settings, spec.max_batch_size)
            except ConchError:
                raise error from None
        log.info(
            "the operations of model '%s' rely on batches of %d: smaller ones are padded",
            spec.name,
            spec.max_batch_size,
        )
        return padded

    @staticmethod
    def _adapted(graph: ModelGraph, spec: ModelSpec, settings: OpenVinoSettings, batch: int) -> ModelGraph:
        graph.adapt(spec, settings.reshapes, batch)
        validate(spec, graph.signature(spec), ELEMENT_TYPES)
        return graph


def _with_batch(graph: ModelGraph) -> Signature:
    """The signature; it batches only if outputs have the rows of inputs, not others."""
    signature = graph.signature()
    if graph.batch or not signature.supports_batching:
        return signature
    return replace(signature, batches=graph.keeps_batch())


def _may_pad(spec: ModelSpec) -> bool:
    """True if all inputs of a batch can be padded with rows: each has one row for each of the requests'."""
    ragged = any(tensor.ragged for tensor in spec.inputs)
    return spec.max_batch_size > 0 and not (ragged or spec.batch_outputs or made_tensors(spec))


class _OpenVinoModel(BackendModel):
    """A loaded version: the compiled model, which instances share."""

    def __init__(self, ov: Any, spec: ModelSpec, graph: ModelGraph, compiled: Any) -> None:
        self._ov = ov
        self._spec = spec
        self._compiled = compiled
        self._watch = FailureWatch(spec.name)
        self._batch = graph.batch
        signature = graph.signature(spec)
        dims_in = {each.name: each.dims for each in signature.inputs}
        dims_out = {each.name: each.dims for each in signature.outputs}
        inputs = {each.name: each for each in (*spec.model_inputs, *made_tensors(spec))}
        outputs = {each.name: each for each in spec.model_outputs}
        # Of each tensor: its index, its datatype, and the config's dims of a scalar.
        self._inputs = {
            name: (index, inputs[name].datatype, scalar_dims(spec, inputs[name], dims_in[name]))
            for name, index in graph.input_places(inputs).items()
        }
        self._outputs = {
            name: (index, outputs[name].datatype, scalar_dims(spec, outputs[name], dims_out[name]))
            for name, index in graph.output_places(outputs).items()
        }

    def create_instance(self, placement: Placement) -> BackendInstance:
        with engine_errors("creating infer request object"):
            request = self._compiled.create_infer_request()
        ov = self._ov
        function = InferFunction(
            ov,
            request,
            {name: InputTensor(ov, request, *each) for name, each in self._inputs.items()},
            {name: OutputTensor(ov, request, *each) for name, each in self._outputs.items()},
            self._watch,
        )
        return AsyncArrayInstance(
            self._spec, PaddedFunction(function, self._batch) if self._batch else function
        )

    def close(self) -> None:
        """Ends the watch and frees the compiled model with its threads."""
        self._watch.close()
        del self._compiled
        gc.collect()
