"""The ports of SageMaker and Vertex AI as parts of the server."""

from __future__ import annotations

from collections.abc import Sequence

from conch.parts.http_part import HttpPart
from conch.parts.server_part import PartContext, ServerPart
from conch_platforms.platform_options import PlatformOptions

_STARTED = {"SageMaker": "Sagemaker HTTPService", "Vertex AI": "Vertex AI HTTPService"}
"""Platforms in Triton's lines of started services."""


def platform_parts(options: PlatformOptions, context: PartContext) -> Sequence[ServerPart]:
    """The ports, for the entry-point group ``conch.parts``."""
    return [HttpPart(each, context, _STARTED[each.title]) for each in options.http]
