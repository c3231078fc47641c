"""Fixtures and settings of all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from hypothesis import settings

# `pytest` alone, unlike `python -m pytest`, does not put the root on the path.
if (_root := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _root)

from tests.support.leaks import no_leaks

# From its first loop on libuv keeps a pipe for signals, which is no leak of the test that has that loop.
uvloop.new_event_loop().close()

settings.register_profile("conch", deadline=None)
settings.load_profile("conch")


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves a thread, process, file descriptor or shared-memory name behind."""
    with no_leaks():
        yield
