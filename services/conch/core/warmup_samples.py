"""Warm-up samples of add-ons, which make them of a model's files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Protocol

from conch.core.add_ons import load_add_ons
from conch.core.spec import ModelSpec, WarmupSample

GROUP = "conch.warmups"
"""Entry-point group of functions that are a `SampleSource`."""


class SampleSource(Protocol):
    """Makes samples that run after those of the config."""

    def __call__(self, spec: ModelSpec) -> Iterable[WarmupSample]:
        """The samples of a version; none for most. Raises nothing: what can't be read is logged."""


def further_samples(spec: ModelSpec) -> list[WarmupSample]:
    """The samples of all add-ons for a version."""
    return [sample for source in _sources() for sample in source(spec)]


@cache
def _sources() -> Sequence[SampleSource]:
    return tuple(load_add_ons(GROUP).values())
