"""Exported programs (``torch.export.save``): signature, completion and runs.

A program tells shapes, datatypes, bounds and guards of its inputs, which are checked before a run by
`ProgramDescription` and `Guards`: PyTorch's own check costs more than the run of a small model, and runs code
of the file.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conch.backends.signature import ModelTensor, Signature, made_tensors, validate
from conch.core.engine_text import engine_text
from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.spec import ModelSpec
from conch.core.tensor import ELEMENT_SIZES
from conch.core.validation import shape_text
from conch_engines.pytorch import program_archive
from conch_engines.pytorch.program_archive import RefusedProgramError
from conch_engines.pytorch.program_guards import Guards
from conch_engines.pytorch.tensor_naming import leaf_paths, leaf_positions
from conch_engines.pytorch.torch_arrays import datatypes_of
from conch_engines.pytorch.torch_function import Program
from conch_engines.pytorch.torch_settings import ALLOW_PICKLE

_UNBOUNDED = 1 << 40
_one_load = threading.Lock()  # PyTorch keeps the deserializer of a load in a global


@dataclass(frozen=True, slots=True)
class Bounds:
    """The values of one dim: a fixed one, or ``factor * symbol + offset`` with its range."""

    symbol: str
    least: int
    most: int
    factor: int = 1
    offset: int = 0


def load_program(torch: Any, path: Path, allow_pickle: bool) -> Any:
    """Loads an exported program."""
    with _one_load, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.export.load(str(path)) if allow_pickle else program_archive.load(torch, path)
        except RefusedProgramError as error:
            raise InvalidArgumentError(
                f"'{path}' could run code in the server: {error}; export the model again with tensors and "
                f"operators of tensors only, or set parameter '{ALLOW_PICKLE}' to 'true' if you trust it"
            ) from error
        except Exception as error:  # of the engine: an archive made by hand can fail in any way
            raise InternalError(f"unable to load exported program '{path}': {engine_text(error)}") from error


class ProgramDescription:
    """Inputs and outputs of an exported program.

    Attributes:
        input_paths: Path of each input, in order.
        output_paths: Path of each output, in order.
        names: Argument names of the inputs.
        signature: The tensors under the names that a completed config gets.
        bounds: Bounds of each input's dims; None for an input that is no tensor.
        dtypes: The torch dtype of each input.
    """

    def __init__(self, torch: Any, program: Any, model: str) -> None:
        from torch.utils._pytree import treespec_dumps

        spec = program.call_spec
        self.input_paths = leaf_paths(treespec_dumps(spec.in_spec), "")
        self.output_paths = leaf_paths(treespec_dumps(spec.out_spec), "RESULT")
        signature = program.graph_signature
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        self.names = [str(name) for name in signature.user_inputs]
        ranges = program.range_constraints
        inputs = [values.get(name) for name in self.names]
        outputs = [values.get(str(name)) for name in signature.user_outputs]
        self.bounds = [_bounds(value, ranges) for value in inputs]
        self.dtypes = [getattr(value, "dtype", None) for value in inputs]
        self.guards = Guards(getattr(program, "_guards_code", []), self.names)  # of PyTorch 2.9 on
        self.mutates_inputs = bool(signature.user_inputs_to_mutate) or _writes(torch, program)
        out_bounds = [_bounds(value, ranges) for value in outputs]
        datatypes = datatypes_of(torch)
        batch = _batch_bounds([*self.bounds, *out_bounds])
        self.signature = Signature(
            _tensors(self.names, inputs, self.bounds, datatypes, model),
            _tensors([f"OUTPUT__{n}" for n in range(len(outputs))], outputs, out_bounds, datatypes, model),
            batches=batch is not None,
            largest_batch=None if batch is None or batch.most >= _UNBOUNDED else batch.most,
        )

    def named(self, spec: ModelSpec) -> Signature:
        """The signature under the names of a config."""
        names = [tensor.name for tensor in (*spec.model_inputs, *made_tensors(spec))]
        inputs = leaf_positions(spec.name, "input", names, self.input_paths, self.names)
        outputs = [tensor.name for tensor in spec.model_outputs]
        results = leaf_positions(spec.name, "output", outputs, self.output_paths)
        return replace(
            self.signature,
            inputs=tuple(replace(self.signature.inputs[place], name=name) for name, place in inputs.items()),
            outputs=tuple(
                replace(self.signature.outputs[place], name=name) for name, place in results.items()
            ),
        )


def _tensors(
    names: Sequence[str],
    values: Sequence[Any],
    bounds: Sequence[Sequence[Bounds] | None],
    datatypes: Mapping[Any, str],
    model: str,
) -> tuple[ModelTensor, ...]:
    tensors = []
    for name, value, dims in zip(names, values, bounds, strict=True):
        datatype = datatypes.get(getattr(value, "dtype", None), "")
        problem = (
            ""
            if datatype
            else (
                f"'{name}' of exported program '{model}' is no tensor of a datatype that the protocol has; "
                f"export the model with tensors as inputs and outputs"
            )
        )
        shape = tuple(-1 if dim.symbol else dim.least for dim in dims or ())
        tensors.append(ModelTensor(name, datatype, shape, problem))
    return tuple(tensors)


def _bounds(value: Any, ranges: Mapping[Any, Any]) -> list[Bounds] | None:
    """Bounds of a tensor's dims; None if the value is no tensor."""
    if not hasattr(value, "shape"):
        return None
    dims = []
    for dim in value.shape:
        if isinstance(dim, int):
            dims.append(Bounds("", dim, dim))
            continue
        expression = dim.node.expr
        found = ranges.get(expression)
        least, most = (0, _UNBOUNDED) if found is None else (_number(found.lower), _number(found.upper))
        if least == 2 and expression.is_symbol:
            least = 0  # PyTorch's own ranges begin at 2; it takes 0 and 1 as well
        dims.append(Bounds(*_linear(expression, least, most)))
    return dims


