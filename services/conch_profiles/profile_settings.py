"""Settings of input profiles, as the server finds them. Imports little: `conch config` reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import ClassVar

from conch.server_options import AddOnOptions, AddOnSettings, PartOptions
from conch.settings.option import FlagError, Settings, option
from conch.settings.value_types import BOOL, DURATION
from conch_profiles.profile_provider import ProfileRoutes

NAME = "profiles"
"""The name of the entry points of settings and part."""

PROFILE_PARAMETER = "CONCH_PROFILE"
"""Parameter of a config: ``true`` or ``false``, whatever the server's setting."""

PARAMETERS = (PROFILE_PARAMETER,)
"""Parameters of configs that this package reads."""

MISSING = (
    "profiles of inputs need the package datasketches, which is not installed; install it with `pip install "
    "'conch[profile]'`"
)


def problem_of(stated: str | None) -> str:
    """The problem of a value of the parameter; empty for none."""
    if stated in (None, "true", "false"):
        return ""
    return f"parameter '{PROFILE_PARAMETER}' must be 'true' or 'false', got '{stated}'"


def is_installed() -> bool:
    """True if the library of sketches is there."""
    return find_spec("datasketches") is not None


@dataclass(frozen=True, slots=True)
class ProfileOptions(AddOnOptions):
    """Options of the part that profiles inputs.

    Attributes:
        by_default: True for all models with columns, False for those whose config asks for it.
        window_s: Length of a window; a profile covers the present one and the one before.
    """

    by_default: bool
    window_s: float


@dataclass(frozen=True, slots=True)
class ProfileSettings(AddOnSettings):
    """Profiles of inputs, as the flags give them."""

    GROUP: ClassVar = "input profiles"
    AFTER: ClassVar = {"input profiles": "Frames"}

    profile_inputs: bool = option(
        "--profile-inputs",
        BOOL,
        False,
        "profile the inputs of all models with columns that are not decoupled; a model's parameter "
        "CONCH_PROFILE overrides it; see docs/frames.md",
    )
    window_s: float = option(
        "--profile-window",
        DURATION,
        86400.0,
        "length of a window; a profile covers the present one and the one before",
        unit="seconds",
    )

    def check(self, settings: Settings) -> None:
        """Raises FlagError: the library is not installed, or the window is too short."""
        if self.profile_inputs and not is_installed():
            raise FlagError(f"--profile-inputs: {MISSING}")
        if self.window_s < 1:
            raise FlagError(f"--profile-window must be at least 1 second, got {self.window_s:g}")

    def add_to(self, options: PartOptions, settings: Settings) -> PartOptions:
        """Adds the part, and the route to REST."""
        part = ProfileOptions(self.profile_inputs, self.window_s)
        options = replace(options, add_ons={**options.add_ons, NAME: part})
        if options.http is None:
            return options
        return replace(options, http=replace(options.http, further=(*options.http.further, ProfileRoutes())))
