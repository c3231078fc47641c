"""Decides whether a candidate is accurate: by what conch answers with it, or by the user's metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from conch_tools.optimize.candidate_serving import CandidateServing
from conch_tools.optimize.judging import Accuracy, Verdict, judge
from conch_tools.optimize.model_signature import ModelSignature
from conch_tools.optimize.options import OptimizeOptions
from conch_tools.optimize.original import Original
from conch_tools.optimize.user_metric import UserMetric

Array = npt.NDArray[Any]
_STATE = "UNAVAILABLE state: "
"""Text in front of the cause in the error of a failed load."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check.

    Attributes:
        reason: Reason for which the candidate fails; empty if it passes.
        accuracy: Differences by output, of the batch size with all samples.
        metric: The user's metric of the candidate and of the original; None without one.
    """

    reason: str
    accuracy: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    metric: Mapping[str, float] | None = None


class AccuracyCheck:
    """Compares candidates with the original.

    Raises:
        InvalidArgumentError: The metric fails for the original.
    """

    def __init__(self, original: Original, options: OptimizeOptions, serving: CandidateServing) -> None:
        self._original, self._limits, self._serving = original, options.limits, serving
        self._metric = UserMetric(options.metric, options.targets) if options.metric else None
        self._max_drop = options.max_drop
        self._wanted = self._metric.value_of(original.answers) if self._metric else 0.0

    def check(self, folder: Path, signature: ModelSignature, accuracy: Accuracy) -> Checked:
        """Checks the candidate of a folder, in batches of several sizes. Raises ProcessFailedError."""
        served = self._serving.answer(folder, signature)
        if "load_error" in served:
            cause = served["load_error"].rpartition(_STATE)[2].rstrip(" ;\n")
            return Checked(f"conch can't load it: {cause}")
        try:
            return self._check_sizes(folder, signature, accuracy, served["errors"])
        finally:
            for each in folder.glob("answers-*.npz"):
                each.unlink()

    def _check_sizes(
        self, folder: Path, signature: ModelSignature, accuracy: Accuracy, errors: Mapping[str, str]
    ) -> Checked:
        differences: Mapping[str, Mapping[str, float]] = {}
        metric = None
        for size in self._original.sizes:
            batches = f"batches of {size}" if size else "requests"
            whole = size == self._original.batch
            if text := errors.get(str(size)):
                return Checked(f"{batches} fail: {text}", differences, metric)
            answers = _read_answers(folder / f"answers-{size}.npz", signature)
            verdict = self._judge(answers, signature, accuracy)
            reason = verdict.reason
            if self._metric is not None and verdict.outputs:
                # The metric is of all samples, and decides alone.
                reason = ""
                if whole:
                    metric = self._measured(self._metric, answers)
                    reason = self._drop(metric)
            if whole:
                differences = {
                    name: {key: value for key, value in asdict(each).items() if value is not None}
                    for name, each in verdict.outputs.items()
                }
            if reason:
                return Checked(reason if whole else f"in {batches}, {reason}", differences, metric)
        return Checked("", differences, metric)

    def _judge(self, answers: Mapping[str, Array], signature: ModelSignature, accuracy: Accuracy) -> Verdict:
        rows = len(next(iter(answers.values())))
        reference = {name: array[:rows] for name, array in self._original.answers.items()}
        renamed = {each.original for each in signature.outputs if each.reference}
        if renamed:  # the step tells which of the source's outputs it stands for
            reference = {name: reference[name].astype(answers[name].dtype) for name in renamed}
        return judge(reference, answers, self._limits.of(accuracy), self._original.noise)

    def _measured(self, metric: UserMetric, answers: Mapping[str, Array]) -> dict[str, float]:
        return {
            "value": metric.value_of({**self._original.answers, **answers}),
            "original": self._wanted,
        }

    def _drop(self, metric: Mapping[str, float]) -> str:
        """Reason for which a metric is too low; empty if it is not."""
        if metric["value"] >= self._wanted - self._max_drop:
            return ""
        change = f"from {self._wanted:.6g} to {metric['value']:.6g}"
        return f"the metric drops {change}; {self._max_drop:g} is allowed"


def _read_answers(path: Path, signature: ModelSignature) -> dict[str, Array]:
    """Reads conch's outputs, by the original's names."""
    with np.load(path, allow_pickle=False) as arrays:
        return {each.original: _typed(arrays[each.name], each.datatype) for each in signature.outputs}


def _typed(array: Array, datatype: str) -> Array:
    return array.astype("S") if datatype == "BYTES" else array
