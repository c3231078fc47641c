"""Models run without a server."""

from __future__ import annotations

from tests.support.backend_fixtures import harness, placement

__all__ = ["harness", "placement"]
