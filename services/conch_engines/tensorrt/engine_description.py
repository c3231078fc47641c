"""`EngineDescription`: what an engine says of its inputs, outputs and profiles, read once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from conch.backends.signature import ModelTensor, Signature, complete, made_tensors, validate
from conch.core.errors import InternalError, InvalidArgumentError, UnsupportedError
from conch.core.spec import ModelSpec
from conch_engines.tensorrt.optimization_profiles import Dims, DimsRange, OptimizationProfile

_DATATYPES = {
    "FLOAT": "FP32",
    "HALF": "FP16",
    "BF16": "BF16",
    "INT8": "INT8",
    "UINT8": "UINT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "BOOL": "BOOL",
}

DATATYPES = frozenset(_DATATYPES.values())
"""Datatypes that the backend serves."""


@dataclass(frozen=True, slots=True)
class EngineTensor:
    """One input or output of an engine.

    Attributes:
        key: Its name in the engine.
        name: Its name in the config: the key up to the first blank.
        is_input: True if it is an input.
        datatype: The protocol's name of its element type; empty if it has none.
        dims: All dims; -1 where variable.
        is_shape: True if its values decide about shapes.
        on_host: True if the engine reads or writes it in host memory.
        problem: Reason for which the backend can't serve it; empty if it can.
    """

    key: str
    name: str
    is_input: bool
    datatype: str
    dims: Dims
    is_shape: bool = False
    on_host: bool = False
    problem: str = ""

    def gets_batch_size(self, batches: bool) -> bool:
        """True if the tensor's only value is the batch size, which clients leave out."""
        return self.is_shape and batches and len(self.dims) == 1


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """An engine's inputs and outputs in its order, and its profiles."""

    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    profiles: tuple[OptimizationProfile, ...]

    @property
    def supports_batching(self) -> bool:
        """True if the first dim of all tensors but shape tensors is variable."""
        tensors = [each for each in (*self.inputs, *self.outputs) if not each.is_shape]
        return bool(tensors) and all(each.dims[:1] == (-1,) for each in tensors)

    def largest_batch(self, profiles: Iterable[int]) -> int:
        """The largest batch that one of the numbered profiles allows; 0 without batching."""
        if not self.supports_batching:
            return 0
        names = [each.key for each in self.inputs if not each.is_shape]
        return max(
            (
                min((self.profiles[index].shapes[name].most[0] for name in names), default=0)
                for index in profiles
                if 0 <= index < len(self.profiles)
            ),
            default=0,
        )

    def signature(self, batches: bool) -> Signature:
        """The signature as configs see it; shape tensors lose the batch size, and get a batch dimension."""
        tensors = [
            ModelTensor(each.name, each.datatype, _config_dims(each, batches), each.problem)
            for each in (*self.inputs, *self.outputs)
        ]
        count = len(self.inputs)
        return Signature(tuple(tensors[:count]), tuple(tensors[count:]), batches=batches)


def describe_engine(trt: Any, engine: Any, model: str) -> EngineDescription:
    """Reads an engine."""
    tensors = [
        _tensor(trt, engine, engine.get_tensor_name(index), model) for index in range(engine.num_io_tensors)
    ]
    inputs = tuple(each for each in tensors if each.is_input)
    return EngineDescription(
        inputs,
        tuple(each for each in tensors if not each.is_input),
        tuple(_profile(engine, inputs, index) for index in range(engine.num_optimization_profiles)),
    )


def _tensor(trt: Any, engine: Any, key: str, model: str) -> EngineTensor:
    name = key.partition(" ")[0]
    is_shape = bool(engine.is_shape_inference_io(key))
    is_input = engine.get_tensor_mode(key) == trt.TensorIOMode.INPUT
    layout = engine.get_tensor_format_desc(key)
    if not is_shape and (engine.get_tensor_vectorized_dim(key) >= 0 or "channel major" in layout.lower()):
        raise UnsupportedError(
            f"unable to load model '{model}', its tensor '{name}' has the format '{layout}' and only linear "
            f"ones are supported: build the engine with linear inputs and outputs, as with trtexec's "
            f"--inputIOFormats=fp16:chw --outputIOFormats=fp16:chw"
        )
    dtype = engine.get_tensor_dtype(key).name
    datatype = _DATATYPES.get(dtype, "")
    return EngineTensor(
        key,
        name,
        is_input,
        datatype,
        tuple(engine.get_tensor_shape(key)),
        is_shape,
        (is_input and is_shape) or engine.get_tensor_location(key) == trt.TensorLocation.HOST,
        ""
        if datatype
        else f"unsupported TensorRT type '{dtype}' for I/O '{name}' of model '{model}': the protocol has no "
        f"such type; build the engine with a cast of it, for example to FP16",
    )


