"""The asyncio client of tritonclient."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton_aio
from tests.support.grpc_transports import each_transport
from tests.support.servers import WAIT_S, AnyServer, check_simple, simple_inputs, tensor
from tritonclient.utils import InferenceServerException

grpc_transport = each_transport()


def run(server: AnyServer, use: Callable[[Any], Awaitable[None]]) -> None:
    """Runs a coroutine function with a client."""

    async def main() -> None:
        async with triton_aio.InferenceServerClient(server.address) as client:
            await asyncio.wait_for(use(client), WAIT_S)

    asyncio.run(main())


def test_infer(server: AnyServer) -> None:
    async def use(client: Any) -> None:
        assert await client.is_server_live()
        assert await client.is_model_ready("simple")
        results = await asyncio.gather(*(client.infer("simple", simple_inputs(n)) for n in range(50)))
        for number, result in enumerate(results):
            check_simple(result, number)
        with pytest.raises(InferenceServerException) as raised:
            await client.infer("nope", simple_inputs())
        assert raised.value.status() == "StatusCode.NOT_FOUND"
        assert raised.value.message() == "Request for unknown model: 'nope' is not found"

    run(server, use)


def test_stream_infer(server: AnyServer) -> None:
    numbers = [tensor("IN", np.array([1, 2, 3], np.int32), "INT32")]

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "simple", "inputs": simple_inputs(1), "request_id": "a"}
        yield {"model_name": "nope", "inputs": simple_inputs(), "request_id": "b"}
        yield {"model_name": "repeater", "inputs": numbers, "request_id": "c"}

    async def use(client: Any) -> None:
        errors: list[str] = []
        seen: list[tuple[str, bool]] = []
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                errors.append(error.message())
            else:
                answer = result.get_response()
                seen.append((answer.id, answer.parameters["triton_final_response"].bool_param))
        assert errors == ["Request for unknown model: 'nope' is not found"]
        # Decoupled responses come when they are there, before those of other models or after them.
        assert [answer for answer in seen if answer[0] == "c"] == [("c", False)] * 3
        assert [answer for answer in seen if answer[0] != "c"] == [("a", True)]

    run(server, use)


def test_cancelled_infer(server: AnyServer, tmp_path: Any) -> None:
    started, noticed = tmp_path / "started", tmp_path / "noticed"
    inputs = [tensor("IN", np.zeros((1, 4), np.float32))]

    async def exists(path: Any) -> None:
        while not path.exists():
            await asyncio.sleep(0.005)

    async def use(client: Any) -> None:
        orders = {"started": str(started), "until_cancelled": str(noticed)}
        task = asyncio.ensure_future(client.infer("probe", inputs, parameters=orders))
        await exists(started)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await exists(noticed)

    run(server, use)
