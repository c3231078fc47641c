"""Models run without a server, and clients with memory on a GPU."""

from __future__ import annotations

from tests.support.backend_fixtures import harness, placement
from tests.support.device_client import client

__all__ = ["client", "harness", "placement"]
