"""The user's own measure of accuracy: a function that is named on the command line."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from conch.core.errors import InvalidArgumentError


class UserMetric:
    """A function of outputs and targets, the higher the better.

    Args:
        name: ``module:function`` or ``file.py:function``.
        targets: File of what the function gets as targets; None if it gets None.
    """

    def __init__(self, name: str, targets: Path | None) -> None:
        self._name, self._targets = name, targets

    def value_of(self, outputs: Mapping[str, npt.NDArray[Any]]) -> float:
        """Computes the metric of outputs. Raises InvalidArgumentError: the user's function fails."""
        targets = None
        try:
            if self._targets is not None:
                targets = np.load(self._targets, allow_pickle=False)
            return float(_function(self._name)(dict(outputs), targets))
        except Exception as error:  # of the user's function or file
            raise InvalidArgumentError(f"--metric {self._name}: {type(error).__name__}: {error}") from error


def _function(text: str) -> Callable[..., Any]:
    place, _, name = text.rpartition(":")
    module: ModuleType
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None and spec.loader is not None, place
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function: Callable[..., Any] = getattr(module, name)
    return function
