"""Models run without a server, and a CUDA driver that is none."""

from __future__ import annotations

from tests.support.backend_fixtures import harness, placement
from tests.support.cuda_fixtures import cuda, devices, driver
from tests.support.device_client import client

__all__ = ["client", "cuda", "devices", "driver", "harness", "placement"]
