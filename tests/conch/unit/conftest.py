"""A CUDA driver that is none."""

from __future__ import annotations

from tests.support.cuda_fixtures import cuda, devices, driver

__all__ = ["cuda", "devices", "driver"]
