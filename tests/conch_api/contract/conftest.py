"""Fixtures of tests of servers inside this process."""

from __future__ import annotations

import gevent
import numpy as np
import pytest

import conch


@pytest.fixture(scope="session", autouse=True)
def libraries() -> None:
    """Objects that gRPC and the loop of tritonclient's sockets keep from their first call on."""
    gevent.get_hub().loop  # noqa: B018
    server = conch.Server(grpc_port=0, http_port=0, metrics_port=None)
    server.bind("m", conch.batch(lambda X: X), [conch.Tensor("X")], [conch.Tensor("Y")])
    with server:
        for url in (server.grpc_url, server.http_url):
            assert url is not None
            with conch.Client(url, "m") as client:
                client.infer_batch(np.zeros((1, 1), np.float32))
