"""Compares what clients see of two versions of a model. Pure, but for files that describe columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec, TensorSpec
from conch_frames.column_rules import ColumnRule
from conch_frames.interface import interface_of

_ANY = -1


def interface_differences(stable: ModelSpec, candidate: ModelSpec) -> tuple[str, ...]:
    """Reasons for which clients of the stable version can't use the candidate, one sentence each.

    Optional inputs and outputs that only the candidate has are no reason.
    """
    return tuple(_differences(stable, candidate))


def _differences(stable: ModelSpec, candidate: ModelSpec) -> Iterator[str]:
    inputs, own_inputs = _by_name(stable.inputs), _by_name(candidate.inputs)
    outputs, own_outputs = _by_name(stable.outputs), _by_name(candidate.outputs)
    for name, tensor in inputs.items():
        yield from _tensor("input", tensor, own_inputs.get(name))
    for name, tensor in own_inputs.items():
        if name not in inputs and not tensor.optional:
            yield f"input '{name}' is required, and stable does not have it"
        elif name in inputs and inputs[name].optional and not tensor.optional:
            yield f"input '{name}' is required, and optional in stable"
    for name, tensor in outputs.items():
        yield from _tensor("output", tensor, own_outputs.get(name))
    if (stable.max_batch_size > 0) != (candidate.max_batch_size > 0):
        yield f"max_batch_size is {candidate.max_batch_size}, in stable {stable.max_batch_size}"
    if stable.decoupled != candidate.decoupled:
        yield f"it is {_kind(candidate)}, and stable is {_kind(stable)}"
    if (stable.sequence is None) != (candidate.sequence is None):
        yield f"it has {'no ' if candidate.sequence is None else ''}sequence batching, unlike stable"
    elif _states(stable) != _states(candidate):
        yield "the states of its sequences differ from those of stable"
    yield from _columns(stable, candidate)


def _columns(stable: ModelSpec, candidate: ModelSpec) -> Iterator[str]:
    """Columns that mean something else: a table is converted before a route has chosen the version."""
    try:
        own, others = interface_of(candidate).columns, interface_of(stable).columns
    except InvalidArgumentError as error:
        yield error.message
        return
    if others.matrix is not None and others.rules and list(others.rules) != list(own.rules):
        yield f"the columns of input '{others.matrix.name}' are not those of stable, in its order"
    for name, rule in others.rules.items():
        if name in own.rules and _meaning(own.rules[name]) != _meaning(rule):
            yield f"column '{name}' has other codes, dates or nulls than in stable"


def _meaning(rule: ColumnRule) -> tuple[object, ...]:
    """The parts of a rule by which the same value becomes another one in the tensor."""
    return rule.categories if rule.codes else None, rule.unit, rule.null, rule.is_binary


def _tensor(kind: str, stable: TensorSpec, candidate: TensorSpec | None) -> Iterator[str]:
    name = stable.name
    if candidate is None:
        yield f"{kind} '{name}' is missing"
    elif candidate.datatype != stable.datatype:
        yield f"{kind} '{name}' is {candidate.datatype}, in stable {stable.datatype}"
    elif len(candidate.dims) != len(stable.dims):
        yield f"{kind} '{name}' has {len(candidate.dims)} dimensions, in stable {len(stable.dims)}"
    elif not all(
        own in (dim, _ANY) or (dim == _ANY and kind == "output")
        for dim, own in zip(stable.dims, candidate.dims, strict=True)
    ):
        yield f"{kind} '{name}' has the shape {list(candidate.dims)}, in stable {list(stable.dims)}"


def _by_name(tensors: tuple[TensorSpec, ...]) -> Mapping[str, TensorSpec]:
    return {tensor.name: tensor for tensor in tensors}


def _kind(spec: ModelSpec) -> str:
    return "decoupled" if spec.decoupled else "not decoupled"


def _states(spec: ModelSpec) -> list[tuple[str, str, str, tuple[int, ...]]]:
    states = () if spec.sequence is None else spec.sequence.states
    return sorted((each.input_name, each.output_name, each.datatype, each.dims) for each in states)
