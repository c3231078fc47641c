"""Judges a converted model by its outputs beside those of the original: pure functions of arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Accuracy = Literal["exact", "reduced", "quantised"]
ACCURACIES: tuple[Accuracy, ...] = ("exact", "reduced", "quantised")
"""Classes of accuracy, from the strictest to the most lenient."""

_FLOOR = 1e-3
"""Values below this share of the largest one have no relative difference."""
_NOISE_FACTOR = 3
_FEWEST_CLASSES, _MOST_CLASSES = 2, 100_000
_SAME_ORDER = 1e-3


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Differences that a conversion may make.

    Attributes:
        accuracy: The class of the conversion. The first two limits are those of the class ``exact``, the
            others those of ``reduced`` and ``quantised``.
        atol: Absolute difference of each value, to which `rtol` adds.
        rtol: Share of the original's value.
        min_cosine: Least cosine of a sample's output with the original's.
        min_top1: Least share of samples with the original's best class, or of equal values other than
            floats.
    """

    accuracy: Accuracy
    atol: float = 1e-4
    rtol: float = 1e-3
    min_cosine: float = 0.0
    min_top1: float = 0.0

    def above(self, noise: float) -> Tolerances:
        """Raises `atol` above the difference that the original has with itself."""
        return replace(self, atol=max(self.atol, _NOISE_FACTOR * noise))


