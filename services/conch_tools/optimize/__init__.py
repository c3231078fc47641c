"""Converts a model in several ways, judges and measures the results, and makes a repository of the best."""

from __future__ import annotations

from conch_tools.optimize.judging import Limits
from conch_tools.optimize.optimizer import OptimizeResult, optimize
from conch_tools.optimize.options import OptimizeOptions
from conch_tools.optimize.step_table import STEPS, Step

__all__ = ["STEPS", "Limits", "OptimizeOptions", "OptimizeResult", "Step", "optimize"]
