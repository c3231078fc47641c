"""Fixtures of the tests that treat a server badly."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.server_fixtures import LOAD_ALL, server_fixture
from tests.support.servers import copy_example, write_probe
from tests.support.warm_grpc import grpc_is_warm

__all__ = ["grpc_is_warm", "repository", "server"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, grpc_is_warm: None) -> Path:
    """A repository with the probe and `simple`."""
    directory = tmp_path_factory.mktemp("models")
    write_probe(directory)
    copy_example(directory, "simple")
    return directory


server = server_fixture(flags=LOAD_ALL, process=True, scope="function")
"""A server of a test's own, with all models loaded, in explicit mode."""