def _linear(expression: Any, least: int, most: int) -> tuple[str, int, int, int, int]:
    """The fields of `Bounds`; an expression that is not linear in one symbol counts as a symbol."""
    if len(expression.free_symbols) == 1:
        (symbol,) = expression.free_symbols
        factor = expression.coeff(symbol)
        offset = expression - factor * symbol
        if factor.is_Integer and factor > 0 and offset.is_Integer:
            return str(symbol), least, most, int(factor), int(offset)
    return str(expression), least, most, 1, 0


def _writes(torch: Any, program: Any) -> bool:
    """True if an operator of the graph may write to an input's memory; PyTorch 2.13 does not list these."""
    graphs = [each.graph for each in program.graph_module.modules() if isinstance(each, torch.fx.GraphModule)]
    return any(node.op == "call_function" and node.is_impure() for graph in graphs for node in graph.nodes)


def _number(value: Any) -> int:
    """A bound of a symbol, which may be one of two kinds of infinity."""
    return _UNBOUNDED if value >= _UNBOUNDED else int(max(value, 0))


def _batch_bounds(tensors: Sequence[Sequence[Bounds] | None]) -> Bounds | None:
    """Bounds of the batch dimension: the first dim of all tensors, if that alone has its symbol."""
    if not tensors or not all(tensors):
        return None
    first = [dims[0] for dims in tensors if dims]
    sizes = {(dim.symbol, dim.factor, dim.offset) for dim in first}
    inner = {dim.symbol for dims in tensors for dim in (dims or ())[1:]}
    shared = len(sizes) == 1 and first[0].factor == 1 and first[0].symbol not in ("", *inner)
    return first[0] if shared else None


def _size_text(dim: Bounds) -> str:
    factor = "" if dim.factor == 1 else f"{dim.factor}*"
    return f"{factor}{dim.symbol}" + (f"{dim.offset:+}" if dim.offset else "")


