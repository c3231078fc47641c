"""A model as a caller with tables sees it: columns and further inputs, params, and outputs of the reply.

A config says most of it. Add-ons whose models have files that say more, such as a signature, name a function
of the version's `ModelSpec` by an entry point of the group ``conch.frames``; it returns None for models of
others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from conch.core.add_ons import load_add_ons
from conch.core.spec import ModelSpec
from conch_frames.column_rules import ModelColumns, ModelInput, columns_of_spec

GROUP = "conch.frames"
"""Entry-point group of functions that are an `InterfaceSource`."""


@dataclass(frozen=True, slots=True)
class OutputRule:
    """An output in a reply.

    Attributes:
        output: The model's output.
        name: Its name in the reply.
        in_records: True if it may be a member of a record for each row.
        rank: Dimensions that callers expect, with that of rows; one more of size 1 is left out.
        is_binary: True if it has bytes, which texts have in base64.
    """

    output: str
    name: str
    in_records: bool = True
    rank: int = 1
    is_binary: bool = False


@dataclass(frozen=True, slots=True)
class FrameInterface:
    """The interface of a version.

    Attributes:
        columns: Its columns and further inputs, without params.
        params: Inputs that callers send as params, by name.
        outputs: The outputs that are asked for, in order.
    """

    columns: ModelColumns
    params: Mapping[str, ModelInput] = field(default_factory=dict)
    outputs: tuple[OutputRule, ...] = ()


InterfaceSource = Callable[[ModelSpec], FrameInterface | None]
"""Makes the interface of models whose files describe it; None for others."""


def interface_of(spec: ModelSpec) -> FrameInterface:
    """The interface of a version. Raises InvalidArgumentError: its config contradicts itself."""
    for source in _sources():
        found = source(spec)
        if found is not None:
            return found
    by_rows = spec.max_batch_size > 0 or all(each.dims[:1] == (-1,) for each in spec.outputs)
    several = len(spec.outputs) > 1 and by_rows
    outputs = tuple(OutputRule(each.name, each.name, in_records=several) for each in spec.outputs)
    return FrameInterface(columns_of_spec(spec), {}, outputs)


@cache
def _sources() -> Sequence[InterfaceSource]:
    return tuple(load_add_ons(GROUP).values())
