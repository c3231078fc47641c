"""Runs jobs about a pickle in the sandbox, and takes their answers from a pipe, without unpickling any."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from conch.core.errors import ConchError, InvalidArgumentError, UnavailableError
from conch_tools.convert.sandbox import UNAVAILABLE
from conch_tools.optimize.step_environments import StepEnvironment

_FOLDER = Path(__file__).parent
_SANDBOX, _JOB = _FOLDER / "sandbox.py", _FOLDER / "pickle_job.py"
_LAYERS = "landlock,seccomp"
_KEPT = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "LC_ALL", "TZ")
"""Variables that the job gets. Others may be secrets, which a pickle could put into the model."""
_OWN = {
    **{"PYTHONDONTWRITEBYTECODE": "1", "JOBLIB_MULTIPROCESSING": "0", "MPLBACKEND": "agg"},
    **{name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")},
}
_MOST_HEADER = 1 << 28
_MOST_TEXT = 1 << 16
_TAIL_LINES = 6
_FACTS = {
    "versions": {"sklearn"},
    "convert": {"kind", "about", "warnings", "rows", "made", "dropped", "predictions"},
}
"""Facts that an answer has at least, by action."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a job.

    Attributes:
        layers: Layers of the sandbox that it ran in.
        facts: Facts by name, see `pickle_job`.
    """

    layers: tuple[str, ...]
    facts: Mapping[str, Any]


class SandboxedReader:
    """Runs jobs about one pickle.

    Args:
        source: The pickle.
        timeout_s: Seconds that a job may take.
    """

    def __init__(self, source: Path, timeout_s: float) -> None:
        self._source = source
        self._timeout_s = timeout_s
        # A pickle may make a model of any size, and joblib compresses: but not without an end.
        self._most_bytes = 64 * source.stat().st_size + (1 << 28)

    def run(self, environment: StepEnvironment, job: Mapping[str, Any], content: Path) -> Answer:
        """Runs a job; writes the model's bytes, if there are any, to a file.

        Raises:
            UnavailableError: There is no sandbox on this machine.
            InvalidArgumentError: The pickle can't be converted; the text says why.
        """
        read_end, write_end = os.pipe()
        text = json.dumps({**job, "source": str(self._source.absolute())})
        command = [sys.executable, "-I", str(_SANDBOX), str(write_end), _LAYERS]
        command += [environment.python, "-I", "-B", str(_JOB), str(write_end), text]
        variables = {name: environment.variables[name] for name in _KEPT if name in environment.variables}
        with open(read_end, "rb") as answer:
            try:
                process = subprocess.Popen(
                    command,
                    cwd="/",
                    env=variables | _OWN,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(write_end,),
                    start_new_session=True,
                )
            finally:
                os.close(write_end)
            assert process.stderr is not None
            return self._answer(process, answer, process.stderr, content, _FACTS[job["action"]])

    def _answer(
        self,
        process: subprocess.Popen[bytes],
        answer: IO[bytes],
        stderr: IO[bytes],
        content: Path,
        needed: set[str],
    ) -> Answer:
        said: list[bytes] = []
        read: list[Answer | ConchError] = []
        threads = [
            threading.Thread(target=_keep_tail, args=(stderr, said)),
            threading.Thread(target=lambda: read.append(self._read(answer, content, needed))),
        ]
        for thread in threads:
            thread.start()
        late = False
        try:
            process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _kill_group(process)
            for thread in threads:
                thread.join()
            stderr.close()
        tail = _printable(b"".join(said))
        if late:
            raise InvalidArgumentError(f"reading it took more than {self._timeout_s:.0f} s; see --timeout")
        if process.returncode == UNAVAILABLE:
            raise UnavailableError(f"the pickle is not read, as this machine has no sandbox for it: {tail}")
        (found,) = read
        if isinstance(found, ConchError):
            raise InvalidArgumentError(f"{found}{': ' if tail else ''}{tail}")
        if "refused" in found.facts:
            raise InvalidArgumentError(str(found.facts["refused"]))
        return found

    def _read(self, answer: IO[bytes], content: Path, needed: set[str]) -> Answer | ConchError:
        try:
            layers = json.loads(answer.readline(_MOST_TEXT))["layers"]
            facts = json.loads(answer.readline(_MOST_HEADER))
        except (ValueError, KeyError, RecursionError):
            return InvalidArgumentError("the process that reads the pickle has ended without an answer")
        # A pickle can write to the pipe too.
        if not isinstance(facts, dict) or not ("refused" in facts or facts.keys() >= needed):
            return InvalidArgumentError("the process that reads the pickle has given another answer")
        rest = self._most_bytes
        with content.open("wb") as file:
            while rest > 0 and (chunk := answer.read(min(1 << 20, rest))):
                file.write(chunk)
                rest -= len(chunk)
        if rest <= 0:
            answer.close()
            return InvalidArgumentError(f"the model of the pickle has more than {self._most_bytes} bytes")
        return Answer(tuple(layers), facts)


def _keep_tail(stderr: IO[bytes], said: list[bytes]) -> None:
    """Reads all, and keeps the end."""
    for line in iter(lambda: stderr.readline(_MOST_TEXT), b""):
        said.append(line)
        del said[:-_TAIL_LINES]


def _printable(text: bytes) -> str:
    """A text of the job without control characters, as it may be meant for the terminal."""
    lines = text.decode(errors="replace").strip().splitlines()
    return "; ".join("".join(each for each in line if each.isprintable()) for line in lines)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills the job and what it has started, which can leave no process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()
