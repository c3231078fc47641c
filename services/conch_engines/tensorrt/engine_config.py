"""Completes and validates configs against an engine; rules and texts are those of Triton's backend.

Used by: `tensorrt_backend`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from conch.backends.signature import complete, made_tensors, validate
from conch.core.errors import InternalError, InvalidArgumentError, UnsupportedError
from conch.core.spec import ModelSpec
from conch_engines.tensorrt.engine_description import DATATYPES, EngineDescription


def complete_from_engine(
    config: dict[str, Any], engine: EngineDescription, profiles: Iterable[int], options: Mapping[str, str]
) -> dict[str, Any]:
    """Fills in batching, inputs and outputs that a config leaves out.

    Args:
        config: The config in JSON form; changed in place.
        engine: The engine.
        profiles: Numbers of the profiles that instances use.
        options: The backend's options.

    Raises:
        ConchError: The config contradicts the engine, or itself.
    """
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
    """Whether the dims of listed tensors leave room for a batch dimension; None if there are none."""
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
    """Checks a config against an engine.

    Raises:
        ConchError: They differ, or the config asks for what is not supported.
    """
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
