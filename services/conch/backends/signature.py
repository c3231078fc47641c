"""Inputs and outputs of a model as its file declares them; validates and completes configs with them.

Rules and texts are those of Triton's backends, which share them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from conch.core.errors import InternalError, InvalidArgumentError, UnsupportedError
from conch.core.padding import made_inputs
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.validation import shape_text

log = logging.getLogger(__name__)

DEFAULT_MAX_BATCH_SIZE = 4


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One input or output of a model.

    Attributes:
        name: Its name in the model.
        datatype: The protocol's name of its element type; empty if it has none.
        dims: All dims, batch dimension included; -1 where variable. None if their number is variable.
        problem: Error raised on completing a config that uses it, if it has no datatype or no dims; without
            a datatype on validating one, too.
    """

    name: str
    datatype: str
    dims: tuple[int, ...] | None
    problem: str = ""

    def checked_datatype(self) -> str:
        """The datatype.

        Raises:
            UnsupportedError: It has none.
        """
        if not self.datatype:
            raise UnsupportedError(self.problem)
        return self.datatype


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs of a model, in its order.

    Attributes:
        inputs: Its inputs.
        outputs: Its outputs.
        initialized: Inputs with a value, which a run may override.
        batches: True if it supports batching; None: if the first dim of all tensors is variable.
        largest_batch: Its largest batch; None without a limit.
    """

    inputs: tuple[ModelTensor, ...]
    outputs: tuple[ModelTensor, ...]
    initialized: tuple[ModelTensor, ...] = ()
    batches: bool | None = None
    largest_batch: int | None = None

    @property
    def supports_batching(self) -> bool:
        """True if the first dim of all tensors is the batch."""
        if self.batches is not None:
            return self.batches
        return all(tensor.dims and tensor.dims[0] == -1 for tensor in (*self.inputs, *self.outputs))


def complete(config: dict[str, Any], signature: Signature, options: Mapping[str, str]) -> dict[str, Any]:
    """Fills in batching, inputs and outputs that the config leaves out.

    Raises:
        ConchError: The config contradicts the model, or the model has unsupported tensors.
    """
    name = config.get("name", "")
    size = int(config.get("max_batch_size") or 0)
    if signature.supports_batching:
        if size == 0:
            size = signature.largest_batch or _default_max_batch_size(options)
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
            config[key] = [_entry(tensor, skip) for tensor in tensors if tensor.name not in made]
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


def _entry(tensor: ModelTensor, skip: int) -> dict[str, Any]:
    datatype = tensor.checked_datatype()
    if tensor.dims is None:
        raise UnsupportedError(tensor.problem)
    entry: dict[str, Any] = {
        "name": tensor.name,
        "data_type": "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}",
        "dims": list(tensor.dims[skip:]),
    }
    if not entry["dims"]:
        # Config dims cannot be empty, so clients see one element for a scalar.
        entry["dims"] = [1]
        if skip:  # else dims of 1 stand for a scalar: `scalar_dims`
            entry["reshape"] = {"shape": []}
    return entry


def validate(spec: ModelSpec, signature: Signature, datatypes: Collection[str]) -> None:
    """Checks the config against the model.

    Args:
        spec: The config.
        signature: The model.
        datatypes: Those that the backend serves.

    Raises:
        ConchError: They differ; the text is Triton's.
    """
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
            if tensor.datatype not in datatypes:
                raise InternalError(
                    f"unsupported datatype TYPE_{tensor.datatype} for {kind} '{tensor.name}' for model "
                    f"'{spec.name}'"
                )
            _check_datatype(spec, kind, tensor, found)
            if found.dims is None:
                continue
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


def scalar_dims(spec: ModelSpec, tensor: TensorSpec, model_dims: tuple[int, ...] | None) -> tuple[int, ...]:
    """Dims, all 1, of a config where the model has a scalar, as they cannot be empty; () for no scalar."""
    dims = tensor.backend_dims
    return dims if spec.max_batch_size == 0 and model_dims == () and set(dims) == {1} else ()


def _check_datatype(spec: ModelSpec, kind: str, tensor: TensorSpec, found: ModelTensor) -> None:
    datatype = found.checked_datatype()
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
    if scalar_dims(spec, tensor, model_dims):
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
