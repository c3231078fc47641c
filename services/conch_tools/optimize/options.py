"""Options of `optimize`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conch.core.errors import InvalidArgumentError, NotFoundError
from conch_tools.optimize.candidate_choice import Objective
from conch_tools.optimize.judging import Limits
from conch_tools.optimize.model_kinds import KINDS, Kind
from conch_tools.optimize.step_table import STEPS, Step

_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LEAST_TUNING_S = 10
_TARGETS = sorted({kind.target for kind in KINDS.values() if kind.backend})


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeOptions:
    """Options of `optimize`; `conch optimize --help` explains them."""

    to: Sequence[str] = ()
    data: Path | None = None
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    random_data_is_fine: bool = False
    max_batch_size: int = 32
    limits: Limits = field(default_factory=Limits)
    metric: str = ""
    targets: Path | None = None
    max_drop: float = 0.005
    objective: Objective = "balance"
    batching: bool = True
    name: str = ""
    labels: Path | None = None
    apply: Path | None = None
    tune_s: int = 0
    offline: bool = False
    environments: Sequence[Path] = ()
    step_timeout_s: float = 600.0
    measure_s: float = 1.0
    restart: bool = False
    steps: Sequence[Step] = STEPS
    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS)


def check_options(options: OptimizeOptions) -> None:
    """Raises ConchError: an option is wrong, or has no effect with another one."""
    for target in options.to:
        if target not in _TARGETS:
            raise InvalidArgumentError(f"--to: '{target}' is none of {', '.join(_TARGETS)}")
    if options.max_batch_size < 1:
        raise InvalidArgumentError(f"--max-batch-size must be 1 or more, not {options.max_batch_size}")
    if options.tune_s and options.tune_s < _LEAST_TUNING_S:
        raise InvalidArgumentError(f"--tune must be {_LEAST_TUNING_S}s or more, not {options.tune_s}s")
    for flag, path in (("--labels", options.labels), ("--targets", options.targets)):
        if path is not None and not path.is_file():
            raise NotFoundError(f"{flag}: there is no file '{path}'")
    if options.name and not _MODEL_NAME.fullmatch(options.name):
        raise InvalidArgumentError(
            f"--name: '{options.name}' has other characters than letters, digits, _ . -"
        )
    if options.targets is not None and not options.metric:
        raise InvalidArgumentError("--targets has no effect without --metric")
    if options.metric and options.limits != Limits():
        raise InvalidArgumentError(
            "--metric decides alone: leave out --atol, --rtol, --min-cosine, --min-top1"
        )
