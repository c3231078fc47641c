"""Settings of the invocations route. Imports little: `conch config` reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from conch.server_options import AddOnSettings, PartOptions
from conch.settings.option import Settings, option
from conch.settings.value_types import POSITIVE
from conch_frames.invocations.invocation_provider import InvocationRoutes


@dataclass(frozen=True, slots=True)
class FrameSettings(AddOnSettings):
    """Limits of bodies with rows, as the flags give them."""

    GROUP: ClassVar = "Frames"
    AFTER: ClassVar = {"Frames": "HTTP TLS"}

    most_unpacked_bytes: int = option(
        "--frame-max-unpacked-size",
        POSITIVE,
        256 << 20,
        "maximum size of what the Parquet or Arrow body of an invocation unpacks to",
        unit="bytes",
    )

    def add_to(self, options: PartOptions, settings: Settings) -> PartOptions:
        """Adds the route to REST."""
        if options.http is None:
            return options
        return replace(
            options, http=replace(options.http, further=(*options.http.further, self.routes(settings)))
        )

    @staticmethod
    def routes(settings: Settings) -> InvocationRoutes:
        """The route, for any port of HTTP."""
        return InvocationRoutes(settings.build(FrameSettings).most_unpacked_bytes)
