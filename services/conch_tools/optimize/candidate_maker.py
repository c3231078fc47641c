"""Makes one candidate: its step converts, its answers are checked, and if it passes its speed is measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conch import __version__
from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError
from conch.process.gpu_discovery import find_gpus
from conch_tools.machine import machine_facts, overflows_16_bits
from conch_tools.optimize.accuracy_check import AccuracyCheck
from conch_tools.optimize.candidate_config import config_text
from conch_tools.optimize.candidate_folders import CandidateFolders
from conch_tools.optimize.candidate_serving import CandidateServing
from conch_tools.optimize.digests import digest_of_array, digest_of_facts
from conch_tools.optimize.judging import loosest
from conch_tools.optimize.model_kinds import digest_of
from conch_tools.optimize.options import OptimizeOptions
from conch_tools.optimize.original import RANDOM, Original
from conch_tools.optimize.step_environments import RefusedStepError, StepEnvironment, StepEnvironments
from conch_tools.optimize.step_plan import PlannedStep
from conch_tools.optimize.step_processes import ProcessFailedError, last_lines
from conch_tools.optimize.step_runner import (
    LOG,
    StepRunner,
    digest_of_function,
    step_job,
    write_reproduction,
)
from conch_tools.optimize.step_table import Step

_RESULT_FORMAT = 1


class CandidateMaker:
    """Makes candidates, or takes those of an earlier run that depend on the same.

    Raises:
        InvalidArgumentError: The user's metric fails for the original.
    """

    def __init__(
        self,
        original: Original,
        options: OptimizeOptions,
        folders: CandidateFolders,
        environments: StepEnvironments,
        progress: Callable[[str], None],
    ) -> None:
        self._original, self._options = original, options
        self._folders, self._environments, self._progress = folders, environments, progress
        self._reduces_range = overflows_16_bits(machine_facts()["flags"])
        self._runner = StepRunner(options.step_timeout_s)
        self._serving = CandidateServing(original, options.step_timeout_s)
        self._check = AccuracyCheck(original, options, self._serving)

    def make(self, planned: PlannedStep, source: Path) -> dict[str, Any]:
        """Makes the candidate of a step from the files of the step before; returns its result."""
        step = planned.step
        result = self._empty_result(planned)
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
        earlier = self._folders.earlier(key)
        if earlier is not None:
            self._tell(earlier, " (of an earlier run)")
            return earlier
        folder = self._folders.new(step.name, result["chain"])
        result["id"] = folder.name
        self._progress(f"{folder.name}: {' > '.join(planned.chain)}")
        try:
            self._convert_and_judge(planned, source, environment, folder, result)
        except ProcessFailedError as error:
            result["reason"] = str(error)
            result["tail"] = last_lines(folder / LOG)
        self._folders.keep(result, key)
        self._tell(result)
        return result

    def _empty_result(self, planned: PlannedStep) -> dict[str, Any]:
        accuracy = loosest([each.accuracy for each in self._options.steps if each.name in planned.chain])
        limits = self._options.limits.of(accuracy)
        return {
            "id": "",
            "chain": list(planned.chain),
            "status": "refused",
            "reason": "",
            "class": accuracy,
            "accuracy": {},
            "atol": {name: limits.above(noise).atol for name, noise in self._original.noise.items()},
            "metric": None,
            "profile": [],
            "bytes": 0,
            "host_bytes": 0,
            "seconds": 0.0,
        }

    def _check_needs(self, step: Step) -> None:
        """Refuses a step that is not possible here, before an environment is built for it."""
        if "data" in step.needs and self._original.origin == RANDOM and not self._options.random_data_is_fine:
            raise RefusedStepError("needs --data; with --random-data-is-fine random samples do")
        if "gpu" in step.needs and not find_gpus(0.0):
            raise RefusedStepError("needs an NVIDIA GPU, on which engines are built; there is none here")

    def _convert_and_judge(
        self,
        planned: PlannedStep,
        source: Path,
        environment: StepEnvironment,
        folder: Path,
        result: dict[str, Any],
    ) -> None:
        """Fills in the result; raises ProcessFailedError with the reason of a failure."""
        step, original = planned.step, self._original
        kind = self._options.kinds[step.result]
        model = folder / "1"
        model.mkdir()
        job = step_job("convert", step.function, source, original.signature.as_json(), original.batch)
        job["options"] = {
            "function": original.source.function,
            "file": kind.file,
            "conch_prefix": sys.prefix,
            "reduce_range": self._reduces_range,
            **step.options,
        }
        job["samples"] = str(original.samples_file)
        result["status"] = "error"
        write_reproduction(folder, environment)
        started = monotonic_ns()
        try:
            facts = self._runner.run(folder, job, environment, model)
        except RefusedStepError as error:
            result |= {"status": "refused", "reason": error.message}
            return
        result["seconds"] = round((monotonic_ns() - started) / 1e9, 2)
        result["bytes"] = sum(each.stat().st_size for each in model.rglob("*") if each.is_file())
        signature = original.signature.changed_by(facts)
        parameters = facts.get("parameters", {})
        (folder / "config.pbtxt").write_text(config_text(kind, signature, original.batch, parameters))
        result |= {
            "inputs": [asdict(each) for each in signature.inputs],
            "outputs": [asdict(each) for each in signature.outputs],
            "parameters": parameters,
        }
        checked = self._check.check(folder, signature, result["class"])
        result |= {"accuracy": checked.accuracy, "metric": checked.metric}
        if checked.reason:
            result |= {"status": "failed", "reason": checked.reason}
            return
        measured = self._serving.measure(folder, signature, self._options.measure_s)
        result |= {"profile": measured["profile"], "host_bytes": measured["host_bytes"]}
        result |= {"load_s": round(measured["load_s"], 3), "status": "passed"}

    def _key(self, planned: PlannedStep, source: Path, environment: StepEnvironment) -> str:
        """Hash of all that the result depends on."""
        step, options, original = planned.step, self._options, self._original
        metric = options.metric.rpartition(":")[0]
        return digest_of_facts(
            [
                _RESULT_FORMAT,
                __version__,
                digest_of(source),
                list(planned.chain),
                asdict(step),
                asdict(options.kinds[step.result]),
                digest_of_function(step.function),
                [environment.version_of(each) for each in step.requires],
                original.samples_digest,
                original.batch,
                self._reduces_range,
                {name: digest_of_array(array) for name, array in original.answers.items()},
                asdict(options.limits),
                [options.metric, digest_of(Path(metric)) if metric.endswith(".py") else "", options.max_drop],
                digest_of(options.targets) if options.targets else "",
                options.measure_s,
                options.batching,
            ]
        )

    def _tell(self, result: Mapping[str, Any], more: str = "") -> None:
        reason = f": {result['reason']}" if result["reason"] else ""
        self._progress(f"{result['id'] or result['chain'][-1]}: {result['status']}{reason}{more}")
