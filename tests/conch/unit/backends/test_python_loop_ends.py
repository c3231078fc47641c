"""Models that end the event loop of their instance: it goes on, and with it all that waits for it."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
from tests.support.backend_harness import Harness, rows, tensor_specs
from tests.support.servers import WAIT_S, eventually

from conch.backends.python.runtime.event_loop import EventLoop
from conch.core.model_version import Model
from conch.workers.python_backend import PythonBackend

START = """
import asyncio, sys
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def reply(request):
    return pb_utils.InferenceResponse([pb_utils.Tensor("B", request.inputs()[0].as_numpy())])

async def background(request):
    value = float(request.inputs()[0].as_numpy()[0, 0])
    if value == 1:
        sys.exit(3)
    if value == 2:
        raise KeyboardInterrupt
    if value == 3:
        asyncio.get_running_loop().stop()

class TritonPythonModel:
    kept = []

    async def behind(self, request):
        # It goes on behind the end of the loop.
        task = asyncio.create_task(background(request))
        self.kept.append(task)
        await asyncio.wait([task])
        await asyncio.sleep(0)
"""

ONE = """
    async def execute(self, requests):
        for request in requests:
            await self.behind(request)
        return [reply(request) for request in requests]
"""

DECOUPLED = """
    async def execute(self, requests):
        for request in requests:
            await self.behind(request)
            request.get_response_sender().send(reply(request), FINAL)
"""

GENERATOR = """
    async def execute(self, requests):
        for request in requests:
            await self.behind(request)
            yield [reply(request) if one is request else None for one in requests]
"""

ENDS = {
    1: "a background task of model 'm_0_0' raised SystemExit; its event loop goes on",
    2: "a background task of model 'm_0_0' raised KeyboardInterrupt; its event loop goes on",
    3: "model 'm_0_0' stopped its event loop, which goes on",
}


@pytest.fixture(params=["in_process", "worker"])
def placement(request: pytest.FixtureRequest) -> str:
    """Models behave the same in both places."""
    return str(request.param)


def load(harness: Harness, body: str, decoupled: bool) -> Model:
    harness.directory("m", {"1/model.py": START + body})
    tensors = {"inputs": tensor_specs(A=("FP32", (2,))), "outputs": tensor_specs(B=("FP32", (2,)))}
    return harness.load(PythonBackend(), harness.spec(**tensors, decoupled=decoupled))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "decoupled"), [(ONE, False), (DECOUPLED, True), (GENERATOR, False), (GENERATOR, True)]
)
def test_what_is_under_way_is_answered_all_the_same(
    harness: Harness, body: str, decoupled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(harness, body, decoupled)
    for value in (*ENDS, 4):
        answer = harness.infer(model, {"A": rows(value)})
        assert [response.error for response in answer.wait()] == [None]
        assert answer.responses[0].outputs[0].numpy().tolist() == [[value, value]]
    for text in ENDS.values():
        eventually(lambda text=text: text in caplog.text, "logged")  # type: ignore[misc]
    # With the place where it was.
    assert "in background\n    sys.exit(3)" in caplog.text
    assert "in background\n    raise KeyboardInterrupt" in caplog.text


def test_a_loop_that_ends_all_the_time_still_closes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    loop = EventLoop("test")
    ended = threading.Event()

    def end() -> None:
        running = asyncio.get_running_loop()
        if not ended.is_set():
            running.call_soon(end)
        running.stop()

    async def waits() -> int:
        asyncio.get_running_loop().call_soon(end)
        for _ in range(100):
            await asyncio.sleep(0)
        return 5

    assert loop.run(waits()).result(WAIT_S) == (5, None)
    ended.set()
    loop.close(WAIT_S)
    assert "conch-test-loop" not in [thread.name for thread in threading.enumerate()]


def test_tasks_that_exit_when_they_are_cancelled_do_not_keep_a_loop_from_closing() -> None:
    loop = EventLoop("test")

    async def starts() -> None:
        started = asyncio.Event()
        kept.append(asyncio.create_task(exits(started)))
        await started.wait()

    async def exits(started: asyncio.Event) -> None:
        started.set()
        try:
            await asyncio.sleep(1000)
        finally:
            raise SystemExit(3)

    kept: list[asyncio.Task[None]] = []
    loop.run(starts()).result(WAIT_S)
    loop.close(0.0)
    assert "conch-test-loop" not in [thread.name for thread in threading.enumerate()]
