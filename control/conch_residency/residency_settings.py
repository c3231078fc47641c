"""Settings of residency on demand, as the server finds them. Imports little: `conch config` reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from conch.server_options import AddOnOptions, AddOnSettings, PartOptions
from conch.settings.option import DEFAULT, FlagError, Settings, settings_of
from conch_control.lifecycle.residency import Residency, ResidencyKind
from conch_residency.residency_options import ResidencyOptions

if TYPE_CHECKING:
    from conch.core.registry import Registry
    from conch_control.control_options import ControlOptions
    from conch_control.lifecycle.resident_loads import ResidentLoads
    from conch_control.repository.repositories import Repositories

NAME = "residency"
"""The name of the entry points of settings and part."""


class ResidencyMetrics(AddOnOptions):
    """The part that shows the models in memory; it has no options."""


@dataclass(frozen=True, slots=True)
class ResidencySettings(ResidencyOptions, AddOnSettings, ResidencyKind):
    """Residency on demand, as the flags give it."""

    AFTER: ClassVar = {"residency on demand": "metrics"}

    def add_to(self, options: PartOptions, settings: Settings) -> PartOptions:
        """Sets the residency, and adds its metrics. Raises FlagError: a setting has no effect."""
        if options.control.mode != "on-demand":
            for each in settings_of(ResidencySettings):
                if settings.source(each.key).kind != DEFAULT.kind:
                    raise FlagError(f"{each.flag} has an effect only with --model-control-mode=on-demand")
            return options
        if options.control.namespacing:
            raise FlagError("--model-namespacing can't be used with --model-control-mode=on-demand")
        return replace(options, residency=self, add_ons={**options.add_ons, NAME: ResidencyMetrics()})

    def open(
        self, options: ControlOptions, registry: Registry, repositories: Repositories, loads: ResidentLoads
    ) -> Residency:
        """Makes the residency of one server; see `ResidencyKind.open`."""
        from conch_residency.residency import open_residency

        return open_residency(options, self, registry, repositories, loads)
