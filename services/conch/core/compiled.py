"""Marks of classes for mypyc, which compiles part of conch, and the build that runs.

The marks are those of `mypy_extensions`, to mypy and mypyc; a server runs without that package.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

__all__ = ["LIBRARY", "build", "mypyc_attr"]

LIBRARY = "conch.compiled__mypyc"
"""The code of all compiled modules, in a wheel that has some; `scripts/compile_hook.py` makes it."""

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**attributes):
        """Marks a class; see mypyc's documentation of native classes."""
        return lambda marked: marked


def build() -> str:
    """The build that runs: ``compiled`` or ``pure``."""
    return "pure" if find_spec(LIBRARY) is None else "compiled"
