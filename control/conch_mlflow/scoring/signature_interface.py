"""A signature of MLflow as the interface for callers with tables. Pure, but for the version's file."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec
from conch_frames.column_rules import ISO, ColumnRule, ModelColumns, ModelInput
from conch_frames.interface import FrameInterface, OutputRule
from conch_mlflow.served_files import SIGNATURE_FILE
from conch_mlflow.signature import Signature, SignatureError, Tensor, parse_signature

_BINARY, _DATETIME = "binary", "datetime"
_PREDICT = "predict"


def interface_of_version(spec: ModelSpec) -> FrameInterface | None:
    """The interface of a version with a signature; None for others. An `InterfaceSource`.

    Raises:
        InvalidArgumentError: The signature can't be read.
    """
    try:
        text = (spec.version_directory / SIGNATURE_FILE).read_bytes()
    except OSError:
        return None
    try:
        signature = parse_signature(orjson.loads(text))
    except (ValueError, SignatureError) as error:
        raise InvalidArgumentError(f"model '{spec.name}': its signature can't be read: {error}") from None
    return None if signature is None else signature_interface(spec, signature)


def signature_interface(spec: ModelSpec, signature: Signature) -> FrameInterface:
    """The interface of a model with a signature.

    A model with one input that the signature does not name gets all columns of the signature as a matrix, as
    engines do. Tables without names in the signature go in by place, as in MLflow.
    """
    params = {each.name for each in signature.params}
    inputs = {
        each.name: ModelInput(each.name, each.datatype, spec.full_dims(each), each.optional)
        for each in spec.inputs
    }
    given = {name: each for name, each in inputs.items() if name not in params}
    entries = {each.name: each for each in signature.inputs}
    names = [each.name for each in signature.inputs if each.column and each.named]
    only = next(iter(given.values())) if len(given) == 1 else None
    matrix = only if only is not None and only.name not in entries and len(only.dims) < 3 else None
    if matrix is not None:
        rules = {name: _rule(name, matrix, entries[name]) for name in names}
    elif only is not None and not only.is_column and len(only.dims) == 2:
        matrix, rules = only, {}
    else:
        rules = {name: _rule(name, each, entries.get(name)) for name, each in given.items() if each.is_column}
    columns = ModelColumns(spec.name, given, rules, matrix, spec.max_batch_size, by_position=True)
    outputs = _wanted_outputs(spec, signature)
    return FrameInterface(
        columns,
        {name: inputs[name] for name in params if name in inputs},
        tuple(_output(name, entry) for name, entry in _entries(outputs, signature).items()),
    )


def _rule(name: str, of: ModelInput, entry: Tensor | None) -> ColumnRule:
    kind = "" if entry is None else entry.kind
    return ColumnRule(
        name=name,
        datatype=of.datatype,
        optional=of.optional,
        unit=ISO if kind == _DATETIME and of.datatype == "BYTES" else "",
        takes_booleans=False,
        is_binary=kind == _BINARY,
    )


def _wanted_outputs(spec: ModelSpec, signature: Signature) -> tuple[str, ...]:
    """The outputs that the predictions consist of: those of the signature, or as many of the model."""
    names = [each.name for each in spec.outputs]
    declared = [each.name for each in signature.outputs]
    if declared and set(declared) <= set(names):
        return tuple(declared)
    if len(declared) <= 1 < len(names):
        return (_PREDICT if _PREDICT in names else names[0],)
    return tuple(names)


def _entries(names: tuple[str, ...], signature: Signature) -> Mapping[str, Tensor | None]:
    """The signature's entries for outputs, by the outputs' names, which an engine may have changed."""
    declared = {each.name: each for each in signature.outputs}
    if declared.keys() == set(names):
        return {name: declared[name] for name in names}
    if len(names) == len(declared):
        return dict(zip(names, signature.outputs, strict=True))
    return dict.fromkeys(names)


def _output(output: str, entry: Tensor | None) -> OutputRule:
    if entry is None:
        return OutputRule(output, output, in_records=False, rank=0)
    named = entry.column and entry.named
    return OutputRule(
        output,
        entry.name if named else output,
        in_records=named,
        rank=len(entry.dims),
        is_binary=entry.kind == _BINARY,
    )
