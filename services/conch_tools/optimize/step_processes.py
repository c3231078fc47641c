"""Runs a program of a step to its end: its output goes to a log, and its process group ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_TAIL_LINES = 12


class ProcessFailedError(Exception):
    """The program has failed; the text says how."""


def run_process(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], log: Path, timeout_s: float
) -> None:
    """Runs a program in a folder; appends its output to a log.

    Raises:
        ProcessFailedError: It failed, was killed, or took too long.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ProcessFailedError(f"it did not end within {timeout_s:.0f} s") from None
        finally:
            _kill_group(process)
    if code:
        raise ProcessFailedError(_how(code))


def last_lines(log: Path) -> str:
    """The end of a log."""
    try:
        return "\n".join(log.read_text(errors="replace").strip().splitlines()[-_TAIL_LINES:])
    except OSError:
        return ""


def _how(code: int) -> str:
    if code > 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    memory = "; the kernel does so where memory runs out" if code == -signal.SIGKILL else ""
    return f"its process was killed by {name}{memory}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of the process and of its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()
