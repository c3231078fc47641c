"""``conch demo``: serves the example models, from a checkout or from the installed package."""

from __future__ import annotations

from pathlib import Path

import conch
from conch.flags import FlagError

_REPOSITORIES = ("basic", "python")


def examples_directory() -> Path:
    """The directory of the examples.

    Raises:
        FlagError: The installation has none.
    """
    package = Path(conch.__file__).parent
    # A wheel has them inside the package, a checkout at its root.
    for directory in (package / "examples", package.parents[1] / "examples"):
        if (directory / "models").is_dir():
            return directory
    raise FlagError(f"the example models are not installed: there is no {package / 'examples' / 'models'}")


def demo_flags() -> list[str]:
    """The flags that have `conch serve` serve the example models.

    Raises:
        FlagError: The installation has none.
    """
    models = examples_directory() / "models"
    return [f"--model-repository={models / name}" for name in _REPOSITORIES]
