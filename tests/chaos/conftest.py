"""Fixtures of the tests that treat a server badly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.support.servers import ServerProcess, copy_example, serving_process, write_probe


@pytest.fixture(scope="module")
def grpc_is_warm() -> None:
    """Has gRPC open what it keeps for the life of the process."""
    channel = grpc.insecure_channel("127.0.0.1:1")
    with pytest.raises(grpc.RpcError):
        channel.unary_unary("/warm/up")(b"", timeout=5)
    channel.close()


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
