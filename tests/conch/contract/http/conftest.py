"""Fixtures of tests over HTTP."""

from __future__ import annotations

import gevent
import pytest


@pytest.fixture(scope="session", autouse=True)
def event_hub() -> None:
    """The event loop of tritonclient's sockets, which its thread keeps from its first call on."""
    gevent.get_hub().loop  # noqa: B018
