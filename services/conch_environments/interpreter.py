"""Finds and tries the interpreter of an environment; computes its variables.

Threads and locks: none; programs run as children, and are killed after a timeout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.model_control import LoadCancelled, never
from conch.workers.environment import inherited
from conch_environments.tools import ends_within, kill_group

OLDEST = (3, 10)
_OLDEST_NUMPY = (1, 23)
"""The first with DLPack."""
_TIMEOUT_S = 120.0
_POLL_S = 0.2
_TAIL = 2000

# Runs in any Python, even in too old ones. `sitecustomize` may print first. `-c` puts the working directory
# into `sys.path`, where workers do not have it.
_PROBE = """
import sys
sys.path[:] = [path for path in sys.path if path]
import json
try:
    import numpy
    found, problem = numpy.__version__, None
except Exception as error:  # boundary: the numpy of the environment
    found, problem = None, "%s: %s" % (type(error).__name__, error)
print("")
print(json.dumps({"version": list(sys.version_info[:3]), "numpy": found, "problem": problem}))
"""

_VARIABLES = "import json, os; print(''); print(json.dumps(dict(os.environ)))"

# Runs the activation scripts of packages; their output must not mix with the reply.
_ACTIVATE = """
python=$1; shift
for script; do . "$script"; done 1>&2
exec "$python" -I -c "$CONCH_LAST_STEP"
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A working interpreter; attributes as in `Environment`."""

    python: Path
    version: str
    variables: Mapping[str, str]
    paths: tuple[Path, ...]


def interpreter_in(
    prefix: Path,
    label: str,
    conda: bool = True,
    added: Mapping[str, str] | None = None,
    stopped: LoadCancelled = never,
) -> Interpreter:
    """Finds and tries the interpreter of an environment.

    With `conda`, it may be a conda environment, with libraries and activation scripts. `added` variables
    override those of the activation.

    Raises:
        InvalidArgumentError: No interpreter, or it does not run, or can't run models.
        UnavailableError: A timeout, or the load was stopped.
    """
    python = find_python(prefix, label)
    variables: Mapping[str, str] = activated(prefix)
    if conda and not (prefix / "pyvenv.cfg").exists():
        variables = _activated_conda(prefix, python, variables, label, stopped)
    variables = {**variables, **(added or {})}
    version = _probed(python, variables, label, stopped)
    places = (Path(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place)
    return Interpreter(python, version, variables, tuple(place.absolute() for place in places))


def find_python(prefix: Path, label: str) -> Path:
    """Path of the interpreter.

    Raises:
        InvalidArgumentError: None found.
    """
    for name in ("python", "python3"):
        python = prefix / "bin" / name
        if python.is_file():
            return python
        if python.is_symlink():
            raise InvalidArgumentError(
                f"{label}: 'bin/{name}' is a link to '{os.readlink(python)}', which is not on this "
                f"machine; an environment that is moved needs an interpreter of its own, as conda's have, or "
                f"one that is installed in the same place"
            )
    raise InvalidArgumentError(
        f"{label}: there is no 'bin/python'; expected a conda environment or a venv, as a directory or "
        f"packed with conda-pack"
    )


def activated(prefix: Path) -> dict[str, str]:
    """Inherited variables, changed as by activating the environment.

    Without ``PYTHONPATH``, which would put the server's packages before the environment's.
    """
    variables = without_python(inherited())
    variables["PATH"] = os.pathsep.join([str(prefix / "bin"), variables.get("PATH", os.defpath)])
    variables["VIRTUAL_ENV" if (prefix / "pyvenv.cfg").exists() else "CONDA_PREFIX"] = str(prefix)
    # Outside of a venv, packages of the user's other interpreters would be found.
    variables["PYTHONNOUSERSITE"] = "1"
    return variables


def without_python(variables: Mapping[str, str]) -> dict[str, str]:
    """Removes variables that point to another interpreter's modules."""
    misleading = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "__PYVENV_LAUNCHER__")
    return {name: value for name, value in variables.items() if name not in misleading}


