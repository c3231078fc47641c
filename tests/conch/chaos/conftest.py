"""Fixtures of the tests that treat a server badly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.servers import ServerProcess, copy_example, serving_process, write_probe
from tests.support.warm_grpc import grpc_is_warm

__all__ = ["grpc_is_warm", "repository", "server"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, grpc_is_warm: None) -> Path:
    """A repository with the probe and `simple`."""
    directory = tmp_path_factory.mktemp("models")
    write_probe(directory)
    copy_example(directory, "simple")
    return directory


@pytest.fixture
def server(repository: Path) -> Iterator[ServerProcess]:
    """A server of a test's own, with all models loaded, in explicit mode."""
    with serving_process(repository, flags=["--model-control-mode=explicit", "--load-model=*"]) as server:
        yield server
