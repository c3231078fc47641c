"""Maps the names of a config to a PyTorch model's arguments and results.

TorchScript: by argument name, by ``<name>__<index>``, or by order. PT2 archives: by ``INPUT__<index>``, by
path such as ``ARGS[0][key]`` or ``RESULT[1]``, or by argument name. Rules and texts are those of Triton's
PyTorch backend.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from conch.backends.signature import made_tensors
from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.spec import ModelSpec

log = logging.getLogger(__name__)

_ONE_KIND = "Only a single input of type Dict(str, Tensor) or input(s) of type Tensor are supported."


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of TorchScript's ``forward``.

    Attributes:
        name: Its name.
        kind: Its type as TorchScript prints it, without ``Optional``.
        required: True if it must be given.
        default: Its value where it is not given.
    """

    name: str
    kind: str
    required: bool = True
    default: object = None

    @property
    def is_served(self) -> bool:
        """True if the argument can be an input."""
        return self.kind in {"Tensor", "List[str]", "int", "float", "bool", "str"}


def takes_dict(arguments: Sequence[Argument]) -> bool:
    """True if ``forward`` takes all inputs in one dict. Raises InternalError: an argument can't be served."""
    dicts = [argument.kind.startswith("Dict[") for argument in arguments]
    if dicts == [True]:
        return True
    if sum(dicts) > 1:
        raise InternalError(
            "Multiple inputs of kind DictType were detected. Only a single input of type Dict(str, Tensor) "
            "is supported."
        )
    for argument in arguments:
        if argument.required and not argument.is_served:
            raise InternalError(f"An input of type '{argument.kind}' was detected in the model. {_ONE_KIND}")
    return False


def argument_positions(spec: ModelSpec, arguments: Sequence[Argument]) -> dict[str, int]:
    """The argument of each input of the config, controls, states and batch inputs included."""
    names = [tensor.name for tensor in spec.inputs]
    made = [tensor.name for tensor in made_tensors(spec)]
    server = [tensor.name for tensor in spec.model_inputs[len(names) :]]
    required = sum(argument.required for argument in arguments)
    count = len(names) + len(made) + len(server)
    if not required <= count <= len(arguments):
        raise InvalidArgumentError(
            f"unable to load model '{spec.name}', configuration expects {count} inputs, model provides "
            f"{len(arguments)}"
        )
    by_name = {argument.name: place for place, argument in enumerate(arguments)}
    _check_states(spec, by_name)
    positions = _positions(spec.name, "input", names, by_name)
    for name in server:
        place = by_name.get(name, _index_of(name))
        if place is None:
            raise InternalError(f"input '{name}' does not follow <name>__<index> naming convention.")
        positions[name] = place
    for place, name in enumerate(made, len(names)):
        positions[name] = by_name.get(name, place)
    _check_places(spec.name, positions, arguments)
    return positions


def result_positions(spec: ModelSpec) -> dict[str, int]:
    """The place of each output of the config in the results of ``forward``."""
    return _positions(spec.name, "output", [tensor.name for tensor in spec.model_outputs], {})


def _positions(model: str, kind: str, names: Sequence[str], by_name: Mapping[str, int]) -> dict[str, int]:
    """Places of names: by argument name, else by index, else in order; one rule for all names."""
    if not names:
        raise InternalError(f"model configuration must contain at least one {kind}, none were specified.")
    if all(name in by_name for name in names):
        return {name: by_name[name] for name in names}
    indices = [_index_of(name) for name in names]
    found = [index for index in indices if index is not None]
    if len(found) == len(names):
        return dict(zip(names, found, strict=True))
    if any("__" in name for name in names):
        log.warning(
            "model '%s': not all %ss are named <name>__<index>, so they are taken in the order of the config",
            model,
            kind,
        )
    return {name: place for place, name in enumerate(names)}


