"""Finds the directory of the examples."""

from __future__ import annotations

from pathlib import Path

import conch
from conch.settings.option import FlagError


def examples_directory() -> Path:
    """The directory of the examples. Raises FlagError: the installation has none."""
    package = Path(conch.__file__).parent
    # A wheel has them inside the package, a checkout at its root.
    for directory in (package / "examples", package.parents[1] / "examples"):
        if (directory / "models").is_dir():
            return directory
    raise FlagError(f"the example models are not installed: there is no {package / 'examples' / 'models'}")
