"""What a worker process is started with: an interpreter, its variables, and further places of modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from conch.core.errors import UnavailableError
from conch.workers.environments.inherited import inherited


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a worker of a model runs.

    A worker is started as ``python -X faulthandler script`` and arguments, with exactly these variables.
    ``-I`` is not needed: what must not reach the interpreter is not among the variables, and in the server's
    own environment ``PYTHONPATH`` and the like count for workers as they do for the server. The script takes
    its own folder off `sys.path` and puts `paths` at the end.

    Attributes:
        python: The interpreter. Absolute, and never resolved: an interpreter knows the environment that it
            belongs to by the link that it was started through.
        variables: The whole environment of the process, not only what is added to the server's.
        paths: Directories for the end of `sys.path`, behind everything that is installed there.
        label: What it is, for messages: ``the server's environment``, or a file and its kind.
        version: The interpreter's version, such as ``3.12.1``.
        release: Gives up what keeps the environment from being removed; to be called, once or more often,
            when no worker will be started in it and none runs there any more.
    """

    python: Path
    variables: Mapping[str, str]
    paths: tuple[Path, ...] = ()
    label: str = "the server's environment"
    version: str = ""
    release: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)


def server_environment(added: Mapping[str, str] | None = None) -> Environment:
    """The interpreter that this program runs in, with those of its variables that workers inherit.

    Args:
        added: Variables on top of those.

    Raises:
        UnavailableError: The program does not know its interpreter, as where Python is embedded in another.
    """
    if not sys.executable:
        raise UnavailableError("this program has no Python interpreter that workers could be started with")
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Environment(Path(sys.executable), {**inherited(), **(added or {})}, version=version)