def _profile(engine: Any, inputs: tuple[EngineTensor, ...], index: int) -> OptimizationProfile:
    values = {}
    for each in inputs:
        if each.is_shape:
            found = engine.get_tensor_profile_values(index, each.key)
            if found:
                values[each.key] = DimsRange(*(tuple(row) for row in found))
    shapes = {
        each.key: DimsRange(*(tuple(dims) for dims in engine.get_tensor_profile_shape(each.key, index)))
        for each in inputs
    }
    return OptimizationProfile(index, shapes, values)


def _config_dims(tensor: EngineTensor, batches: bool) -> Dims:
    if tensor.gets_batch_size(batches):
        return (-1, tensor.dims[0] - 1 if tensor.dims[0] > 0 else -1)
    return (-1, *tensor.dims) if tensor.is_shape and batches else tensor.dims


def complete_from_engine(
    config: dict[str, Any], engine: EngineDescription, profiles: Iterable[int], options: Mapping[str, str]
) -> dict[str, Any]:
    """Fills in batching, inputs and outputs that a config leaves out."""
    name = config.get("name", "")
    size = int(config.get("max_batch_size") or 0)
    largest = engine.largest_batch(profiles)
    hint = _batch_hint(config, engine)
    if hint and not largest:
        raise InternalError(
            f"autofill failed for model '{name}': model tensor shape configuration hints for dynamic "
            f"batching but the underlying engine doesn't support batching."
        )
    if size > largest:
        raise InternalError(
            f"autofill failed for model '{name}': configuration specified max-batch {size} but TensorRT "
            f"engine only supports max-batch {largest}"
        )
    if not size and hint is not False:
        size = config["max_batch_size"] = largest
    batches = size > 0
    completed = complete(config, engine.signature(batches), options)
    for key, tensors in (("input", engine.inputs), ("output", engine.outputs)):
        shapes = {each.name for each in tensors if each.is_shape}
        for entry in completed[key]:
            if entry.get("name") in shapes:
                entry["is_shape_tensor"] = True
    return completed


def _batch_hint(config: Mapping[str, Any], engine: EngineDescription) -> bool | None:
    """True if the dims of listed tensors leave room for a batch dimension; None if none is listed."""
    ranks = {each.name: len(each.dims) for each in (*engine.inputs, *engine.outputs) if not each.is_shape}
    hints = set()
    for entry in (*(config.get("input") or ()), *(config.get("output") or ())):
        rank = ranks.get(entry.get("name", ""))
        shape = (entry.get("reshape") or {}).get("shape") if entry.get("reshape") else entry.get("dims")
        if rank is None or not entry.get("dims"):
            continue
        if entry.get("allow_ragged_batch") or len(shape or ()) + 1 == rank:
            hints.add(True)
        elif len(shape or ()) == rank:
            hints.add(False)
    if len(hints) > 1:
        raise InternalError(
            f"unable to autofill for '{config.get('name', '')}', model tensor configurations are "
            f"contradicting each other in terms of whether batching is supported"
        )
    return next(iter(hints), None)


def validate_against_engine(spec: ModelSpec, engine: EngineDescription) -> None:
    """Checks a config against an engine."""
    inputs = (*spec.model_inputs, *made_tensors(spec))
    for kind, wanted, provided in (
        ("inputs", inputs, engine.inputs),
        ("outputs", spec.model_outputs, engine.outputs),
    ):
        differs = len(wanted) != len(provided) if kind == "inputs" else len(wanted) > len(provided)
        if differs:
            raise InvalidArgumentError(
                f"unable to load model '{spec.name}', configuration expects {len(wanted)} {kind}, model "
                f"provides at most {len(provided)}"
            )
    batches = spec.max_batch_size > 0
    validate(spec, engine.signature(batches), DATATYPES)
    shapes = {each.name for each in (*engine.inputs, *engine.outputs) if each.is_shape}
    for tensor in (*spec.model_inputs, *spec.model_outputs):
        if tensor.is_shape != (tensor.name in shapes):
            is_one, says = ("is", "false") if tensor.name in shapes else ("is not", "true")
            raise InvalidArgumentError(
                f"unable to load model '{spec.name}', tensor '{tensor.name}' {is_one} a shape tensor of the "
                f"engine, but the configuration has is_shape_tensor: {says}"
            )
    optional = [tensor.name for tensor in spec.inputs if tensor.optional]
    if optional:
        raise UnsupportedError(
            f"unable to load model '{spec.name}', input '{optional[0]}' is optional and engines need all "
            f"their inputs: remove 'optional'"
        )
    if shapes and (spec.sequence is not None or spec.batch_outputs or spec.padding is not None):
        raise UnsupportedError(
            f"unable to load model '{spec.name}', shape tensors are not supported together with sequence "
            f"batching, batch_output and padding"
        )
