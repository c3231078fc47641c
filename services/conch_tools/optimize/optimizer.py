"""`optimize`: converts a model in all ways that there are, judges and measures the results, keeps the best.

One candidate after the other: its step converts in a process and an environment of its own, conch serves the
result in another process, the answers are judged, and what has passed is measured. Each leaves a folder whose
``result.json`` is written last; a later run takes those of its own inputs as they are.

Owns: the output folder. Threads and locks: one thread; processes end with it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from conch import __version__
from conch.core.clock import monotonic_ns
from conch.core.errors import (
    AlreadyExistsError,
    ConchError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from conch.core.tensor import NUMPY_DTYPES
from conch.process.gpu_discovery import find_gpus
from conch.workers.environments.locks import FileLock
from conch_tools.optimize.candidate_choice import Measured, Objective, front, recommended
from conch_tools.optimize.candidate_config import config_text, write_warmup
from conch_tools.optimize.judging import Limits, Verdict, judge, loosest, noise_of
from conch_tools.optimize.model_kinds import KINDS, Kind, Source, digest_of, find_source
from conch_tools.optimize.model_signature import ModelSignature
from conch_tools.optimize.optimize_report import write_report, write_status
from conch_tools.optimize.sample_data import fitted, random_samples, read_arrays, read_json
from conch_tools.optimize.served_model import read_served_model
from conch_tools.optimize.step_environments import RefusedStepError, StepEnvironment, StepEnvironments
from conch_tools.optimize.step_plan import PlannedStep, StepPlan
from conch_tools.optimize.step_processes import ProcessFailedError, last_lines, run_process
from conch_tools.optimize.step_table import OPENERS, STEPS, Step, function_of
from conch_tools.optimize.steps.step_main import save_arrays

Array = npt.NDArray[Any]
FORMAT = 1
_RUNNER = Path(__file__).parent / "steps" / "step_main.py"
_SINGLE_ROWS = 32
_FEW_ROWS = 8
_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_STATE = "UNAVAILABLE state: "
"""What stands before the cause in the text of a load that has failed."""
_TARGETS = sorted({kind.target for kind in KINDS.values() if kind.backend})


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeOptions:
    """Options of `optimize`; `conch optimize --help` explains them."""

    to: Sequence[str] = ()
    data: Path | None = None
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    random_data_is_fine: bool = False
    max_batch_size: int = 32
    limits: Limits = field(default_factory=Limits)
    metric: str = ""
    targets: Path | None = None
    max_drop: float = 0.005
    objective: Objective = "balance"
    batching: bool = True
    name: str = ""
    labels: Path | None = None
    apply: Path | None = None
    offline: bool = False
    environments: Sequence[Path] = ()
    step_timeout_s: float = 600.0
    measure_s: float = 1.0
    restart: bool = False
    steps: Sequence[Step] = STEPS
    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS)


@dataclass(frozen=True, slots=True)
class OptimizeResult:
    """What `optimize` has made.

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
        options: How to.
        progress: Called with a line for each thing that is done.

    Raises:
        ConchError: An option is wrong, or the source can't be run.
    """
    options = options or OptimizeOptions()
    _check(options)
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
        samples = {} if served is None else served.samples
        return _Run(found, folder, options, samples, environments, progress).run()


def _check(options: OptimizeOptions) -> None:
    for target in options.to:
        if target not in _TARGETS:
            raise InvalidArgumentError(f"--to: '{target}' is none of {', '.join(_TARGETS)}")
    if options.max_batch_size < 1:
        raise InvalidArgumentError(f"--max-batch-size must be 1 or more, not {options.max_batch_size}")
    for flag, path in (("--labels", options.labels), ("--targets", options.targets)):
        if path is not None and not path.is_file():
            raise NotFoundError(f"{flag}: there is no file '{path}'")
    if options.name and not _MODEL_NAME.fullmatch(options.name):
        raise InvalidArgumentError(
            f"--name: '{options.name}' has other characters than letters, digits, _ . -"
        )
    if options.targets is not None and not options.metric:
        raise InvalidArgumentError("--targets has no effect without --metric")
    if options.metric and options.limits != Limits():
        raise InvalidArgumentError(
            "--metric decides alone: leave out --atol, --rtol, --min-cosine, --min-top1"
        )


class _Run:
    """One run: the source's answers, then one candidate after the other."""

    def __init__(
        self,
        source: Source,
        folder: Path,
        options: OptimizeOptions,
        served_samples: Mapping[str, Array],
        environments: StepEnvironments,
        progress: Callable[[str], None],
    ) -> None:
        self._source = source
        self._folder = folder
        self._options = options
        self._served_samples = served_samples
        self._environments = environments
        self._progress = progress
        self._candidates = folder / "candidates"
        if options.restart:
            shutil.rmtree(self._candidates, ignore_errors=True)
        self._candidates.mkdir(exist_ok=True)
        self._earlier = dict(self._read_earlier())
        self._name = options.name or source.name
        if options.apply is not None and (place := options.apply / self._name).exists():
            raise AlreadyExistsError(
                f"--apply: there is '{place}' already; give another --name, or remove it"
            )

    def run(self) -> OptimizeResult:
        """Does all of it."""
        self._prepare()
        options = self._options
        plan = StepPlan(options.steps, options.kinds, self._source.kind.name, options.to)
        results: list[dict[str, Any]] = []
        made: dict[tuple[str, ...], Path] = {(): self._source.path}
        while (planned := plan.next_step()) is not None:
            result = self._candidate(planned, made[planned.before])
            results.append(result)
            write_status(self._folder, results)
            if result["status"] == "passed":
                kind = options.kinds[planned.step.result]
                made[planned.chain] = self._candidates / result["id"] / "1" / kind.file
                plan.passed(planned)
        if not results:
            targets = ", ".join(options.to)
            raise InvalidArgumentError(f"--to: no step leads from {self._source.kind.target} to {targets}")
        return self._finish(results)

    def _prepare(self) -> None:
        """Runs the source in its own framework; signature, samples, answers and noise follow."""
        source, options = self._source, self._options
        opener = OPENERS[source.kind.name]
        environment = self._environments.find(source.kind.target, opener.requires)
        work = self._folder / "reference"
        work.mkdir(exist_ok=True)
        arrays = read_arrays(options.data) if options.data else self._served_samples
        if arrays:
            save_arrays(work / "given.npz", arrays)
        job = self._job("open", opener.function, source.path, {"batching": None}, 1)
        job["options"] = {"function": source.function, "batching": options.batching, "run": False}
        job["samples"] = str(work / "given.npz") if arrays else ""
        facts = self._open(work, job, environment)
        self._signature = ModelSignature.of(facts).with_dims()
        aliases: Mapping[str, str] = facts.get("aliases", {})
        arrays = {aliases.get(name, name): array for name, array in arrays.items()}
        origin = f"--data '{options.data}'" if options.data else "the model's warm-up data"
        if options.data is None and not arrays:
            arrays, origin = random_samples(self._signature, options.shapes), "random"
        elif options.data is not None and not arrays:
            arrays = read_json(options.data, self._signature)
        samples = fitted(arrays, self._signature, origin)
        if opener.float32:
            samples = {name: _rounded(array) for name, array in samples.items()}
        self._rows = len(next(iter(samples.values())))
        self._batch = min(options.max_batch_size, self._rows) if self._signature.batching else 0
        self._origin = str(options.data) if options.data else origin
        self._sample = {name: array[0] for name, array in samples.items()}
        self._samples_file = self._folder / "samples.npz"
        save_arrays(self._samples_file, samples)
        self._samples_digest = _digest({name: _array_digest(array) for name, array in samples.items()})
        self._answer(work, job, environment, opener.function)
        answers = [_arrays(work / f"{name}.npz") for name in ("first", "second", "single")]
        self._reference, *others = [
            # With the dimension that configs have for outputs of one value.
            {name: array[:, None] if array.ndim == 1 else array for name, array in each.items()}
            for each in answers
        ]
        self._noise = noise_of(self._reference, others)
        self._wanted_metric = self._metric_of(self._reference) if options.metric else None

    def _answer(self, work: Path, job: dict[str, Any], environment: StepEnvironment, function: str) -> None:
        """Runs the samples twice and one by one, unless an earlier run has."""
        key = _digest(
            [
                FORMAT,
                self._source.digest,
                self._source.function,
                _file_digest(function),
                environment.packages,
                self._samples_digest,
                self._batch,
            ]
        )
        note = work / "key.txt"
        if note.is_file() and note.read_text() == key:
            return
        self._progress(f"runs {self._rows} samples in {self._source.kind.target}")
        note.unlink(missing_ok=True)
        job |= {"batch": self._batch, "samples": str(self._samples_file)}
        job["options"] |= {"run": True, "single_rows": _SINGLE_ROWS}
        self._open(work, job, environment)
        _write(note, key)

    def _open(self, work: Path, job: dict[str, Any], environment: StepEnvironment) -> dict[str, Any]:
        """Runs a job about the source; returns what it tells."""
        log = work / "log.txt"
        try:
            return self._run_step(work, job, environment, log)
        except ProcessFailedError as error:
            raise InternalError(
                f"'{self._source.path}' can't be run in {self._source.kind.target}: {error}; {log} has the "
                f"output"
            ) from error

    def _candidate(self, planned: PlannedStep, source: Path) -> dict[str, Any]:
        """Makes a candidate, or takes that of an earlier run."""
        step = planned.step
        accuracy = loosest([each.accuracy for each in self._options.steps if each.name in planned.chain])
        limits = self._options.limits.of(accuracy)
        result: dict[str, Any] = {
            "id": "",
            "chain": list(planned.chain),
            "status": "refused",
            "reason": "",
            "class": accuracy,
            "accuracy": {},
            "atol": {name: limits.above(noise).atol for name, noise in self._noise.items()},
            "metric": None,
            "profile": [],
            "bytes": 0,
            "host_bytes": 0,
            "seconds": 0.0,
        }
        try:
            self._check_needs(step)
            environment = self._environments.find(step.name, step.requires)
        except ConchError as error:
            # Refusals are cheap, and depend on what is installed: they leave no folder.
            is_refusal = isinstance(error, RefusedStepError)
            result |= {"status": "refused" if is_refusal else "error", "reason": error.message}
            self._tell(result)
            return result
        key = self._key(planned, source, environment)
        earlier = self._earlier.get(key)
        if earlier is not None and earlier["status"] != "error":  # which may be another one today
            self._tell(earlier, " (of an earlier run)")
            return earlier
        folder = self._new_folder(step.name, result["chain"])
        result["id"] = folder.name
        self._progress(f"{folder.name}: {' > '.join(planned.chain)}")
        try:
            self._make(planned, source, environment, folder, result)
        except ProcessFailedError as error:
            result["reason"] = str(error)
            result["tail"] = last_lines(folder / "log.txt")
        result |= {"key": key, "source": self._source.digest}
        _write(folder / "result.json", json.dumps(result, indent=1))
        self._tell(result)
        return result

    def _check_needs(self, step: Step) -> None:
        """Refuses a step that is not possible here, before an environment is built for it."""
        if "data" in step.needs and self._origin == "random" and not self._options.random_data_is_fine:
            raise RefusedStepError("needs --data; with --random-data-is-fine random samples do")
        if "gpu" in step.needs and not find_gpus(0.0):
            raise RefusedStepError("needs an NVIDIA GPU, on which engines are built; there is none here")

    def _make(
        self,
        planned: PlannedStep,
        source: Path,
        environment: StepEnvironment,
        folder: Path,
        result: dict[str, Any],
    ) -> None:
        """Converts, judges, measures; raises ProcessFailedError with the reason of a failure."""
        step = planned.step
        kind = self._options.kinds[step.result]
        log, model = folder / "log.txt", folder / "1"
        model.mkdir()
        job = self._job("convert", step.function, source, self._signature.as_json(), self._batch)
        job["options"] = {
            "function": self._source.function,
            "file": kind.file,
            "conch_prefix": sys.prefix,
            **step.options,
        }
        job["samples"] = str(self._samples_file)
        result["status"] = "error"
        _write_reproduction(folder, environment)
        started = _now()
        try:
            facts = self._run_step(folder, job, environment, log, model)
        except RefusedStepError as error:
            result |= {"status": "refused", "reason": error.message}
            return
        result["seconds"] = round(_now() - started, 2)
        result["bytes"] = sum(each.stat().st_size for each in model.rglob("*") if each.is_file())
        signature = self._signature.changed_by(facts)
        parameters = facts.get("parameters", {})
        (folder / "config.pbtxt").write_text(config_text(kind, signature, self._batch, parameters))
        result |= {
            "inputs": [asdict(each) for each in signature.inputs],
            "outputs": [asdict(each) for each in signature.outputs],
            "parameters": parameters,
        }
        reason = self._judge(folder, signature, result)
        if reason:
            result |= {"status": "failed", "reason": reason}
            return
        measured = self._serve(folder, signature, self._options.measure_s)
        result |= {"profile": measured["profile"], "host_bytes": measured["host_bytes"]}
        result |= {"load_s": round(measured["load_s"], 3), "status": "passed"}

    def _judge(self, folder: Path, signature: ModelSignature, result: dict[str, Any]) -> str:
        """Compares what conch answers with the source's answers; returns why it fails, if it does."""
        found = self._serve(folder, signature, 0.0)
        if "load_error" in found:
            cause = found["load_error"].rpartition(_STATE)[2].rstrip(" ;\n")
            return f"conch can't load it: {cause}"
        sizes = self._sizes()
        for size in sizes:
            batches = f"batches of {size}" if size else "requests"
            if text := found["errors"].get(str(size)):
                _remove_answers(folder)
                return f"{batches} fail: {text}"
            file = folder / f"answers-{size}.npz"
            answers = _arrays(file)
            file.unlink()
            renamed = {each.original: _typed(answers[each.name], each.datatype) for each in signature.outputs}
            rows = len(next(iter(renamed.values())))
            verdict = self._verdict(renamed, rows, signature, result)
            if size == sizes[0]:
                result["accuracy"] = {
                    name: {key: value for key, value in asdict(each).items() if value is not None}
                    for name, each in verdict.outputs.items()
                }
            if verdict.reason:
                _remove_answers(folder)
                return verdict.reason if size == sizes[0] else f"in {batches}, {verdict.reason}"
        return ""

    def _verdict(
        self, answers: dict[str, Array], rows: int, signature: ModelSignature, result: dict[str, Any]
    ) -> Verdict:
        reference = {name: array[:rows] for name, array in self._reference.items()}
        renamed = {each.original for each in signature.outputs if each.reference}
        if renamed:  # the step tells which of the source's outputs it stands for
            reference = {name: reference[name].astype(answers[name].dtype) for name in renamed}
        tolerances = self._options.limits.of(result["class"])
        verdict = judge(reference, answers, tolerances, self._noise)
        if not self._options.metric or not verdict.outputs:
            return verdict
        if rows < self._rows:  # the metric is of all samples
            return Verdict("", verdict.outputs)
        wanted = self._wanted_metric
        assert wanted is not None
        metric = self._metric_of({**self._reference, **answers})
        result["metric"] = {"value": metric, "original": wanted}
        if metric >= wanted - self._options.max_drop:
            return Verdict("", verdict.outputs)
        return Verdict(
            f"the metric drops from {wanted:.6g} to {metric:.6g}; {self._options.max_drop:g} is allowed",
            verdict.outputs,
        )

    def _metric_of(self, outputs: Mapping[str, Array]) -> float:
        """What the user's function makes of outputs."""
        targets = None
        try:
            if self._options.targets is not None:
                targets = np.load(self._options.targets, allow_pickle=False)
            return float(_user_function(self._options.metric)(dict(outputs), targets))
        except Exception as error:  # of the user's function or file
            raise InvalidArgumentError(
                f"--metric {self._options.metric}: {type(error).__name__}: {error}"
            ) from error

    def _serve(self, folder: Path, signature: ModelSignature, seconds: float) -> dict[str, Any]:
        """Has conch serve a candidate: it answers the samples, or with `seconds` it is measured."""
        job = {
            "parent": os.getpid(),
            "repository": str(self._candidates),
            "model": folder.name,
            "samples": str(self._samples_file),
            "inputs": [asdict(each) for each in signature.inputs],
            "batching": self._signature.batching,
            "largest": self._batch or 1,
            "sizes": self._sizes(),
            "few_rows": _FEW_ROWS,
            "seconds": seconds,
            "timeout_s": self._options.step_timeout_s,
        }
        file, answers = folder / "serving.json", folder / "answers.json"
        file.write_text(json.dumps(job))
        command = [sys.executable, "-P", "-m", "conch_tools.optimize.serving_process", str(file)]
        log = folder / "log.txt"
        try:
            run_process(command, folder, dict(os.environ), log, self._options.step_timeout_s)
        except ProcessFailedError as error:
            raise ProcessFailedError(f"conch fails while it serves the model: {error}") from error
        found: dict[str, Any] = json.loads(answers.read_text())
        for each in (file, answers):
            each.unlink()
        return found

    def _sizes(self) -> list[int]:
        """Batch sizes to judge, the one with all samples first; 0 without a batch dimension."""
        return [self._batch, *(size for size in (1, 2) if size < self._batch)]

    def _run_step(
        self,
        folder: Path,
        job: Mapping[str, Any],
        environment: StepEnvironment,
        log: Path,
        result: Path | None = None,
    ) -> dict[str, Any]:
        """Runs a function of a step; returns the facts that it tells."""
        file = folder / "job.json"
        file.write_text(json.dumps(job, indent=1))
        where = result or folder
        command = [environment.python, str(_RUNNER), str(file), str(where)]
        failure, facts = where / "failure.json", where / "facts.json"
        try:
            run_process(command, folder, environment.variables, log, self._options.step_timeout_s)
        except ProcessFailedError:
            if not failure.is_file():
                raise
            said = json.loads(failure.read_text())
            failure.unlink()
            raise (RefusedStepError if said["refused"] else ProcessFailedError)(said["text"]) from None
        found: dict[str, Any] = json.loads(facts.read_text())
        facts.unlink()
        return found

    def _job(self, what: str, function: str, source: Path, signature: Any, batch: int) -> dict[str, Any]:
        return {
            "what": what,
            "function": function_of(function),
            "source": str(source),
            "batch": batch,
            "signature": signature,
            "samples": "",
            "options": {},
        }

    def _key(self, planned: PlannedStep, source: Path, environment: StepEnvironment) -> str:
        """Hash of all that the result depends on."""
        step, options = planned.step, self._options
        metric = options.metric.rpartition(":")[0]
        return _digest(
            [
                FORMAT,
                __version__,
                digest_of(source),
                list(planned.chain),
                asdict(step),
                asdict(options.kinds[step.result]),
                _file_digest(step.function),
                [environment.version_of(each) for each in step.requires],
                self._samples_digest,
                self._batch,
                {name: _array_digest(array) for name, array in self._reference.items()},
                asdict(options.limits),
                [options.metric, digest_of(Path(metric)) if metric.endswith(".py") else "", options.max_drop],
                digest_of(options.targets) if options.targets else "",
                options.measure_s,
                options.batching,
            ]
        )

    def _read_earlier(self) -> Sequence[tuple[str, dict[str, Any]]]:
        """Results of earlier runs by key; folders without one are removed."""
        found = []
        for folder in sorted(self._candidates.iterdir()):
            try:
                result = json.loads((folder / "result.json").read_text())
                if result["source"] != self._source.digest:
                    raise KeyError
                found.append((result["key"], result))
            except (OSError, ValueError, KeyError):
                shutil.rmtree(folder)  # of another source, or of a run that was killed
        return found

    def _new_folder(self, name: str, chain: list[str]) -> Path:
        """An empty folder; that of the same chain with other options, files or versions is replaced."""
        numbers = [int(each.name.partition("-")[0]) for each in self._candidates.iterdir()]
        folder = self._candidates / f"{max(numbers, default=0) + 1:02}-{name}"
        for key in [key for key, found in self._earlier.items() if found["chain"] == chain]:
            folder = self._candidates / self._earlier.pop(key)["id"]
            shutil.rmtree(folder)
        folder.mkdir()
        return folder

    def _tell(self, result: Mapping[str, Any], more: str = "") -> None:
        reason = f": {result['reason']}" if result["reason"] else ""
        self._progress(f"{result['id'] or result['chain'][-1]}: {result['status']}{reason}{more}")

    def _finish(self, results: list[dict[str, Any]]) -> OptimizeResult:
        """Writes the repository and the report."""
        measured = [_measured(each) for each in results if each["status"] == "passed"]
        best = recommended(measured, self._options.objective)
        repository = None
        shutil.rmtree(self._folder / "repository", ignore_errors=True)
        if best is not None:
            chosen = next(each for each in results if each["id"] == best.id)
            repository = self._write_repository(chosen)
        report = {
            "format": FORMAT,
            "source": {
                "path": str(self._source.path),
                "kind": self._source.kind.name,
                "digest": self._source.digest,
                "inputs": [_public(asdict(each)) for each in self._signature.inputs],
                "outputs": [_public(asdict(each)) for each in self._signature.outputs],
            },
            "environment": _machine(self._environments.own),
            "samples": {"origin": self._origin, "rows": self._rows},
            "noise": self._noise,
            "objective": self._options.objective,
            "candidates": [
                {key: value for key, value in each.items() if key not in ("key", "parameters", "source")}
                for each in results
            ],
            "recommended": best.id if best else None,
            "front": [each.id for each in front(measured)],
        }
        write_report(self._folder, report)
        write_status(self._folder, results, best.id if best else None, done=True)
        if repository is not None and self._options.apply is not None:
            self._apply(repository)
        return OptimizeResult(self._folder, report, repository)

    def _write_repository(self, result: Mapping[str, Any]) -> Path:
        """Writes the repository with one candidate."""
        options = self._options
        repository = self._folder / "repository"
        model = repository / self._name
        model.mkdir(parents=True)
        shutil.copytree(self._candidates / result["id"] / "1", model / "1")
        kind = options.kinds[next(each for each in options.steps if each.name == result["chain"][-1]).result]
        signature = self._signature.changed_by(result)
        sample = {
            each.name: self._sample[each.original].astype(
                "S" if each.datatype == "BYTES" else NUMPY_DTYPES[each.datatype]
            )
            for each in signature.inputs
        }
        write_warmup(model, signature, sample)
        labels = ""
        if options.labels is not None:
            labels = options.labels.name
            shutil.copyfile(options.labels, model / labels)
        text = config_text(
            kind,
            signature,
            self._batch,
            result["parameters"],
            name=self._name,
            warmup=sample,
            labels=labels,
        )
        (model / "config.pbtxt").write_text(text)
        return repository

    def _apply(self, repository: Path) -> None:
        assert self._options.apply is not None
        shutil.copytree(repository / self._name, self._options.apply / self._name)


