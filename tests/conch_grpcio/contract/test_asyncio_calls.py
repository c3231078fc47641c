"""Calls on asyncio with servers without ports, on an event loop of another thread, as in `conch_ray`."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.support.leaks import local_server
from tests.support.servers import WAIT_S, eventually
from tritonclient.grpc import service_pb2 as pb

import conch
from conch.core.servable import Servable
from conch.frontends.grpc.grpc_methods import GrpcMethods
from conch.frontends.grpc.open_calls import OpenCalls
from conch_grpcio.asyncio_calls import CallHead, RefusalError, StreamCall, UnaryCall

SERVICE = "/inference.GRPCInferenceService/"
HEAD = CallHead("", ())
COLUMN = [conch.Tensor("X", np.int32, (1,))]


class Held:
    """A function that waits until it may go on."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.may_go = threading.Semaphore(0)

    def __call__(self, requests: list[conch.Request]) -> list[dict[str, Any]]:
        self.entered.release()
        assert self.may_go.acquire(timeout=WAIT_S)
        return [{"Y": request["X"]} for request in requests]


def double(requests: list[conch.Request]) -> list[dict[str, Any]]:
    return [{"Y": 2 * request["X"]} for request in requests]


def count(requests: list[conch.Request]) -> Iterator[list[dict[str, Any]]]:
    for number in range(int(requests[0]["X"][0])):
        yield [{"Y": np.array([number], np.int32)}]


def request(model: str, number: int) -> bytes:
    message = pb.ModelInferRequest(model_name=model, id=str(number))
    message.inputs.add(name="X", datatype="INT32", shape=[1]).contents.int_contents.append(number)
    return bytes(message.SerializeToString())


def value(response: pb.ModelInferResponse) -> int:
    return int(np.frombuffer(response.raw_output_contents[0], np.int32)[0])


def started(**settings: Any) -> conch.Server:
    server = conch.Server(
        grpc_port=None, http_port=None, metrics_port=None, allow_client_shm=False, **settings
    )
    outputs = [conch.Tensor("Y", np.int32, (1,))]
    plain = conch.ModelConfig(batching=False)
    server.bind("double", double, COLUMN, outputs, plain)
    server.bind("count", count, COLUMN, outputs, conch.ModelConfig(batching=False, decoupled=True))
    return server.start()


def version(server: conch.Server, model: str) -> Servable:
    return server.registry.entries[model].ready[1]


def run_elsewhere(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a coroutine on a loop of another thread, as Ray does."""
    with local_server(), ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(work())).result(60)


async def infer(methods: GrpcMethods, model: str, number: int) -> int:
    call = UnaryCall(HEAD, OpenCalls())
    methods.handle(SERVICE + "ModelInfer", call, request(model, number))
    return value(pb.ModelInferResponse.FromString((await call.answer()).message))


def test_an_access_policy_holds(tmp_path: Path) -> None:
    policy = tmp_path / "access.toml"
    (tmp_path / "key").write_text("the-key-of-a-principal")
    policy.write_text('[[principal]]\nname = "web"\nkey_file = "key"\ninfer = ["*"]\n')

    async def work() -> None:
        server = started(access_policy=policy)
        methods = server.grpc_methods()
        try:
            with pytest.raises(RefusalError, match="no credentials") as caught:
                await infer(methods, "double", 1)
            assert caught.value.end.status == 16
        finally:
            assert server.stop()
            assert methods.close(WAIT_S)

    run_elsewhere(work)


def test_two_servers_in_a_thread_answer_without_ports_and_leave_signals_alone() -> None:
    handlers = {each: signal.getsignal(each) for each in signal.valid_signals()}
    listening = [each for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]

    async def work() -> None:
        servers = [started(), started()]
        methods = [server.grpc_methods() for server in servers]
        try:
            for each in methods:
                assert await asyncio.gather(*(infer(each, "double", n) for n in range(20))) == [
                    2 * n for n in range(20)
                ]
                with pytest.raises(RefusalError, match="unknown model: 'none'") as caught:
                    await infer(each, "none", 1)
                assert caught.value.end.status == 5
            assert {each: signal.getsignal(each) for each in handlers} == handlers
            now = psutil.Process().net_connections()
            assert {each for each in now if each.status == psutil.CONN_LISTEN} <= set(listening)
        finally:
            for server, each in zip(servers, methods, strict=True):
                assert server.stop()
                assert each.close(WAIT_S)

    run_elsewhere(work)


def test_a_stream_keeps_its_order_and_ends_with_its_client() -> None:
    async def responses(methods: GrpcMethods, requests: AsyncIterator[bytes | None]) -> list[Any]:
        call = StreamCall(HEAD, OpenCalls(), requests.__anext__)
        methods.streams[SERVICE + "ModelStreamInfer"](call)
        return [pb.ModelStreamInferResponse.FromString(each) async for each in call.responses()]

    async def three() -> AsyncIterator[bytes | None]:
        for model, number in ("double", 4), ("none", 1), ("count", 3):
            yield request(model, number)
        yield None

    async def endless() -> AsyncIterator[bytes | None]:
        yield request("count", 1 << 30)
        await asyncio.Event().wait()

    async def cancelled() -> AsyncIterator[bytes | None]:
        yield request("double", 1)
        raise ConnectionError

    async def work() -> None:
        server = started()
        methods = server.grpc_methods()
        try:
            got = await responses(methods, three())
            good = [each.infer_response for each in got if not each.error_message]
            assert [value(each) for each in good if each.model_name == "double"] == [8]
            assert [value(each) for each in good if each.model_name == "count"] == [0, 1, 2]
            assert sum("unknown model: 'none'" in each.error_message for each in got) == 1
            call = StreamCall(HEAD, OpenCalls(), endless().__anext__)
            methods.streams[SERVICE + "ModelStreamInfer"](call)
            stream = call.responses()
            await anext(stream)
            await stream.aclose()  # the model sees it and ends: the server stops below
            assert len(await responses(methods, cancelled())) <= 1
        finally:
            assert await asyncio.to_thread(server.stop)
            methods.close(WAIT_S)

    run_elsewhere(work)


def test_a_cancelled_call_cancels_its_request() -> None:
    async def work() -> None:
        server, held = started(), Held()
        outputs = [conch.Tensor("Y", np.int32, (1,))]
        server.bind("held", held, COLUMN, outputs, conch.ModelConfig(batching=False))
        methods = server.grpc_methods()
        try:
            running = asyncio.create_task(infer(methods, "held", 1))
            await asyncio.to_thread(held.entered.acquire)
            waiting = asyncio.create_task(infer(methods, "held", 2))
            counters = version(server, "held").statistics
            await asyncio.to_thread(eventually, lambda: counters.snapshot().pending == 1, "it waits")
            waiting.cancel()
            await asyncio.to_thread(eventually, lambda: counters.snapshot().pending == 0, "it has left")
            held.may_go.release()
            assert await running == 1
            assert counters.snapshot().cancelled["queued"] == 1
        finally:
            held.may_go.release()
            server.stop()
            methods.close(WAIT_S)

    run_elsewhere(work)
