"""``conch demo``: serves the example models, from a checkout or from the installed package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import conch
from conch.cli import serve_command
from conch.core.option import FlagError

_REPOSITORIES = ("basic", "python")
# The console listens on this machine only, and takes changes only from its own page.
_CONSOLE = {
    "console_port": ["8004"],
    "console_allow_control": ["true"],
    "console_allow_infer": ["true"],
}


def examples_directory() -> Path:
    """The directory of the examples. Raises FlagError: the installation has none."""
    package = Path(conch.__file__).parent
    # A wheel has them inside the package, a checkout at its root.
    for directory in (package / "examples", package.parents[1] / "examples"):
        if (directory / "models").is_dir():
            return directory
    raise FlagError(f"the example models are not installed: there is no {package / 'examples' / 'models'}")


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the process's exit code."""
    try:
        models = examples_directory() / "models"
    except FlagError as error:
        print(f"conch demo: {error}", file=sys.stderr)
        return 1
    repositories = [str(models / name) for name in _REPOSITORIES]
    return serve_command.run(arguments, "conch demo", defaults={"model_repository": repositories, **_CONSOLE})
