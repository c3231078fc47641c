"""`sys.argv` as models in this process see it: `['']`, as in Triton, where each has a process of its own.

Models share `sys` with the server, or with the program that embeds it, whose arguments stay its own. So while
models are loaded `argv` is a property of `sys` that looks for a model among its callers, and gives that model
a list of its own. A library's thread that has no model's code on its stack sees the arguments of the process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

Find = Callable[[], list[list[str]] | None]
"""Gives the place that holds the arguments of the model that calls; None where no model calls."""

_find: Find | None = None


class _Sys(ModuleType):
    """The class of `sys` while models are loaded."""

    @property
    def argv(self) -> list[str]:
        place = None if _find is None else _find()
        own: list[str] = self.__dict__["argv"] if place is None else place[0]
        return own

    @argv.setter
    def argv(self, value: list[str]) -> None:
        place = None if _find is None else _find()
        if place is None:
            self.__dict__["argv"] = value
        else:
            place[0] = value

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        return importlib.import_module, ("sys",)  # what pickles modules knows their usual class


def divide(find: Find) -> None:
    """Gives models arguments of their own from now on.

    Args:
        find: Finds those of the model that calls.
    """
    global _find
    _find = find
    if type(sys) is ModuleType:  # else the program has a class of its own for it
        sys.__class__ = _Sys


def unite() -> None:
    """Leaves `sys` as it was."""
    if type(sys) is _Sys:
        sys.__class__ = ModuleType  # type: ignore[assignment]
