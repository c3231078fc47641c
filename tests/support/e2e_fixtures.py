"""Fixtures of the tests that start `conch` as a process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.servers import copy_example, write_probe


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model repository with the probe and `simple`."""
    directory = tmp_path / "models"
    write_probe(directory)
    copy_example(directory, "simple")
    return directory
