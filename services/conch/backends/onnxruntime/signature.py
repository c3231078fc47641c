"""Reads an ONNX model's inputs and outputs; validates and completes configs with them.

Rules and texts are those of Triton's ONNX Runtime backend.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from conch.core.errors import InternalError, InvalidArgumentError, UnsupportedError
from conch.core.padding import made_inputs
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.validation import shape_text

log = logging.getLogger(__name__)

DEFAULT_MAX_BATCH_SIZE = 4

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}


_FIXES = {
    True: "; export the model with a Cast of it, for example to FP32",
    False: "; export the model without it (scikit-learn's ZipMap: options={'zipmap': False})",
}
"""Advice for unsupported element types, and for values that are not tensors."""


@dataclass(frozen=True, slots=True)
class OnnxTensor:
    """One input or output of an ONNX model: its type as ONNX Runtime prints it, all dims, -1 for variable."""

    name: str
    onnx_type: str
    dims: tuple[int, ...]

    def datatype(self, model: str) -> str:
        """The protocol's datatype name.

        Raises:
            UnsupportedError: It is not a tensor, or its type has no datatype.
        """
        datatype = _DATATYPES.get(self.onnx_type)
        if datatype is None:
            what = (
                "BF16 tensors are not supported by the onnxruntime backend"
                if self.onnx_type == "tensor(bfloat16)"
                else "expected a tensor of a type the protocol has"
            )
            what += _FIXES[self.onnx_type.partition("(")[0] == "tensor"]
            raise UnsupportedError(
                f"unsupported ONNX type '{self.onnx_type}' for I/O '{self.name}' of model '{model}': {what}"
            )
        return datatype


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs of an ONNX model, in its order; a run may override the `initialized` inputs."""

    inputs: tuple[OnnxTensor, ...]
    outputs: tuple[OnnxTensor, ...]
    initialized: tuple[OnnxTensor, ...] = ()

    @classmethod
    def of(cls, session: Any) -> Signature:
        """Reads a session's signature."""
        return cls(
            _tensors(session.get_inputs()),
            _tensors(session.get_outputs()),
            _tensors(session.get_overridable_initializers()),
        )


def _tensors(arguments: Iterable[Any]) -> tuple[OnnxTensor, ...]:
    return tuple(
        OnnxTensor(
            argument.name,
            argument.type,
            tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in argument.shape or ()),
        )
        for argument in arguments
    )


def complete(config: dict[str, Any], signature: Signature, options: Mapping[str, str]) -> dict[str, Any]:
    """Fills in batching, inputs and outputs that the config leaves out.

    Raises:
        ConchError: The config contradicts the model, or the model has unsupported tensors.
    """
    name = config.get("name", "")
    batching = all(tensor.dims and tensor.dims[0] == -1 for tensor in (*signature.inputs, *signature.outputs))
    size = int(config.get("max_batch_size") or 0)
    if batching:
        if size == 0:
            size = _default_max_batch_size(options)
            config["max_batch_size"] = size
            log.info("model '%s' supports batching: max_batch_size set to %d", name, size)
        schedulers = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")
        if size > 1 and not any(key in config for key in schedulers):
            config["dynamic_batching"] = {}
    elif size != 0:
        raise InvalidArgumentError(
            f"autofill failed for model '{name}': model does not support batching while non-zero "
            f"max_batch_size is specified"
        )
    skip = 1 if size > 0 else 0
    made = _server_side(config.get("sequence_batching") or {}) | _made_by_server(config)
    for key, tensors in (("input", signature.inputs), ("output", signature.outputs)):
        if not config.get(key):
            config[key] = [_entry(tensor, name, skip) for tensor in tensors if tensor.name not in made]
    return config


def _server_side(sequences: Mapping[str, Any]) -> frozenset[str]:
    """Control and state tensors of sequence batching, which clients do not send."""
    states = sequences.get("state") or ()
    return frozenset(
        (
            *(tensor.get("name", "") for tensor in sequences.get("control_input") or ()),
            *(state.get(key, "") for state in states for key in ("input_name", "output_name")),
        )
    )


def _made_by_server(config: Mapping[str, Any]) -> frozenset[str]:
    """Inputs that the server makes: batch inputs, lengths and masks."""
    named = {name for made in config.get("batch_input", ()) for name in made.get("target_name", ())}
    parameters = config.get("parameters", {})
    texts = {key: str(value.get("string_value", "")) for key, value in parameters.items()}
    return made_inputs(texts).union(named)


def _default_max_batch_size(options: Mapping[str, str]) -> int:
    text = options.get("default-max-batch-size", "")
    if not text:
        return DEFAULT_MAX_BATCH_SIZE
    try:
        return max(int(text), 0)
    except ValueError as error:
        raise InvalidArgumentError(
            f"backend option 'default-max-batch-size' must be a whole number, got '{text}'"
        ) from error


def _entry(tensor: OnnxTensor, model: str, skip: int) -> dict[str, Any]:
    datatype = tensor.datatype(model)
    entry: dict[str, Any] = {
        "name": tensor.name,
        "data_type": "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}",
        "dims": list(tensor.dims[skip:]),
    }
    if not entry["dims"]:
        # Config dims cannot be empty, so clients see one element for a scalar.
        entry["dims"] = [1]
        entry["reshape"] = {"shape": []}
    return entry


