"""Models run without a server, a CUDA driver that is none, and libraries."""

from __future__ import annotations

from tests.support.backend_fixtures import harness, placement
from tests.support.cuda_fixtures import cuda, devices, driver
from tests.support.device_client import client
from tests.support.libraries import libraries

__all__ = ["client", "cuda", "devices", "driver", "harness", "libraries", "placement"]
