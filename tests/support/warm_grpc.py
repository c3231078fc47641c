"""Objects that gRPC keeps from its first call on, which are no leak of the test that makes that call."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="session", autouse=True)
def grpc_is_warm() -> None:
    """Has gRPC open what it keeps for the life of the process, also for coroutines."""
    channel = grpc.insecure_channel("127.0.0.1:1")
    with pytest.raises(grpc.RpcError):
        channel.unary_unary("/warm/up")(b"", timeout=PATIENCE_S)
    channel.close()

    async def warm_up() -> None:
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary("/warm/up")(b"", timeout=PATIENCE_S)

    asyncio.run(warm_up())
