"""Time that a test waits for what the code under test does at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import httpx

PATIENCE_S = 120.0
"""A wait that no machine exceeds, however busy, unless the code under test is broken."""


def make_httpx_patient() -> None:
    """Raises the limits of httpx's clients and functions, 5 seconds by default, to `PATIENCE_S`."""
    default = inspect.signature(httpx.Client).parameters["timeout"].default
    default.connect = default.read = default.write = default.pool = PATIENCE_S


def given_time(run: Callable[[float], bool], first_s: float) -> None:
    """Runs what has to be done before a time limit passes, again with a longer one where it was not.

    Args:
        run: Takes the limit in seconds; False if the limit passed too early to tell.
        first_s: The first limit.
    """
    limit_s = first_s
    while not run(limit_s):
        limit_s *= 4
        assert limit_s < 2 * PATIENCE_S, "no time limit is long enough"
