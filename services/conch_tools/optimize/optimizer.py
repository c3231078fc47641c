"""`optimize`: converts a model in all ways that there are, judges and measures the results, keeps the best.

One candidate after the other: its step converts in a process and an environment of its own, conch serves the
result in another process, the answers are judged, and what has passed is measured. Each leaves a folder whose
``result.json`` is written last; a later run takes those of its own inputs as they are.

Owns: the output folder. Threads and locks: one thread; processes end with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch_environments.locks import FileLock
from conch_tools.optimize.candidate_choice import Measured, front, recommended
from conch_tools.optimize.candidate_folders import CandidateFolders
from conch_tools.optimize.candidate_maker import CandidateMaker
from conch_tools.optimize.model_kinds import Source, find_source
from conch_tools.optimize.optimize_report import make_report, write_report, write_status
from conch_tools.optimize.options import OptimizeOptions, check_options
from conch_tools.optimize.original import Original, run_original
from conch_tools.optimize.result_repository import ResultRepository
from conch_tools.optimize.served_model import read_served_model
from conch_tools.optimize.step_environments import StepEnvironments
from conch_tools.optimize.step_plan import StepPlan
from conch_tools.optimize.winner_tuning import tune_winner


@dataclass(frozen=True, slots=True)
class OptimizeResult:
    """Result of `optimize`.

    Attributes:
        folder: The output folder.
        report: The content of its ``report.json``.
        repository: The model repository with the recommended candidate; None if none has passed.
    """

    folder: Path
    report: Mapping[str, Any]
    repository: Path | None

    @property
    def candidates(self) -> Sequence[Mapping[str, Any]]:
        """All candidates, in the order in which they were made."""
        found: Sequence[Mapping[str, Any]] = self.report["candidates"]
        return found


def optimize(
    source: str,
    folder: Path,
    options: OptimizeOptions | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> OptimizeResult:
    """Converts a model, and writes a repository with the best result that is accurate, and a report.

    Args:
        source: The model's file or folder, or a model's directory in a repository; for PyTorch also
            ``file.py:function``.
        folder: The output folder; one of an earlier run is continued.
        options: Options of the conversion; None for the defaults.
        progress: Called with a line for each thing that is done.

    Raises:
        ConchError: An option is wrong, or the source can't be run.
    """
    options = options or OptimizeOptions()
    check_options(options)
    served = read_served_model(Path(source))
    if served is not None:
        labels = options.labels or served.labels
        options = replace(options, name=options.name or served.name, labels=labels)
    found = find_source(source if served is None else str(served.path))
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    environments = StepEnvironments(folder / "environments", options.environments, options.offline, progress)
    with ExitStack() as stack:
        stack.callback(environments.close)
        lock = FileLock.try_exclusive(folder / ".lock")
        if lock is None:
            raise UnavailableError(
                f"another conch optimize works in '{folder}'; wait for it, or name another one"
            )
        stack.callback(lock.close)
        repository = ResultRepository(folder / "repository", options.name or found.name, options)
        folders = CandidateFolders(folder / "candidates", found.digest, options.restart)
        samples = {} if served is None else served.samples
        original = run_original(found, folder, options, samples, environments, progress)
        maker = CandidateMaker(original, options, folders, environments, progress)
        results = _make_all(found, folder, options, folders, maker)
        packages = environments.own.packages
        return _finish(folder, original, options, folders, repository, results, packages, progress)


def _make_all(
    source: Source, folder: Path, options: OptimizeOptions, folders: CandidateFolders, maker: CandidateMaker
) -> list[dict[str, Any]]:
    """Makes one candidate after the other; returns their results."""
    plan = StepPlan(options.steps, options.kinds, source.kind.name, options.to)
    results: list[dict[str, Any]] = []
    made: dict[tuple[str, ...], Path] = {(): source.path}
    while (planned := plan.next_step()) is not None:
        result = maker.make(planned, made[planned.before])
        results.append(result)
        write_status(folder, results)
        if result["status"] == "passed":
            kind = options.kinds[planned.step.result]
            made[planned.chain] = folders.folder_of(result["id"]) / "1" / kind.file
            plan.passed(planned)
    if not results:
        targets = ", ".join(options.to)
        raise InvalidArgumentError(f"--to: no step leads from {source.kind.target} to {targets}")
    return results


def _finish(
    folder: Path,
    original: Original,
    options: OptimizeOptions,
    folders: CandidateFolders,
    repository: ResultRepository,
    results: Sequence[dict[str, Any]],
    packages: Mapping[str, str],
    progress: Callable[[str], None],
) -> OptimizeResult:
    """Writes the repository and the report."""
    measured = [_measured(each) for each in results if each["status"] == "passed"]
    best = recommended(measured, options.objective)
    repository.clear()
    report = make_report(original, options.objective, results, best, front(measured), packages)
    written = None
    if best is not None:
        chosen = next(each for each in results if each["id"] == best.id)
        written = repository.write(original, folders.folder_of(best.id), chosen)
        if options.tune_s:
            write_report(folder, report)
            where, signature = folder / "tune" / best.id, original.signature.changed_by(chosen)
            report["tune"] = tune_winner(repository, where, original, signature, options, progress)
        repository.apply()
    write_report(folder, report)
    write_status(folder, results, best.id if best else None, done=True)
    return OptimizeResult(folder, report, written)


def _measured(result: Mapping[str, Any]) -> Measured:
    profile = result["profile"]
    throughput = max(row["throughput"] for row in profile)
    return Measured(result["id"], profile[0]["p50_us"], throughput, result["host_bytes"], result["bytes"])
