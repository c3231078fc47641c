"""Rollouts as settings know them: always on. Imports little: `conch config` reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from conch.server_options import AddOnOptions, AddOnSettings, PartOptions
from conch.settings.option import Settings

NAME = "rollout"
"""The name of the entry points of settings and part."""


class RolloutMetrics(AddOnOptions):
    """The part that shows rollouts; it has no options."""


@dataclass(frozen=True, slots=True)
class RolloutSettings(AddOnSettings):
    """Has no settings: the directories are options of the control plane."""

    def add_to(self, options: PartOptions, settings: Settings) -> PartOptions:
        """Adds the part."""
        return replace(options, add_ons={**options.add_ons, NAME: RolloutMetrics()})
