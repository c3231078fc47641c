"""``perf_analyzer`` on top of ``conch perf``: its flags, its files, its exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from conch_tools.perf.measure.results import PerfResult
from conch_tools.perf.measure.verdicts import Verdict, judge
from conch_tools.perf.perf_analyzer.flags import FlagError, Translation, translate
from conch_tools.perf.perf_analyzer.profile_export import Experiment, as_json
from conch_tools.perf.perf_analyzer.summary import as_csv, as_text, composing_csv
from conch_tools.perf.perf_analyzer.windows import Windows

OK, UNSTABLE, USAGE, FAILED = 0, 2, 3, 99
"""Exit codes, as perf_analyzer's."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of a run.

    Attributes:
        experiments: Records of each point; empty unless a profile export is asked for.
    """

    result: PerfResult
    experiments: Sequence[Experiment] = ()


# Verdicts that perf_analyzer's rule knows nothing of.
_SAID = (Verdict.FAILING, Verdict.INCOMPLETE, Verdict.GENERATOR_TOO_SLOW, Verdict.SATURATED)

_BAD = (Verdict.FAILING, Verdict.INCOMPLETE)


class MeasureError(Exception):
    """The run failed, with one sentence for the user."""


Measure = Callable[[Translation], Measured]
"""Runs ``conch perf`` with the translated arguments."""


def main(arguments: Sequence[str], measure: Measure, version: str) -> int:
    """Runs the command; returns the process's exit code.

    Args:
        arguments: Arguments of perf_analyzer.
        measure: Makes the load.
        version: Version of conch, for the profile export.
    """
    try:
        asked = translate(arguments)
    except FlagError as error:
        print(f"perf_analyzer: {error}", file=sys.stderr)
        return USAGE
    for text in asked.without_effect:
        print(f"perf_analyzer: no effect: {text}", file=sys.stderr)
    try:
        measured = measure(asked)
        if asked.metrics_url and not any(point.metrics for point in measured.result.points):
            print(f"perf_analyzer: no GPU metrics at {asked.metrics_url}", file=sys.stderr)
        print(as_text(measured.result, asked.percentile), end="")
        _write(asked, measured, version)
    except (MeasureError, OSError) as error:
        print(f"perf_analyzer: {error}", file=sys.stderr)
        return FAILED
    return _exit_code(asked, measured.result)


def _write(asked: Translation, measured: Measured, version: str) -> None:
    if asked.profile_export is not None:
        asked.profile_export.write_text(as_json(measured.experiments, version, asked.endpoint))
    if asked.csv is None:
        return
    verbose = asked.verbose_csv
    asked.csv.write_text(as_csv(measured.result, asked.percentile, verbose=verbose))
    for prefix, text in composing_csv(measured.result, asked.percentile, verbose=verbose).items():
        # A model's name may hold a slash of a namespace.
        name = Path(f"{prefix}.{asked.csv.name}".replace("/", "_"))
        (asked.csv.parent / name).write_text(text)


def _exit_code(asked: Translation, result: PerfResult) -> int:
    if not all(point.answered for point in result.points):
        return USAGE
    good = True
    for point in result.points:
        found = judge(point)
        if found.verdict in _SAID:
            print(f"[WARNING] {point.load} is {found.verdict}: {found.reason}", file=sys.stderr)
        for note in point.notes:
            print(f"[WARNING] {point.load}: {note}", file=sys.stderr)
        if asked.windows is None:
            good = good and found.verdict not in _BAD
            continue
        # Model Analyzer takes longer windows where it reads this sentence.
        if not asked.windows.stable(point.slices):
            print(
                f"Failed to obtain stable measurement within {asked.windows.most} measurement windows for "
                f"{point.load}. Please try to increase the {_longer(asked.windows)}.",
                file=sys.stderr,
            )
            good = False
        elif found.verdict in _BAD:
            good = False
    return OK if good or asked.loads > 1 else UNSTABLE


def _longer(windows: Windows) -> str:
    return "--measurement-request-count" if windows.requests else "--measurement-interval"