def _index_of(name: str) -> int | None:
    _, mark, digits = name.partition("__")
    return int(digits) if mark and digits.isdecimal() else None


def _check_states(spec: ModelSpec, by_name: Mapping[str, int]) -> None:
    states = () if spec.sequence is None else spec.sequence.states
    if not states:
        return
    start = f"PyTorch model '{spec.name}' is using sequence batching with state but"
    for tensor in (*spec.inputs, *spec.outputs):
        if _index_of(tensor.name) is None and tensor.name not in by_name:
            raise InvalidArgumentError(
                f"{start} not all inputs and outputs follow the <name>__<index> naming convention. "
            )
    for state in states:
        for name in (state.input_name, state.output_name):
            if _index_of(name) is None and name not in by_name:
                raise InvalidArgumentError(
                    f"{start} state '{name}' does not follow the <name>__<index> naming convention. "
                )


def _check_places(model: str, positions: Mapping[str, int], arguments: Sequence[Argument]) -> None:
    """Each required argument has one input, and each input an argument that can be one."""
    taken: dict[int, str] = {}
    for name, place in positions.items():
        if place >= len(arguments):
            raise InvalidArgumentError(
                f"input '{name}' of model '{model}' refers to argument {place}, but the model has "
                f"{len(arguments)} arguments"
            )
        if place in taken:
            raise InvalidArgumentError(
                f"inputs '{taken[place]}' and '{name}' of model '{model}' refer to the same argument {place}"
            )
        if not arguments[place].is_served:
            raise InternalError(
                f"An input of type '{arguments[place].kind}' was detected in the model. {_ONE_KIND}"
            )
        taken[place] = name
    for place, argument in enumerate(arguments):
        if argument.required and place not in taken:
            raise InvalidArgumentError(
                f"no input of model '{model}' refers to argument {place} ('{argument.name}'); name an input "
                f"'{argument.name}' or 'INPUT__{place}'"
            )


def leaf_paths(tree: str, root: str) -> list[str]:
    """Paths of the leaves of a call spec, depth first.

    Args:
        tree: PyTorch's JSON of a tree: ``[1, {"type": ..., "context": ..., "children_spec": [...]}]``.
        root: ``RESULT``, or empty for inputs: a tuple of ``ARGS`` and ``KWARGS``.
    """
    _, node = json.loads(tree)
    if root:
        return list(_walk(node, root))
    arguments, keywords = node["children_spec"]
    return [*_walk(arguments, "ARGS"), *_walk(keywords, "KWARGS")]


def _walk(node: Mapping[str, object], path: str) -> Iterator[str]:
    kind, children = node["type"], node["children_spec"]
    assert isinstance(children, list)
    if kind is None:
        yield path
        return
    context = json.loads(str(node["context"]))
    keys = context if isinstance(context, list) and len(context) == len(children) else range(len(children))
    for key, child in zip(keys, children, strict=True):
        yield from _walk(child, f"{path}[{key}]")


def leaf_positions(
    model: str, kind: str, names: Sequence[str], paths: Sequence[str], aliases: Sequence[str] = ()
) -> dict[str, int]:
    """The leaf of each input or output of a config."""
    if kind == "input" and len(names) != len(paths):
        raise InternalError(
            f'Failed to load model "{model}" configuration expects {len(names)} inputs, but model expects '
            f"{len(paths)} inputs."
        )
    known = {name: place for place, name in enumerate(aliases)}
    known |= {f"{kind.upper()}__{place}": place for place in range(len(paths))}
    known |= {path: place for place, path in enumerate(paths)}
    positions: dict[str, int] = {}
    for name in names:
        place = known.get(name)
        if place is None or place in positions.values():
            problem = "is not found" if place is None else "occurs twice"
            raise InternalError(
                f'{kind.capitalize()} "{name}" for model instance "{model}" {problem} in model {kind} map. '
                f"It has: {', '.join(known)}"
            )
        positions[name] = place
    return positions