def _remove_answers(folder: Path) -> None:
    for each in folder.glob("answers-*.npz"):
        each.unlink()


def _measured(result: Mapping[str, Any]) -> Measured:
    profile = result["profile"]
    throughput = max(row["throughput"] for row in profile)
    return Measured(result["id"], profile[0]["p50_us"], throughput, result["host_bytes"], result["bytes"])


def _write_reproduction(folder: Path, environment: StepEnvironment) -> None:
    """A script that converts again, into a folder beside it."""
    script = folder / "reproduce.sh"
    script.write_text(
        "#!/bin/sh\n# Converts again, into the folder 'reproduced' or the one that is named.\n"
        'cd "$(dirname "$0")" || exit\n'
        f"exec '{environment.python}' '{_RUNNER}' job.json \"${{1:-reproduced}}\"\n"
    )
    script.chmod(0o755)


def _user_function(text: str) -> Callable[..., Any]:
    """A function by ``module:name`` or ``file.py:name``."""
    place, _, name = text.rpartition(":")
    module: ModuleType
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None and spec.loader is not None, place
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _machine(environment: StepEnvironment) -> dict[str, Any]:
    model, flags = platform.processor(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            model = value.strip() if key.strip() == "model name" else model
            flags = value.strip() if key.strip() == "flags" else flags
    except OSError:
        pass
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "flags": flags.split(),
        "python": platform.python_version(),
        "packages": dict(sorted(environment.packages.items())),
    }


def _public(tensor: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tensor.items() if value != ""}


def _typed(array: Array, datatype: str) -> Array:
    return array.astype("S") if datatype == "BYTES" else array


def _rounded(array: Array) -> Array:
    """Floats rounded to FP32."""
    return array.astype(np.float32).astype(array.dtype) if array.dtype.kind == "f" else array


def _arrays(path: Path) -> dict[str, Array]:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _array_digest(array: Array) -> str:
    facts = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(facts + np.ascontiguousarray(array).tobytes()).hexdigest()[:32]


def _file_digest(function: str) -> str:
    return digest_of(Path(function_of(function).rpartition(":")[0]))


def _digest(facts: Any) -> str:
    text = json.dumps(facts, sort_keys=True, default=dict)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _write(path: Path, text: str) -> None:
    """Writes a file that is there as a whole or not at all."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(text)
    unfinished.rename(path)


def _now() -> float:
    return monotonic_ns() / 1e9
