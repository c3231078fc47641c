"""Compares the responses of two versions to one request: pure, over numpy.

An output agrees if its datatype and shape are equal, and its values: floats within tolerances, everything
else exactly. NaN equals NaN. An output in `CompareRules.top` agrees instead if its largest elements along the
last axis are the same ones, whatever their values; equal elements may take each other's place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from conch.core.errors import ConchError, message_of
from conch.core.tensor import Array, Tensor, decode_bytes, float_array

_PART = 1 << 18
"""Elements that are compared at once, which bounds the memory for that."""

_MOST_TEXT = 200

_Floats = npt.NDArray[np.float64]


class Difference(Enum):
    """Ways in which pairs differ."""

    MISSING = "missing"
    EXTRA = "extra"
    DATATYPE = "datatype"
    SHAPE = "shape"
    VALUES = "values"
    TOP = "top"
    RESPONSES = "responses"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class CompareRules:
    """Rules by which the outputs of a pair are compared.

    Attributes:
        atol: Absolute tolerance of floats.
        rtol: Tolerance relative to stable's value.
        ignore: Names of outputs that are not compared.
        top: Outputs of which only the places of the largest elements count, with their number.
    """

    atol: float = 1e-3
    rtol: float = 1e-3
    ignore: frozenset[str] = frozenset()
    top: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figures:
    """The comparison of one output, or of whole answers.

    Attributes:
        output: Name of the output; empty for answers.
        difference: Kind of difference; None if it agrees.
        within: Share of elements that are equal or within the tolerances.
        max_abs: Largest absolute difference of two elements; None for outputs that are no numbers.
        cosine: Cosine similarity of the finite elements; None if it is not defined.
        top: Share of rows whose largest elements are the same; None for outputs without that rule.
        note: Both sides in words, where numbers do not tell.
    """

    output: str
    difference: Difference | None = None
    within: float = 1.0
    max_abs: float | None = None
    cosine: float | None = None
    top: float | None = None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """The figures that are known; infinity is null."""
        numbers = {"within": self.within, "max_abs": self.max_abs, "cosine": self.cosine, "top": self.top}
        found: dict[str, Any] = {"output": self.output}
        if self.difference is not None:
            found["difference"] = self.difference.value
        found |= {
            name: value if math.isfinite(value) else None
            for name, value in numbers.items()
            if value is not None
        }
        return found | ({"note": self.note} if self.note else {})


class VersionAnswer:
    """The responses of one version to one request.

    Attributes:
        responses: The outputs of each response that has some.
        nbytes: Bytes of the outputs.
        error: The first error; None for none.
        cut: True if later responses were not kept.
        unread: Names of outputs that could not be kept.
    """

    __slots__ = ("cut", "error", "nbytes", "responses", "unread")

    def __init__(self) -> None:
        self.responses: list[Sequence[Tensor]] = []
        self.nbytes = 0
        self.error: ConchError | None = None
        self.cut = False
        self.unread: set[str] = set()


def compare_answers(rules: CompareRules, stable: VersionAnswer, candidate: VersionAnswer) -> list[Figures]:
    """Compares two answers; those that both end with an error agree."""
    if stable.error is not None or candidate.error is not None:
        if stable.error is not None and candidate.error is not None:
            return []
        note = f"stable: {_outcome(stable)}; candidate: {_outcome(candidate)}"
        return [Figures("", Difference.ERROR, 0.0, note=note)]
    found: list[Figures] = []
    counts = len(stable.responses), len(candidate.responses)
    if counts[0] != counts[1] and not (stable.cut or candidate.cut):
        found.append(
            Figures("", Difference.RESPONSES, 0.0, note=f"{counts[0]} against {counts[1]} responses")
        )
    ignored = rules.ignore.union(stable.unread, candidate.unread)
    for ours, theirs in zip(stable.responses, candidate.responses, strict=False):
        found += compare_outputs(rules, ours, theirs, ignored)
    return found


def compare_outputs(
    rules: CompareRules, stable: Sequence[Tensor], candidate: Sequence[Tensor], ignored: frozenset[str]
) -> list[Figures]:
    """Compares the outputs of two responses."""
    theirs = {tensor.name: tensor for tensor in candidate}
    found: list[Figures] = []
    for tensor in stable:
        other = theirs.pop(tensor.name, None)
        if tensor.name in ignored:
            continue
        if other is None:
            found.append(Figures(tensor.name, Difference.MISSING, 0.0))
        else:
            found.append(compare_tensors(rules, tensor, other))
    found += [Figures(name, Difference.EXTRA, 0.0) for name in theirs if name not in ignored]
    return found


def compare_tensors(rules: CompareRules, stable: Tensor, candidate: Tensor) -> Figures:
    """Compares two outputs of one name."""
    name = stable.name
    if stable.datatype != candidate.datatype:
        note = f"{stable.datatype} against {candidate.datatype}"
        return Figures(name, Difference.DATATYPE, 0.0, note=note)
    if tuple(stable.shape) != tuple(candidate.shape):
        note = f"{list(stable.shape)} against {list(candidate.shape)}"
        return Figures(name, Difference.SHAPE, 0.0, note=note)
    try:
        return _compare_elements(rules, stable, candidate)
    except (ConchError, ValueError) as error:  # its bytes do not fill its shape
        return Figures(name, Difference.SHAPE, 0.0, note=message_of(error)[:_MOST_TEXT])


def _compare_elements(rules: CompareRules, stable: Tensor, candidate: Tensor) -> Figures:
    name = stable.name
    if stable.datatype == "BYTES":
        return _compare_strings(stable, candidate)
    most = rules.top.get(name)
    if _same_bytes(stable, candidate):
        return Figures(name, None, 1.0, 0.0, 1.0, None if most is None else 1.0)
    first, second = _array(stable), _array(candidate)
    within, max_abs, cosine = _compare_numbers(rules, first, second)
    if most is None or not first.ndim or not first.size:
        difference = Difference.VALUES if within < 1.0 else None
        return Figures(name, difference, within, max_abs, cosine)
    top = _agreement(first, second, most)
    return Figures(name, Difference.TOP if top < 1.0 else None, within, max_abs, cosine, top)


def _outcome(answer: VersionAnswer) -> str:
    if answer.error is None:
        return "an answer"
    return f"{answer.error.code}, {answer.error.message[:_MOST_TEXT]}"


def _same_bytes(first: Tensor, second: Tensor) -> bool:
    if first.nbytes != second.nbytes:
        return False
    return bool(np.array_equal(np.frombuffer(first.data, np.uint8), np.frombuffer(second.data, np.uint8)))


def _array(tensor: Tensor) -> Array:
    return float_array(tensor.data, tensor.shape) if tensor.datatype == "BF16" else tensor.numpy()


def _compare_strings(stable: Tensor, candidate: Tensor) -> Figures:
    if _same_bytes(stable, candidate):
        return Figures(stable.name)
    first, second = decode_bytes(stable.data), decode_bytes(candidate.data)
    equal = int(np.count_nonzero(first == second)) if first.size == second.size else 0
    return Figures(stable.name, Difference.VALUES, equal / max(first.size, 1))


def _compare_numbers(
    rules: CompareRules, stable: Array, candidate: Array
) -> tuple[float, float, float | None]:
    """The share of elements within the tolerances, the largest absolute difference, and the cosine."""
    first, second = stable.reshape(-1), candidate.reshape(-1)
    exact = stable.dtype.kind != "f"
    within, max_abs = 0, 0.0
    dot = squares = others = 0.0
    with np.errstate(all="ignore"):
        for start in range(0, first.size, _PART):
            ours, theirs = first[start : start + _PART], second[start : start + _PART]
            a, b = ours.astype(np.float64), theirs.astype(np.float64)
            difference = np.abs(a - b)
            same = (ours == theirs) | (np.isnan(a) & np.isnan(b))
            difference[same] = 0.0
            difference[np.isnan(difference)] = np.inf
            finite = np.isfinite(a) & np.isfinite(b)
            close = same if exact else same | (finite & (difference <= rules.atol + rules.rtol * np.abs(a)))
            within += int(np.count_nonzero(close))
            max_abs = max(max_abs, float(difference.max()))
            a, b = a[finite], b[finite]
            dot, squares, others = dot + float(a @ b), squares + float(a @ a), others + float(b @ b)
    return within / max(first.size, 1), max_abs, _cosine(dot, squares, others)


def _cosine(dot: float, squares: float, others: float) -> float | None:
    if not squares or not others:
        return 1.0 if squares == others else 0.0
    found = dot / math.sqrt(squares) / math.sqrt(others)
    return min(max(found, -1.0), 1.0) if math.isfinite(found) else None


def _agreement(stable: Array, candidate: Array, most: int) -> float:
    """The share of rows of which one side's largest elements are largest ones of the other side, too."""
    first, second = _ordered(stable), _ordered(candidate)
    most = min(most, first.shape[-1])
    agree = _contains_largest(first, second, most) | _contains_largest(second, first, most)
    return float(np.mean(agree))


def _ordered(array: Array) -> _Floats:
    """Rows of numbers, in which NaN is the smallest."""
    rows = array.reshape(-1, array.shape[-1]).astype(np.float64)
    rows[np.isnan(rows)] = -np.inf
    return rows


def _contains_largest(values: _Floats, chosen: _Floats, most: int) -> npt.NDArray[np.bool_]:
    """By row, whether the `most` largest elements of `chosen` are in places of largest `values`."""
    places = np.argpartition(-chosen, most - 1, axis=-1)[:, :most]
    least = -np.partition(-values, most - 1, axis=-1)[:, most - 1]
    found: npt.NDArray[np.bool_] = np.take_along_axis(values, places, -1).min(-1) >= least
    return found
