"""How long a test waits for what the code under test does at once."""

from __future__ import annotations

import inspect

import httpx

PATIENCE_S = 120.0
"""A wait that no machine exceeds, however busy, unless the code under test is broken."""


def make_httpx_patient() -> None:
    """Raises the limits of httpx's clients and functions, 5 seconds by default, to `PATIENCE_S`."""
    default = inspect.signature(httpx.Client).parameters["timeout"].default
    default.connect = default.read = default.write = default.pool = PATIENCE_S