_BY_ACCURACY: Mapping[Accuracy, Tolerances] = {
    "exact": Tolerances("exact"),
    "reduced": Tolerances("reduced", min_cosine=0.9999, min_top1=0.998),
    "quantised": Tolerances("quantised", min_cosine=0.99, min_top1=0.99),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """The user's own limits; None keeps those of the conversion's class."""

    atol: float | None = None
    rtol: float | None = None
    min_cosine: float | None = None
    min_top1: float | None = None

    def of(self, accuracy: Accuracy) -> Tolerances:
        """The tolerances of a class of conversions."""
        found = _BY_ACCURACY[accuracy]
        return Tolerances(
            accuracy,
            found.atol if self.atol is None else self.atol,
            found.rtol if self.rtol is None else self.rtol,
            found.min_cosine if self.min_cosine is None else self.min_cosine,
            found.min_top1 if self.min_top1 is None else self.min_top1,
        )


def loosest(accuracies: Sequence[Accuracy]) -> Accuracy:
    """The class of several conversions one after the other."""
    return max(accuracies, key=ACCURACIES.index, default="exact")


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences of an output from the original's; None where a number has no meaning.

    Attributes:
        abs: Largest absolute difference.
        p999: Its 99.9th percentile.
        rel: Largest relative difference of values that are not small.
        cosine_min: Least cosine of a sample.
        cosine_mean: Their mean.
        snr_db: Signal to noise; None if nothing differs.
        top1: Share of samples with the same best class.
        top5: Share of samples whose best class is one of the five best.
        equal: Share of equal values, for types other than floats.
        worst_sample: The sample that differs most.
    """

    abs: float | None = None
    p999: float | None = None
    rel: float | None = None
    cosine_min: float | None = None
    cosine_mean: float | None = None
    snr_db: float | None = None
    top1: float | None = None
    top5: float | None = None
    equal: float | None = None
    worst_sample: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement: `reason` is empty if the model has passed."""

    reason: str
    outputs: Mapping[str, Difference]


def noise_of(first: Mapping[str, Array], others: Sequence[Mapping[str, Array]]) -> dict[str, float]:
    """Largest difference of several runs of the original, by output; later runs may have fewer rows."""
    found = {}
    for name, reference in first.items():
        found[name] = 0.0
        for other in others:
            array = other[name]
            if reference.dtype.kind != "f" or array.shape[1:] != reference.shape[1:]:
                continue
            distance = np.abs(_finite(array) - _finite(reference[: len(array)]))
            found[name] = max(found[name], float(distance.max(initial=0.0)))
    return found


def judge(
    reference: Mapping[str, Array],
    outputs: Mapping[str, Array],
    tolerances: Tolerances,
    noise: Mapping[str, float] | None = None,
) -> Verdict:
    """Compares the outputs of all samples, which the first dimension counts."""
    differences: dict[str, Difference] = {}
    reasons: dict[str, str] = {}
    if set(outputs) != set(reference):
        found, wanted = _listed(outputs), _listed(reference)
        return Verdict(f"it returns {found} where the original returns {wanted}", {})
    for name, array in outputs.items():
        reason = _unlike(name, reference[name], array)
        if not reason:
            differences[name] = difference(reference[name], array)
            limits = tolerances.above((noise or {}).get(name, 0.0))
            reason = _beyond(name, reference[name], array, differences[name], limits)
        if reason:
            reasons[name] = reason
    if not reasons:
        return Verdict("", differences)
    failed = {name: array for name, array in outputs.items() if name in reasons}
    explained = _swapped(reference, failed, tolerances)
    if not explained and set(failed) <= set(differences):
        explained = _reordered(reference, failed, tolerances)
    return Verdict(
        "; ".join([next(iter(reasons.values())), *([explained] if explained else [])]), differences
    )


def difference(reference: Array, array: Array) -> Difference:
    """Measures arrays of equal shape and type, NaN and infinity in the same places."""
    if array.dtype.kind != "f":
        equal = array == reference
        worst = _rows(~equal).sum(1).argmax() if array.size else 0
        return Difference(equal=float(np.mean(equal)) if array.size else 1.0, worst_sample=int(worst))
    if not array.size:
        return Difference(abs=0.0, p999=0.0, worst_sample=0)
    wanted, found = _finite(reference), _finite(array)
    distance = np.abs(found - wanted)
    large = np.abs(wanted) > _FLOOR * np.abs(wanted).max()
    cosines = _cosines(wanted, found)
    noise, signal = float(np.square(distance).sum()), float(np.square(wanted).sum())
    top1, top5 = _best_classes(reference, array)
    by_row = _rows(distance).max(1)
    return Difference(
        abs=float(distance.max()),
        p999=float(np.percentile(distance, 99.9)),
        rel=float((distance[large] / np.abs(wanted[large])).max()) if large.any() else None,
        cosine_min=float(cosines.min()),
        cosine_mean=float(cosines.mean()),
        snr_db=10 * math.log10(signal / noise) if noise and signal else None,
        top1=top1,
        top5=top5,
        worst_sample=int(by_row.argmax()) if len(cosines) == 1 else int(cosines.argmin()),
    )


def _unlike(name: str, reference: Array, array: Array) -> str:
    """A difference in type, shape, NaN or infinity, as a sentence; empty without one."""
    if array.shape != reference.shape:
        shapes = f"output '{name}' has the shape {_dims(array)} where the original's has {_dims(reference)}"
        turned = sorted(array.shape[1:]) == sorted(reference.shape[1:]) and len(array) == len(reference)
        return f"{shapes}{': its dimensions are transposed' if turned else ''}"
    if array.dtype.kind != reference.dtype.kind or (
        array.dtype.kind != "S" and array.dtype.itemsize != reference.dtype.itemsize
    ):
        return f"output '{name}' is {array.dtype} where the original's is {reference.dtype}"
    if array.dtype.kind == "f":
        for what, test in (("NaN", np.isnan), ("infinity", np.isinf)):
            more = test(array) & ~test(reference)
            if more.any():
                return (
                    f"output '{name}' has {what} in {int(more.sum())} of {array.size} values where the "
                    f"original has none (first in sample {int(_rows(more).any(1).argmax())})"
                )
            if (test(reference) & ~test(array)).any():
                return f"output '{name}' has numbers where the original has {what}"
        if (np.isinf(array) & (np.sign(array) != np.sign(reference))).any():
            return f"output '{name}' has infinities of another sign than the original"
    return ""


def _beyond(name: str, reference: Array, array: Array, found: Difference, limits: Tolerances) -> str:
    """The first limit that is not met, as a sentence; empty if all are."""
    if found.equal is not None:
        least = limits.min_top1 if limits.accuracy != "exact" else 1.0
        if found.equal < least:
            return (
                f"output '{name}' equals the original's in {found.equal:.2%} of the values; {least:.2%} is "
                f"needed (worst sample {found.worst_sample})"
            )
        return ""
    if limits.accuracy == "exact":
        wanted, got = _finite(reference), _finite(array)
        excess = np.abs(got - wanted) - (limits.atol + limits.rtol * np.abs(wanted))
        over = int((excess > 0).sum())
        if over:
            sample = int(_rows(excess).max(1).argmax())
            return (
                f"output '{name}' differs by up to {found.abs:.3g} (worst in sample {sample}) and is beyond "
                f"{limits.atol:.2g} + {limits.rtol:.2g}·|original| in {over} of {array.size} values"
            )
        return ""
    if found.cosine_min is not None and found.cosine_min < limits.min_cosine:
        return (
            f"output '{name}': its cosine with the original's is {found.cosine_min:.6f} in sample "
            f"{found.worst_sample}; at least {limits.min_cosine:.6g} is needed"
        )
    if found.top1 is not None and found.top1 < limits.min_top1:
        return (
            f"output '{name}' has the original's best class in {found.top1:.2%} of the samples; at least "
            f"{limits.min_top1:.2%} is needed"
        )
    return ""


def _swapped(reference: Mapping[str, Array], failed: Mapping[str, Array], limits: Tolerances) -> str:
    """Says which two outputs are each other's; empty if none are."""
    for name, array in failed.items():
        for other, its in failed.items():
            if (
                name < other
                and not _fails(name, reference[other], array, limits)
                and not _fails(other, reference[name], its, limits)
            ):
                return f"outputs '{name}' and '{other}' are swapped"
    return ""


def _reordered(reference: Mapping[str, Array], failed: Mapping[str, Array], limits: Tolerances) -> str:
    """Says which output has its values in another order; empty if none has."""
    for name, array in failed.items():
        if array.dtype.kind != "f":
            continue
        found, wanted = (np.sort(_rows(_finite(each)), 1) for each in (array, reference[name]))
        if found.shape[1] > 1 and np.allclose(found, wanted, rtol=_SAME_ORDER, atol=limits.atol):
            return f"output '{name}' has the original's values in another order, as by a wrong transpose"
    return ""


def _fails(name: str, reference: Array, array: Array, limits: Tolerances) -> bool:
    if _unlike(name, reference, array):
        return True
    return bool(_beyond(name, reference, array, difference(reference, array), limits))


def _best_classes(reference: Array, array: Array) -> tuple[float | None, float | None]:
    """Shares of equal best classes, and of best classes among the five best; ties count as equal."""
    classes = array.shape[-1] if array.ndim > 1 else 0
    if not _FEWEST_CLASSES <= classes <= _MOST_CLASSES:
        return None, None
    wanted, found = _wide(reference).reshape(-1, classes), _wide(array).reshape(-1, classes)
    chosen = found.argmax(1)
    best = wanted.max(1)
    at_choice = wanted[np.arange(len(wanted)), chosen]
    equal = (at_choice == best) | (chosen == wanted.argmax(1))
    five = np.argpartition(found, -min(5, classes), axis=1)[:, -min(5, classes) :]
    among = (five == wanted.argmax(1)[:, None]).any(1) | equal
    return float(equal.mean()), float(among.mean())


def _cosines(wanted: Array, found: Array) -> Array:
    """The cosine of each sample; one of all samples if they have one value each."""
    first, second = _rows(wanted), _rows(found)
    if first.shape[1] == 1:
        first, second = first.reshape(1, -1), second.reshape(1, -1)
    lengths = np.linalg.norm(first, axis=1), np.linalg.norm(second, axis=1)
    product: Array = lengths[0] * lengths[1]
    cosines = np.divide((first * second).sum(1), product, out=np.zeros(len(first)), where=product > 0)
    # Vectors of zeros have no direction: equal ones agree.
    return np.where((lengths[0] == 0) & (lengths[1] == 0), 1.0, cosines)


def _wide(array: Array) -> Array:
    return array.astype(np.float64)


def _finite(array: Array) -> Array:
    """Converts to 64-bit floats, with zeros for NaN and infinity, whose places are equal in both arrays."""
    return np.nan_to_num(_wide(array), nan=0.0, posinf=0.0, neginf=0.0)


def _rows(array: Array) -> Array:
    return array.reshape(len(array), -1)


def _dims(array: Array) -> list[int]:
    return list(array.shape)


def _listed(outputs: Mapping[str, Array]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(outputs)) or "nothing"
