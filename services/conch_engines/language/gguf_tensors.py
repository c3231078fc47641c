"""Reads which tensors GGUF files hold, by the kinds that llama.cpp knows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conch_engines.language.gguf_file import read_layout

_ALIGNMENT = "general.alignment"

KINDS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""By number: name, elements of a block, and bytes of a block."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file.

    Attributes:
        name: Its name.
        elements: Number of its elements.
        kind: Name of its kind; empty for one that is unknown.
        nbytes: Its size.
        fault: Reason for which the engine can't load it; empty if nothing is wrong.
        cut: True if the file ends before its data.
    """

    name: str
    elements: int
    kind: str
    nbytes: int
    fault: str
    cut: bool


def read_tensors(path: Path) -> tuple[Mapping[str, Any], list[Tensor]]:
    """The metadata of a file, and its tensors.

    Raises:
        ValueError: The file is no GGUF file, or is cut before its tensors.
        OSError: It can't be read.
    """
    metadata, layout, end = read_layout(path)
    alignment = metadata.get(_ALIGNMENT, 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its {_ALIGNMENT} is {alignment!r}")
    start = end + -end % alignment
    return metadata, list(_tensors(layout, path.stat().st_size - start))


def _tensors(layout: list[tuple[str, tuple[int, ...], int, int]], size: int) -> Iterator[Tensor]:
    for name, shape, number, offset in layout:
        elements = math.prod(shape)
        kind, block, nbytes = KINDS.get(number, ("", 1, 0))
        needed = elements // block * nbytes
        fault = ""
        cut = offset + needed > size
        if not kind:
            fault = f"its kind {number} is unknown"
        elif shape and shape[0] % block:
            fault = f"its rows of {shape[0]} elements are no whole blocks of {block}, as {kind} has them"
        elif cut:
            fault = f"its data ends {offset + needed - size} bytes behind the end of the file"
        yield Tensor(name, elements, kind, needed, fault, cut)