class ExportedProgram(Program):
    """An exported program with the config's names."""

    def __init__(self, torch: Any, spec: ModelSpec, program: Any, device: str | None) -> None:
        from torch.utils import _pytree

        self._described = ProgramDescription(torch, program, spec.name)
        described = self._described
        validate(spec, described.named(spec), ELEMENT_SIZES)
        self.failure = f"PyTorch execute failure in model '{spec.name}': "
        made = made_tensors(spec)
        names = [tensor.name for tensor in (*spec.model_inputs, *made)]
        places = leaf_positions(spec.name, "input", names, described.input_paths, described.names)
        by_place = {place: name for name, place in places.items()}
        self.leaves: Sequence[str] = tuple(by_place[place] for place in range(len(names)))
        outputs = [tensor.name for tensor in spec.model_outputs]
        self.results: Mapping[str, int] = leaf_positions(spec.name, "output", outputs, described.output_paths)
        self.keeps_inputs = not described.mutates_inputs
        self._scalars = frozenset(leaf for leaf, dims in enumerate(described.bounds) if dims == [])
        if device is not None and device != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        module = program.module(check_guards=False)
        self._forward = module.forward
        self._in_spec, self._flatten = program.call_spec.in_spec, _pytree.tree_leaves
        self._unflatten = _pytree.tree_unflatten
        # Most programs take tensors by position; others get their structure back.
        self._flat = all(path == f"ARGS[{place}]" for place, path in enumerate(described.input_paths))
        self._plain = described.output_paths == ["RESULT"]

    def convert(self, leaf: int, value: Any) -> Any:
        """As the base's; dims of 1 of a config stand for a scalar."""
        tensor = super().convert(leaf, value)
        return tensor if leaf not in self._scalars else tensor.reshape(())

    def check(self, values: Sequence[Any]) -> None:
        """Compares datatypes and shapes with what the program was exported for."""
        described = self._described
        symbols: dict[str, int] = {}
        for leaf, (value, dims) in enumerate(zip(values, described.bounds, strict=True)):
            if dims is None:
                continue
            shape = value.shape
            fits = value.dtype is described.dtypes[leaf] and len(shape) == len(dims)
            if not fits:
                self._refuse(leaf, value)
            for size, dim in zip(shape, dims, strict=True):
                if not dim.least <= size <= dim.most:
                    self._refuse(leaf, value)
                if dim.symbol:
                    number, rest = divmod(size - dim.offset, dim.factor)
                    if rest or symbols.setdefault(dim.symbol, number) != number:
                        self._refuse(leaf, value)
        failed = described.guards.failed([getattr(value, "shape", ()) for value in values])
        if failed:
            shapes = ", ".join(
                f"'{name}' {shape_text(tuple(value.shape))}"
                for name, value in zip(self.leaves, values, strict=True)
            )
            raise InvalidArgumentError(
                f"the shapes of the inputs ({shapes}) fail a guard of the exported program: {failed}; the "
                f"export fixed a path of the model for shapes like its example's"
            )

    def _refuse(self, leaf: int, value: Any) -> None:
        described = self._described
        dims = described.bounds[leaf] or ()
        expected = ", ".join(
            str(dim.least)
            if not dim.symbol
            else f"{_size_text(dim)}: {dim.least} or more"
            if dim.most >= _UNBOUNDED
            else f"{_size_text(dim)}: {dim.least} to {dim.most}"
            for dim in dims
        )
        raise InvalidArgumentError(
            f"input '{self.leaves[leaf]}' has shape {shape_text(tuple(value.shape))} of {value.dtype}, but "
            f"the model was exported for [{expected}] of {described.dtypes[leaf]}"
        )

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        """Runs the program."""
        if self._flat:
            result = self._forward(*values)
        else:
            args, kwargs = self._unflatten(values, self._in_spec)
            result = self._forward(*args, **kwargs)
        return (result,) if self._plain else self._flatten(result)

    def close(self) -> None:
        """Drops the program."""
        del self._forward
