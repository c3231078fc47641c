"""Runs the function of a step: writes its job, starts `steps/step_main.py`, reads the facts that it tells."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conch_tools.optimize.model_kinds import digest_of
from conch_tools.optimize.step_environments import RefusedStepError, StepEnvironment
from conch_tools.optimize.step_processes import ProcessFailedError, run_process
from conch_tools.optimize.step_table import function_of

LOG = "log.txt"
_PROGRAM = Path(__file__).parent / "steps" / "step_main.py"
_JOB = "job.json"


class StepRunner:
    """Runs functions of steps, each in a process of its own."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def run(
        self, folder: Path, job: Mapping[str, Any], environment: StepEnvironment, result: Path | None = None
    ) -> dict[str, Any]:
        """Runs a job; returns the facts that its function tells.

        Args:
            folder: Gets ``job.json`` and ``log.txt``.
            job: From `step_job`.
            environment: The step's.
            result: Directory that the function writes to; None for `folder`.

        Raises:
            RefusedStepError: The step is not possible here.
            ProcessFailedError: It has failed.
        """
        file = folder / _JOB
        file.write_text(json.dumps(job, indent=1))
        where = result or folder
        command = [environment.python, str(_PROGRAM), str(file), str(where)]
        failure, facts = where / "failure.json", where / "facts.json"
        try:
            run_process(command, folder, environment.variables, folder / LOG, self._timeout_s)
        except ProcessFailedError:
            if not failure.is_file():
                raise
            said = json.loads(failure.read_text())
            failure.unlink()
            raise (RefusedStepError if said["refused"] else ProcessFailedError)(said["text"]) from None
        found: dict[str, Any] = json.loads(facts.read_text())
        facts.unlink()
        return found


def step_job(what: str, function: str, source: Path, signature: Any, batch: int) -> dict[str, Any]:
    """A job for `StepRunner.run`; the caller sets ``samples`` and ``options``."""
    return {
        "what": what,
        "function": function_of(function),
        "source": str(source),
        "batch": batch,
        "signature": signature,
        "samples": "",
        "options": {},
    }


def digest_of_function(function: str) -> str:
    """Hash of the file that has a step's function."""
    return digest_of(Path(function_of(function).rpartition(":")[0]))


def write_reproduction(folder: Path, environment: StepEnvironment) -> None:
    """Writes a script that runs a folder's job again, into a folder beside it."""
    script = folder / "reproduce.sh"
    script.write_text(
        "#!/bin/sh\n# Converts again, into the folder 'reproduced' or the one that is named.\n"
        'cd "$(dirname "$0")" || exit\n'
        f"exec '{environment.python}' '{_PROGRAM}' {_JOB} \"${{1:-reproduced}}\"\n"
    )
    script.chmod(0o755)
