"""Fixtures of the tests that start `conch` as a process."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from tests.support.servers import copy_example, write_probe


@pytest.fixture(scope="session", autouse=True)
def grpc_is_warm() -> None:
    """Has gRPC open what it keeps for the life of the process."""
    channel = grpc.insecure_channel("127.0.0.1:1")
    with pytest.raises(grpc.RpcError):
        channel.unary_unary("/warm/up")(b"", timeout=5)
    channel.close()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model repository with the probe and `simple`."""
    directory = tmp_path / "models"
    write_probe(directory)
    copy_example(directory, "simple")
    return directory