def _activated_conda(
    prefix: Path, python: Path, variables: Mapping[str, str], label: str, stopped: LoadCancelled
) -> Mapping[str, str]:
    """Adds the variables that Triton sets, and those of activation scripts."""
    # An empty entry would be the working directory.
    libraries = [str(prefix / "lib"), variables.get("LD_LIBRARY_PATH", "")]
    variables = {
        **variables,
        "CONDA_DEFAULT_ENV": prefix.name,
        "LD_LIBRARY_PATH": os.pathsep.join(place for place in libraries if place),
    }
    scripts = sorted((prefix / "etc" / "conda" / "activate.d").glob("*.sh"))
    if not scripts:
        return variables
    bash = shutil.which("bash")
    if bash is None:
        raise UnavailableError(f"{label}: 'etc/conda/activate.d' needs bash, which is not on PATH")
    command = [bash, "-c", _ACTIVATE, "activate", str(python), *map(str, scripts)]
    reply = _run_json(command, {**variables, "CONCH_LAST_STEP": _VARIABLES}, label, stopped)
    del reply["CONCH_LAST_STEP"]
    return {str(name): str(value) for name, value in reply.items()}


def _probed(python: Path, variables: Mapping[str, str], label: str, stopped: LoadCancelled) -> str:
    """Starts the interpreter, checks Python and numpy; returns the version."""
    reply = _run_json([str(python), "-c", _PROBE], variables, label, stopped)
    version = tuple(reply["version"])
    text = ".".join(str(part) for part in version)
    oldest = ".".join(str(part) for part in OLDEST)
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if version < OLDEST:
        raise InvalidArgumentError(
            f"{label}: its interpreter '{python}' is Python {text}, but models run in Python {oldest} or "
            f"newer; make the environment anew, as with 'conda create -n NAME python={ours} numpy'"
        )
    if reply["numpy"] is None:
        raise InvalidArgumentError(
            f"{label}: models need numpy, which can't be imported there ({reply['problem']}); install it "
            f"into the environment of '{python}' (Python {text})"
        )
    numpy = str(reply["numpy"])
    if tuple(int(part) for part in re.findall(r"\d+", numpy)[:2]) < _OLDEST_NUMPY:
        needed = ".".join(str(part) for part in _OLDEST_NUMPY)
        raise InvalidArgumentError(
            f"{label}: its numpy is {numpy}, but models need {needed} or newer; install it into the "
            f"environment of '{python}' (Python {text})"
        )
    return text


def _run_json(
    command: list[str], variables: Mapping[str, str], label: str, stopped: LoadCancelled
) -> dict[str, Any]:
    """Runs a program; returns its last line of output, decoded from JSON."""
    with _memory() as output, _memory() as errors:
        try:
            process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            raise InvalidArgumentError(f"{label}: '{command[0]}' can't be started: {error}") from error
        try:
            _wait(process.pid, command[0], label, stopped)
        finally:
            kill_group(process.pid)  # with its children
            code = process.wait()
        printed, problems = _contents(output), _contents(errors)
    last = printed.decode(errors="replace").rstrip().rpartition("\n")[2]
    try:
        if code == 0 and isinstance(reply := json.loads(last), dict):
            return reply
    except ValueError:
        pass
    problem = (problems or printed).decode(errors="backslashreplace").strip()[-_TAIL:]
    raise InvalidArgumentError(
        f"{label}: '{command[0]}' does not run as a Python interpreter (exit code {code}):\n{problem}"
    )


def _wait(pid: int, program: str, label: str, stopped: LoadCancelled) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not ends_within(pid, _POLL_S):
        if stopped():
            raise UnavailableError(f"{label}: the load was stopped while '{program}' was tried")
        if time.monotonic() > deadline:
            raise UnavailableError(f"{label}: '{program}' did not come to an end within {_TIMEOUT_S:.0f} s")


def _memory() -> IO[bytes]:
    """A memory file for output; unlike a pipe, surviving children can't hold it open."""
    return os.fdopen(os.memfd_create("conch-said"), "w+b")


def _contents(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()
