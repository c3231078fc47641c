"""Selects the models that a server loads at its start, and reports those that fail."""

from __future__ import annotations

from dataclasses import dataclass

from conch.core.errors import ConchError, InvalidArgumentError
from conch_control.control_options import WILDCARD, ControlOptions
from conch_control.lifecycle.ensemble_loader import EnsembleError
from conch_control.lifecycle.model_definition import PollError
from conch_control.repository.source import Scan, without_incomplete


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A model that could not be loaded at the start."""

    name: str
    error: ConchError

    @property
    def reason(self) -> str:
        """The error for operators."""
        if isinstance(self.error, PollError | EnsembleError):
            return self.error.reason
        return self.error.message

    def __str__(self) -> str:
        return f"failed to load '{self.name}': {self.reason}"


def check_startup_options(options: ControlOptions) -> None:
    """Raises InvalidArgumentError: the options that name models contradict each other."""
    if options.startup_models and not options.loads_by_name:
        raise InvalidArgumentError(
            "Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
        )
    if WILDCARD in options.startup_models and len(options.startup_models) > 1:
        raise InvalidArgumentError(
            f"Wildcard model name '{WILDCARD}' must be the ONLY startup model if specified at all."
        )


def startup_names(options: ControlOptions, scan: Scan) -> list[str]:
    """The models of a scan to be loaded at the start; a named one also if no repository has it."""
    startup = options.startup_models
    if not options.loads_by_name or WILDCARD in startup:
        names = sorted({*scan.models, *scan.duplicates})
        # The planner loads incomplete ones when they are complete.
        return names if options.mode in ("none", "explicit", "on-demand") else without_incomplete(names, scan)
    return list(dict.fromkeys(each for name in startup for each in scan.identified(name)))
