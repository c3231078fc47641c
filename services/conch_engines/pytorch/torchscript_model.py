"""TorchScript modules: reads the schema of ``forward``, loads and runs them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conch.core.engine_text import engine_text
from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.spec import ModelSpec
from conch_engines.pytorch.tensor_naming import Argument, argument_positions, result_positions, takes_dict
from conch_engines.pytorch.torch_function import Program

_SCALARS = {"int": int, "float": float, "bool": bool}
_TUPLES = (tuple, list)
_UNKNOWN = frozenset({"prim::CallMethod", "prim::CallFunction"})  # calls that are not inlined


# TorchScript finds an attribute by its name in the source text or, through `getattr`, in a string. All
# patterns take time in proportion to the text, whatever it is.
_FILE_ACCESS = re.compile(rb"\bfrom_file\b|\.[\s\\]*save\b")
_SAVE = re.compile(rb"\bsave\b")
_GETATTR = re.compile(rb"""\bgetattr\((?:(?!getattr)[^"'#\\])*, "([^"\\\n]*)"\)""")
_DEEPEST = 100


def refuse_file_access(torch: Any, path: Path) -> None:
    """Refuses a module whose code calls ``torch.save`` or ``torch.from_file``.

    The code is read before it is loaded, as methods ``__setstate__`` run while a module is loaded.
    """
    reader = torch._C.PyTorchFileReader(str(path))
    names = reader.get_all_records()
    # PyTorch's reader takes upper and lower case for the same.
    if len({name.casefold() for name in names}) != len(names) or "model.json" in map(str.casefold, names):
        raise InvalidArgumentError(f"'{path}' has members that torch.jit.save does not write")
    for name in names:
        if not name.casefold().startswith("code/"):
            continue
        code = reader.get_record(name)
        # PyTorch writes no comments; one might stand between the dot and the name.
        found = _FILE_ACCESS.search(code) or (b"#" in code and _SAVE.search(code)) or _hidden_access(code)
        if found:
            text = found[0][:100].decode(errors="replace")
            raise InvalidArgumentError(
                f"'{path}' could write or read files of the server: '{name}' has '{text}'. Remove calls of "
                f"torch.save and torch.from_file from the model, and rename methods that have these names"
            )


def _hidden_access(code: bytes) -> re.Match[bytes] | None:
    """A `getattr` of an operator that accesses files, or in a form that PyTorch does not write."""
    for _ in range(_DEEPEST):
        for found in _GETATTR.finditer(code):
            if found[1] in (b"save", b"from_file"):
                return found
        code, count = _GETATTR.subn(b"_", code)  # so that those around them match
        if not count:
            break
    return re.search(rb"\bgetattr\b", code)


def load_module(torch: Any, path: Path, device: str | None) -> Any:
    """Loads a module to a device; None leaves its parts where they were saved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as a whole
        try:
            refuse_file_access(torch, path)
            return torch.jit.load(str(path), map_location=device)
        except InvalidArgumentError:
            raise
        except Exception as error:  # of the engine, or of the module's own code
            raise InternalError(f"unable to load TorchScript model '{path}': {engine_text(error)}") from error


def arguments_of(module: Any) -> list[Argument]:
    """The arguments of a module's ``forward``."""
    try:
        schema = module.forward.schema
    except AttributeError as error:
        raise InternalError("the TorchScript module has no method 'forward'") from error
    return [_argument(each) for each in schema.arguments[1:]]


def _argument(argument: Any) -> Argument:
    kind = str(argument.type)
    optional = kind.startswith("Optional[") and kind.endswith("]")
    if optional:
        kind = kind.removeprefix("Optional[").removesuffix("]")
    has_default = argument.has_default_value()
    return Argument(
        argument.name, kind, not (optional or has_default), argument.default_value if has_default else None
    )


class TorchScriptProgram(Program):
    """A TorchScript module with the config's names."""

    failure = "PyTorch execute failure: "

    def __init__(self, torch: Any, spec: ModelSpec, module: Any) -> None:
        self._forward = module.forward
        self._tensor = torch.Tensor
        arguments = arguments_of(module)
        self._arguments: list[Argument] = arguments
        self._as_dict = takes_dict(arguments)
        self.results: Mapping[str, int] = result_positions(spec)
        if self._as_dict:
            self.leaves: Sequence[str] = tuple(tensor.name for tensor in spec.model_inputs)
        else:
            names = {place: name for name, place in argument_positions(spec, arguments).items()}
            self.leaves = tuple(names.get(place, "") for place in range(len(arguments)))
        self._check_strings(spec)
        # Arguments after the last input keep their defaults, so that most calls pass what they always did.
        self.keeps_inputs = not _writes_inputs(module)

    def _check_strings(self, spec: ModelSpec) -> None:
        batch = int(spec.max_batch_size > 0)
        for kind, tensors in (("input", spec.model_inputs), ("output", spec.model_outputs)):
            for tensor in tensors:
                if tensor.datatype == "BYTES" and len(tensor.backend_dims) + batch != 1:
                    raise InternalError(
                        f"Triton only supports 1 dimensional List of String as {kind} for "
                        f"'{tensor.name}' for model '{spec.name}'"
                    )

    def convert(self, leaf: int, value: Any) -> Any:
        """A tensor as the argument's type; the default where it was left out."""
        if self._as_dict:
            return value
        argument = self._arguments[leaf]
        if value is None:
            if argument.required:
                raise InvalidArgumentError(f"input for argument '{argument.name}' is missing")
            return argument.default
        if argument.kind == "Tensor":
            return value
        return _plain(argument, value)

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        """Calls ``forward``; a tuple is flattened by one level."""
        if self._as_dict:
            named = zip(self.leaves, values, strict=True)
            result = self._forward({name: value for name, value in named if value is not None})
        else:
            result = self._forward(*values)
        if isinstance(result, tuple):
            return result
        if isinstance(result, list) and not all(isinstance(value, str) for value in result):
            return [None]  # refused as no output, as Triton does
        return (result,)

    def close(self) -> None:
        """Drops the module."""
        del self._forward


def _plain(argument: Argument, value: Any) -> Any:
    """The value of an argument that is not a tensor, from an input of one element."""
    if argument.kind == "List[str]":
        if not isinstance(value, list):
            raise InvalidArgumentError(f"argument '{argument.name}' of the model is a list of strings")
        return value
    if isinstance(value, list):
        if argument.kind == "str" and len(value) == 1:
            return value[0]
    elif argument.kind in _SCALARS and value.numel() == 1:
        return _SCALARS[argument.kind](value.item())
    raise InvalidArgumentError(
        f"argument '{argument.name}' of the model is of type {argument.kind}: its input must have one element"
    )


def _writes_inputs(module: Any) -> bool:
    """True if an operation of ``forward`` may write to an argument's memory."""
    try:
        nodes = list(module.inlined_graph.nodes())
    except (AttributeError, RuntimeError):
        return True
    while nodes:
        node = nodes.pop()
        if "!" in node.schema().partition("->")[0] or node.kind() in _UNKNOWN:
            return True
        if node.hasAttribute("Subgraph"):  # of a fork
            nodes.extend(node.g("Subgraph").nodes())
        for block in node.blocks():
            nodes.extend(block.nodes())
    return False