def validate(spec: ModelSpec, signature: Signature) -> None:
    """Checks the config against the model. Raises ConchError: they differ; the text is Triton's."""
    made = made_tensors(spec)
    inputs = (*spec.model_inputs, *made)
    names = {tensor.name for tensor in inputs}
    provided_inputs = (*signature.inputs, *(each for each in signature.initialized if each.name in names))
    if len(inputs) != len(provided_inputs):
        raise InvalidArgumentError(
            f"unable to load model '{spec.name}', configuration expects {len(inputs)} inputs, model "
            f"provides {len(provided_inputs)}"
        )
    scattered = {name for split in spec.batch_outputs for name in split.names}
    for kind, wanted, provided in (
        ("input", inputs, provided_inputs),
        ("output", spec.model_outputs, signature.outputs),
    ):
        by_name = {tensor.name: tensor for tensor in provided}
        for tensor in wanted:
            found = by_name.get(tensor.name)
            if found is None:
                raise InvalidArgumentError(
                    f"unexpected inference {kind} '{tensor.name}', allowed {kind}s are: "
                    f"{', '.join(sorted(by_name))}"
                )
            _check_datatype(spec, kind, tensor, found)
            if tensor.ragged:
                _check_ragged(spec, tensor, found.dims)
            elif tensor in made:
                _check_rank(spec, tensor, found.dims)
            elif tensor.name not in scattered or kind == "input":  # its shape follows an input
                _check_dims(spec, tensor, found.dims)


def made_tensors(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """Inputs that the server makes, with all their dimensions."""
    ranks = {"BATCH_ITEM_SHAPE": 2}
    batch = [
        TensorSpec(name, made.datatype, (-1,) * ranks.get(made.kind, 1))
        for made in spec.batch_inputs
        for name in made.names
    ]
    lengths, masks = [], []
    for rule in spec.padding.inputs if spec.padding is not None else ():
        if rule.lengths is not None:
            dims = (-1, 1) if rule.lengths.column else (-1,)
            lengths.append(TensorSpec(rule.lengths.name, rule.lengths.datatype, dims))
        if rule.mask is not None:
            masks.append(TensorSpec(rule.mask.name, rule.mask.datatype, (-1, -1)))
    return (*batch, *lengths, *masks)


def _check_ragged(spec: ModelSpec, tensor: TensorSpec, model_dims: tuple[int, ...]) -> None:
    start = f"unable to load model '{spec.name}', configuration expects model provides input with shape [-1] "
    if tensor.optional:
        raise InvalidArgumentError(
            f"{start}for ragged input '{tensor.name}', which is not supported for optional input"
        )
    if model_dims != (-1,):
        raise InvalidArgumentError(
            f"{start} for ragged input '{tensor.name}', model provides {shape_text(model_dims)}"
        )


def _check_rank(spec: ModelSpec, tensor: TensorSpec, model_dims: tuple[int, ...]) -> None:
    if len(model_dims) != len(tensor.dims):
        raise InvalidArgumentError(
            f"unable to load model '{spec.name}', the server makes input '{tensor.name}' with "
            f"{len(tensor.dims)} dimensions, model provides {shape_text(model_dims)}"
        )


def is_scalar(spec: ModelSpec, tensor: TensorSpec, model_dims: tuple[int, ...]) -> bool:
    """True if the config has one element where the model has a scalar: config dims cannot be empty."""
    return spec.max_batch_size == 0 and not model_dims and tensor.backend_dims == (1,)


def _check_datatype(spec: ModelSpec, kind: str, tensor: TensorSpec, found: OnnxTensor) -> None:
    if tensor.datatype not in _DATATYPES.values():
        raise InternalError(
            f"unsupported datatype TYPE_{tensor.datatype} for {kind} '{tensor.name}' for model '{spec.name}'"
        )
    datatype = found.datatype(spec.name)
    if tensor.datatype != datatype:
        expected, provided = (
            "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}" for name in (tensor.datatype, datatype)
        )
        raise InvalidArgumentError(
            f"unable to load model '{spec.name}', configuration expects datatype {expected} for {kind} "
            f"'{tensor.name}', model provides {provided}"
        )


def _check_dims(spec: ModelSpec, tensor: TensorSpec, model_dims: tuple[int, ...]) -> None:
    batches = spec.max_batch_size > 0
    start = f"model '{spec.name}', tensor '{tensor.name}': "
    if batches and (not model_dims or model_dims[0] != -1):
        raise InvalidArgumentError(
            f"{start}for the model to support batching the shape should have at least 1 dimension and the "
            f"first dimension must be -1; but shape expected by the model is {shape_text(model_dims)}"
        )
    if is_scalar(spec, tensor, model_dims):
        return
    dims = (-1, *tensor.backend_dims) if batches else tensor.backend_dims
    if len(dims) == len(model_dims) and all(
        -1 in (want, got) or want == got for want, got in zip(model_dims, dims, strict=True)
    ):
        return
    specified = (
        f"(an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, "
        f"making complete shape {shape_text(dims)})"
        if batches
        else f"(shape {shape_text(dims)})"
    )
    raise InvalidArgumentError(
        f"{start}the model expects {len(model_dims)} dimensions (shape {shape_text(model_dims)}) but the "
        f"model configuration specifies {len(dims)} dimensions {specified}"
    )
