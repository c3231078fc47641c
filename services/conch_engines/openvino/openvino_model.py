"""A model as OpenVINO reads it: names of its tensors, shapes and element types that a config asks for."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from conch.backends.signature import ModelTensor, Signature, made_tensors
from conch.core.errors import UnavailableError
from conch.core.spec import ModelSpec, TensorSpec
from conch_engines.openvino.openvino_engine import Engine, engine_errors

log = logging.getLogger(__name__)

ELEMENT_TYPES = {
    "BOOL": "boolean",
    "UINT8": "u8",
    "UINT16": "u16",
    "UINT32": "u32",
    "UINT64": "u64",
    "INT8": "i8",
    "INT16": "i16",
    "INT32": "i32",
    "INT64": "i64",
    "FP16": "f16",
    "BF16": "bf16",
    "FP32": "f32",
    "FP64": "f64",
    "BYTES": "string",
}
"""OpenVINO's names of the datatypes."""

_TRIAL_ROWS = 13

_DATATYPES = {name: datatype for datatype, name in ELEMENT_TYPES.items()}


class ModelGraph:
    """A model that was read, before it is compiled.

    Args:
        ov: The `openvino` package.
        engine: Reads it.
        path: The file or folder.
        name: The model's name, for messages.

    Attributes:
        model: OpenVINO's object.
        batch: Rows of every run; 0 for any number.
    """

    def __init__(self, ov: Any, engine: Engine, path: Path, name: str) -> None:
        self._ov = ov
        self._name = name
        self.batch = 0
        self.model = engine.read(path)
        self._inputs = [
            _names(port, port.get_node(), f"input_{index}") for index, port in enumerate(self.model.inputs)
        ]
        self._outputs = [
            _names(port, port.get_node().input_value(0).get_node(), f"output_{index}")
            for index, port in enumerate(self.model.outputs)
        ]

        self._bypass_identities_of_strings()

    @property
    def keeps_state(self) -> bool:
        """True if the model has variables, which a run leaves to the next one."""
        return bool(self.model.get_variables())

    @property
    def has_batch_layout(self) -> bool:
        """True if the layouts of all inputs and outputs begin with the batch."""
        helpers = self._ov.layout_helpers
        layouts = [helpers.get_layout(port) for port in (*self.model.inputs, *self.model.outputs)]
        return all(helpers.has_batch(layout) and helpers.batch_idx(layout) == 0 for layout in layouts)

    def input_places(self, names: Iterable[str]) -> dict[str, int]:
        """The index of each named input that exists."""
        return _places(self._inputs, names)

    def output_places(self, names: Iterable[str]) -> dict[str, int]:
        """The index of each named output that exists."""
        return _places(self._outputs, names)

    def keeps_batch(self) -> bool:
        """False if outputs have another first dimension than all inputs have, which is variable."""
        trial = self.model.clone()
        shapes = {}
        for place, port in enumerate(trial.inputs):
            shape = port.get_partial_shape()
            shape[0] = self._ov.Dimension(_TRIAL_ROWS)
            shapes[place] = shape
        try:
            trial.reshape(shapes)
        except Exception:  # of the engine: its operations rely on other sizes
            log.debug("the batch of model '%s' can't be %d", self._name, _TRIAL_ROWS, exc_info=True)
            return True
        # Where inputs are static, outputs are variable only by values.
        by_values = all(shape.is_static for shape in shapes.values())
        first = [port.get_partial_shape()[0] for port in trial.outputs]
        keeps = all(dim == _TRIAL_ROWS or (dim.is_dynamic and not by_values) for dim in first)
        if not keeps:
            log.info("model '%s' does not batch: its outputs have other rows than its inputs", self._name)
        return keeps

    def signature(self, spec: ModelSpec | None = None) -> Signature:
        """Inputs and outputs, by the names that a config gives them, if there is one."""
        inputs = () if spec is None else _all_inputs(spec)
        outputs = () if spec is None else spec.model_outputs
        largest = [
            port.get_partial_shape()[0].get_max_length()
            for port in self.model.inputs
            if port.get_partial_shape().rank.is_static and len(port.get_partial_shape())
        ]
        return Signature(
            self._tensors(self.model.inputs, self._inputs, inputs),
            self._tensors(self.model.outputs, self._outputs, outputs),
            largest_batch=min((length for length in largest if length > 0), default=None),
        )

    def free_batch(self, places: Iterable[int]) -> None:
        """Makes the first dimension of inputs variable."""
        shapes = {}
        for place in places:
            shape = self.model.inputs[place].get_partial_shape()
            if shape.rank.is_static and len(shape) and shape[0].is_static:
                shape[0] = self._ov.Dimension.dynamic()
                shapes[place] = shape
        if shapes:
            with engine_errors("setting the batch dimension"):
                self.model.reshape(shapes)

    def fix_batch(self, places: Iterable[int], size: int) -> None:
        """Makes the first dimension of inputs a fixed one."""
        shapes = {}
        for place in places:
            shape = self.model.inputs[place].get_partial_shape()
            if shape.rank.is_static and len(shape):
                shape[0] = self._ov.Dimension(size)
                shapes[place] = shape
        with engine_errors("setting the batch dimension"):
            self.model.reshape(shapes)
        self.batch = size

    def adapt(self, spec: ModelSpec, reshapes: bool, batch: int = 0) -> None:
        """Changes shapes and element types to what a config asks for, where the model allows it."""
        batches = spec.max_batch_size > 0
        places = self.input_places(tensor.name for tensor in spec.model_inputs)
        if reshapes:
            shapes = {
                places[tensor.name]: self._ov.PartialShape(
                    [-1, *tensor.backend_dims] if batches else list(tensor.backend_dims)
                )
                for tensor in spec.model_inputs
                if tensor.name in places
            }
            with engine_errors("reshaping inputs"):
                self.model.reshape(shapes)
        if batches:
            ragged = {tensor.name for tensor in spec.inputs if tensor.ragged}
            batched = [place for name, place in places.items() if name not in ragged]
            if batch:
                self.fix_batch(batched, batch)
            else:
                self.free_batch(batched)
        self._impose_types(spec)

    def _bypass_identities_of_strings(self) -> None:
        """Removes operations that OpenVINO's CPU device runs by copying the strings' pointers."""
        for operation in self.model.get_ops():
            if operation.get_type_name() == "Identity" and _type_name(operation.output(0)) == "string":
                for target in operation.output(0).get_target_inputs():
                    target.replace_source_output(operation.input_value(0))

    def _impose_types(self, spec: ModelSpec) -> None:
        """Has OpenVINO convert tensors whose datatype in the config is not the model's."""
        processor = self._ov.preprocess.PrePostProcessor(self.model)
        converts = False
        for find, ports, part, tensors in (
            (self.input_places, self.model.inputs, processor.input, _all_inputs(spec)),
            (self.output_places, self.model.outputs, processor.output, spec.model_outputs),
        ):
            places = find(tensor.name for tensor in tensors)
            for tensor in tensors:
                own = (
                    _DATATYPES.get(_type_name(ports[places[tensor.name]])) if tensor.name in places else None
                )
                if own in (None, "BYTES", tensor.datatype) or tensor.datatype == "BYTES":
                    continue  # nothing to convert, or a mismatch that the validation refuses
                converted = getattr(self._ov.Type, ELEMENT_TYPES[tensor.datatype])
                part(places[tensor.name]).tensor().set_element_type(converted)
                converts = True
        if converts:
            with engine_errors("converting element types"):
                self.model = processor.build()

    def _tensors(
        self, ports: list[Any], names: list[tuple[str, ...]], wanted: Iterable[TensorSpec]
    ) -> tuple[ModelTensor, ...]:
        named = {place: name for name, place in _places(names, (each.name for each in wanted)).items()}
        return tuple(
            self._tensor(port, named.get(place, names[place][0])) for place, port in enumerate(ports)
        )

    def _tensor(self, port: Any, name: str) -> ModelTensor:
        shape = port.get_partial_shape()
        if shape.rank.is_dynamic:
            problem = (
                f"tensor '{name}' of model '{self._name}' has any number of dimensions; give the config's "
                f"inputs dims and set the parameter RESHAPE_IO_LAYERS to YES"
            )
            return ModelTensor(name, "", (), problem)
        dims = tuple(dim.get_length() if dim.is_static else -1 for dim in shape)
        if self.batch and dims[:1] == (self.batch,):
            dims = (-1, *dims[1:])  # runs are padded
        type_name = _type_name(port)
        datatype = _DATATYPES.get(type_name, "")
        problem = f"unsupported OpenVINO type '{type_name}' for I/O '{name}' of model '{self._name}'"
        return ModelTensor(name, datatype, dims, "" if datatype else problem)


def model_path(version_directory: Path, file_name: str, model_name: str) -> Path:
    """The model's file or folder."""
    path = version_directory / file_name
    if not path.exists():
        raise UnavailableError(f"unable to find '{path}' for model '{model_name}'")
    return path


def _all_inputs(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    return (*spec.model_inputs, *made_tensors(spec))


def _names(port: Any, node: Any, fallback: str) -> tuple[str, ...]:
    """The names of a tensor, the preferred one first."""
    own = sorted(port.get_names())
    first = port.get_any_name() if own else fallback
    return tuple(dict.fromkeys((first, *own, node.get_friendly_name(), fallback)))


def _places(known: list[tuple[str, ...]], names: Iterable[str]) -> dict[str, int]:
    """Indexes by name; the preferred name of a tensor goes before other names of others."""
    by_name = {name: place for place, each in enumerate(known) for name in each}
    by_name.update((each[0], place) for place, each in enumerate(known))
    return {name: by_name[name] for name in names if name in by_name}


def _type_name(port: Any) -> str:
    return str(port.get_element_type().get_type_name())
