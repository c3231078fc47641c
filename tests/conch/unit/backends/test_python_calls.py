"""Calls of models against a server that the test steers."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conch.unit.backends.test_python_utils import received_tensor
from tests.support.backend_harness import Harness
from tests.support.clocks import Clock
from tests.support.core import WAIT_S

from conch.backends.python.api import pb_utils
from conch.backends.python.api.pb_errors import CallsEndedError
from conch.backends.python.calls.bls_call import GRACE_NS, WaitingCall
from conch.backends.python.calls.call_context import CallContext, current_call_context
from conch.backends.python.calls.deadlock_detection import is_deadlocked
from conch.backends.python.runtime.module_loading import ModelCode
from conch.core.bls import Wait, Waiter
from conch.core.clock import monotonic_ns
from conch.core.errors import NotFoundError, ResourceExhaustedError, UnavailableError
from conch.core.model_control import LoadParameter
from conch.core.request import InferenceRequest as CoreRequest
from conch.core.request import InferenceResponse as CoreResponse
from conch.core.request import RequestModel, RequestState
from conch.core.scheduling.scheduler import Batch
from conch.core.tensor import Tensor as CoreTensor
from conch.ipc.loop import IoLoop
from conch.ipc.tensors import ReceivedTensor

MODEL = """
import triton_python_backend_utils as pb_utils
import numpy as np


def make(decoupled=False):
    return pb_utils.InferenceRequest("", 0, [pb_utils.Tensor("IN", np.ones(1, np.float32))], ["OUT"], "b")


def here(function):
    return function()


class TritonPythonModel:
    def execute(self, requests):
        return []
"""


class Server:
    """A `conch.core.bls.ServerCalls`: no more than what a worker can have of the real one."""

    passes_blocks = False

    def __init__(self, answer: Callable[[CoreRequest], object] = lambda request: None) -> None:
        self.answer = answer
        self.waiters: set[Waiter] = set()
        self.submitted: list[CoreRequest] = []
        self.cancelled: list[CoreRequest] = []
        self.done: list[object] = []
        self.decoupled = False

    def find(self, request: CoreRequest) -> Any:
        if request.model_name != "b":
            raise NotFoundError("no")
        return SimpleNamespace(spec=SimpleNamespace(decoupled=self.decoupled))

    def submit(
        self, request: CoreRequest, may_claim: bool = False, model: Any = None, parent: Any = None
    ) -> Any:
        self.submitted.append(request)
        return self.answer(request)

    def cancel(self, request: CoreRequest) -> None:
        self.cancelled.append(request)

    def model_ready(self, name: str, version: str) -> bool:
        self.done.append(("ready", name, version))
        return name == "b"

    def fact(self, kind: str, name: str = "", version: str = "") -> object:
        raise NotFoundError("there are no facts")

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        self.done.append(("load", name, parameters))
        raise UnavailableError("not today")

    def unload(self, name: str, unload_dependents: bool) -> None:
        self.done.append(("unload", name, unload_dependents))


class Calling:
    """A model's code and on whose behalf it runs."""

    def __init__(self, directory: Path, server: Server, name: str = "a") -> None:
        version = directory / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL)
        self.server = server
        self.caller = CallContext(server, f"{name}_0")
        self.code = ModelCode(name, version, "model.py", self.caller)
        self.module = self.code.module

    def close(self) -> None:
        self.caller.close()
        self.code.close()


@pytest.fixture(autouse=True)
def no_module_left() -> Iterator[None]:
    sys.modules["triton_python_backend_utils"] = pb_utils
    yield


@pytest.fixture
def calling(tmp_path: Path) -> Iterator[Calling]:
    calling = Calling(tmp_path, Server())
    yield calling
    calling.close()


def respond(request: CoreRequest, *values: float, final: bool = True) -> None:
    array = np.array(values, np.float32)
    request.respond(CoreResponse([CoreTensor("OUT", "FP32", array.shape, None, array)]), final)


def value(response: Any) -> float:
    return float(response.output_tensors()[0].as_numpy()[0])


def parent(**fields: Any) -> CoreRequest:
    request = CoreRequest("a", "", {}, lambda *_: None, monotonic_ns())
    for name, field in fields.items():
        setattr(request, name, field)
    return request


def during(calling: Calling, *parents: CoreRequest) -> None:
    """Has the calling thread execute some requests."""
    calling.caller.running = cast(Batch, SimpleNamespace(requests=list(parents)))
    calling.caller.thread = threading.get_ident()


def test_an_answer_is_a_copy(calling: Calling) -> None:
    array = np.array([1, 2], np.float32)
    tensor = CoreTensor("OUT", "FP32", (2,), None, array)
    calling.server.answer = lambda request: request.respond(CoreResponse([tensor], None, {"x": 1}))
    response = calling.module.make().exec()
    array[0] = 9
    assert response.output_tensors()[0].as_numpy().tolist() == [1, 2]
    assert response.parameters() == '{"x":1}'
    assert calling.server.submitted[0].inputs["IN"].numpy().tolist() == [1]


def test_what_the_server_refuses_is_an_answer(calling: Calling) -> None:
    def refuse(request: CoreRequest) -> None:
        raise ResourceExhaustedError("full")

    calling.server.answer = refuse
    error = calling.module.make().exec().error()
    assert error.message() == "Model b - Error when running inference: full"
    assert error.code() == pb_utils.TritonError.UNAVAILABLE


def test_another_thread_answers(calling: Calling) -> None:
    def later(request: CoreRequest) -> None:
        threading.Thread(target=respond, args=(request, 5.0)).start()

    calling.server.answer = later
    assert value(calling.module.make().exec()) == 5


class ExecutingClaim:
    """Runs a model that calls another one, on the thread of a loop."""

    fast = True

    def __init__(self, calling: Calling) -> None:
        self._calling = calling
        self.values: queue.SimpleQueue[float] = queue.SimpleQueue()

    def run_inline(self, budget_ns: int | None = None) -> bool:
        self.values.put(value(self._calling.module.make().exec()))
        return False

    def run_batch_inline(self) -> bool:
        return self.run_inline()

    def release(self) -> None:
        """The loop is taken over."""


def test_a_call_on_the_loop_that_receives_its_response_gives_the_loop_away(calling: Calling) -> None:
    loop = IoLoop(Clock())  # no time passes, in which a claim could become late
    calling.server.answer = lambda request: loop.call_soon(partial(respond, request, 5.0))
    claim = ExecutingClaim(calling)
    loop.start()
    try:
        loop.call_soon(lambda: loop.queue_inline(claim))
        assert claim.values.get(timeout=WAIT_S) == 5
    finally:
        assert loop.stop(WAIT_S)


@given(counts=st.lists(st.integers(0, 5), max_size=4), empty=st.booleans())
def test_responses_keep_their_order(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], empty: bool
) -> None:
    server = Server()
    server.decoupled = True
    calling = Calling(tmp_path_factory.mktemp("order"), server)
    try:
        for count in counts:

            def answer(request: CoreRequest, count: int = count) -> None:
                for number in range(count):
                    respond(request, number, final=not empty and number == count - 1)
                if empty or not count:
                    request.respond(None, True)

            server.answer = answer
            responses = calling.module.make().exec(decoupled=True)
            seen = [value(one) if one.output_tensors() else None for one in responses]
            assert seen == [*range(count), *([None] if empty or not count else [])]
            assert len(list(responses)) == len(seen)
    finally:
        calling.close()


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_waiting_ends_when_nobody_waits_for_the_caller(calling: Calling, how: str) -> None:
    gone, answered = parent(), parent(completed=True)
    during(calling, gone)

    def leave(request: CoreRequest) -> None:
        if how == "cancelled":
            gone.cancelled = True
        else:
            gone.deadline_ns = monotonic_ns()

    calling.server.answer = leave
    with pytest.raises(CallsEndedError):
        calling.module.make().exec()
    assert calling.server.cancelled == calling.server.submitted
    # One that has been answered goes on as long as it likes, and so does one that has only just noticed.
    calling.server.answer = lambda request: respond(request, 1.0)
    assert value(calling.module.make().exec()) == 1
    during(calling, gone, answered)
    assert value(calling.module.make().exec()) == 1
    during(calling, gone)
    assert calling.caller.running is not None
    calling.caller.abandoned_since(calling.caller.running.requests, monotonic_ns() - GRACE_NS)
    with pytest.raises(CallsEndedError):
        calling.module.make().exec()


def test_the_last_deadline_of_the_callers_is_the_calls(calling: Calling) -> None:
    calling.server.answer = lambda request: respond(request, 1.0)
    late = monotonic_ns() + 10**12
    for deadlines, expected in (((late, late + 5), late + 5), ((late, None), None), ((), None)):
        during(calling, *[parent(deadline_ns=each) for each in deadlines])
        calling.module.make().exec()
        assert calling.server.submitted[-1].deadline_ns == expected


def test_what_is_open_ends_with_the_instance(tmp_path: Path) -> None:
    begun = threading.Event()
    calling = Calling(tmp_path, Server(lambda request: begun.set()))
    request = calling.module.make()
    said: list[Any] = []
    thread = threading.Thread(target=lambda: said.append(request.exec()))
    thread.start()
    assert begun.wait(WAIT_S)
    calling.close()
    thread.join(WAIT_S)
    assert said[0].error().code() == pb_utils.TritonError.CANCELLED
    assert calling.server.cancelled == calling.server.submitted
    with pytest.raises(pb_utils.TritonModelException, match="has been unloaded"):
        request.exec()


def test_a_short_batch_is_led_and_a_long_one_is_not(calling: Calling) -> None:
    done: list[str] = []

    class Led:
        fast = True

        def run_batch_inline(self) -> bool:
            done.append("led")
            respond(calling.server.submitted[-1], 3.0)
            return True

        def release(self) -> None:
            done.append("handed over")
            respond(calling.server.submitted[-1], 4.0)

    led = Led()
    calling.server.answer = lambda request: led
    torch = sys.modules.pop("torch", None)
    try:
        assert value(calling.module.make().exec()) == 3
        assert done == ["led", "handed over"]  # another thread runs the rest
        led.fast = False
        assert value(calling.module.make().exec()) == 4
        assert done[2:] == ["handed over"]
    finally:
        if torch is not None:
            sys.modules["torch"] = torch


def test_futures(calling: Calling) -> None:
    async def use() -> None:
        calling.server.answer = lambda request: threading.Thread(target=respond, args=(request, 2.0)).start()
        assert value(await calling.module.make().async_exec()) == 2
        calling.server.answer = lambda request: None
        future = calling.module.make().async_exec()
        future.cancel()
        await asyncio.sleep(0)
        assert calling.server.cancelled == calling.server.submitted[-1:]
        respond(calling.server.submitted[-1], 1.0)  # too late, and no harm

    asyncio.run(use())


def test_who_calls(tmp_path: Path, calling: Calling) -> None:
    found: list[CallContext] = []

    def note() -> None:
        found.append(current_call_context())

    note()  # no model is on the stack: there is only one
    calling.module.here(note)
    other = Calling(tmp_path, calling.server, "other")
    try:
        other.module.here(note)
        thread = threading.Thread(target=other.module.here, args=(note,))
        thread.start()
        thread.join()
        assert found == [calling.caller, calling.caller, other.caller, other.caller]
        assert current_call_context().known_server is calling.server  # of one server, for either caller
    finally:
        other.close()
    stranger = Calling(tmp_path, Server(), "stranger")
    try:
        with pytest.raises(pb_utils.TritonModelException, match="several servers"):
            current_call_context()
        stranger.module.here(note)
        assert found[-1] is stranger.caller
    finally:
        stranger.close()
    with pytest.raises(pb_utils.TritonModelException, match="BLS is only supported"):
        stranger.module.here(current_call_context)


def test_models_of_the_server(calling: Calling) -> None:
    here = calling.module.here
    assert here(lambda: pb_utils.is_model_ready("b", "1"))
    assert not here(lambda: pb_utils.is_model_ready("c"))
    here(lambda: pb_utils.unload_model("b", unload_dependents=True))
    with pytest.raises(pb_utils.TritonModelException) as raised:
        here(lambda: pb_utils.load_model("b", config="{}", files={"file:1/m": b"x"}))
    text = "Failed to load model: Failed to process the request for model 'a_0', message: not today"
    assert str(raised.value) == text
    assert calling.server.done == [
        ("ready", "b", "1"),
        ("ready", "c", ""),
        ("unload", "b", True),
        ("load", "b", {"config": "{}", "file:1/m": b"x"}),
    ]


def test_a_call_of_a_model_that_goes_meanwhile_is_not_made(calling: Calling) -> None:
    class Late(WaitingCall):
        def check_abandoned(self) -> None:
            calling.caller.close()

    response = Late(calling.caller, calling.module.make(), False).run()
    error = response.error()
    assert error is not None and "has been unloaded" in error.message()
    assert calling.server.submitted == []


class Leaving(CoreRequest):
    """A request for its own caller's model that leaves the queue after its state was read a few times."""

    looks = 0

    @property
    def state(self) -> RequestState:
        self.looks -= 1
        return RequestState.QUEUED if self.looks >= 0 else RequestState.RUNNING

    @state.setter
    def state(self, state: RequestState) -> None: ...


@pytest.mark.parametrize(("looks", "deadlocked"), [(3, False), (4, True)])
def test_calls_that_leave_their_queues_while_they_are_looked_at(
    calling: Calling, looks: int, deadlocked: bool
) -> None:
    core = Leaving("b", "", {}, lambda *_: None, monotonic_ns())
    core.model = cast(RequestModel, SimpleNamespace(spec=SimpleNamespace(identifier="b", version=1)))
    caller = cast(Any, Caller(calling.server))
    call = cast(Wait, Call(caller, core))
    caller.waiting = call
    calling.server.waiters.add(caller)
    core.looks = looks
    assert is_deadlocked(call, frozenset([call])) == (frozenset([call]), deadlocked)


class Caller:
    """An instance of a model that waits for its own call."""

    model = ("b", 1)
    thread = None

    def __init__(self, server: Server) -> None:
        self.known_server = server
        self.waiting: Wait | None = None


class Call:
    """A call that waits."""

    since_ns = 0
    parents = ()

    def __init__(self, caller: Waiter, core: CoreRequest) -> None:
        self.caller = caller
        self.core = core


def in_call(calling: Calling, tensor: pb_utils.Tensor) -> bytes:
    """The bytes of a tensor in a call of another model."""
    calling.server.answer = lambda request: respond(request, 1.0)
    request = pb_utils.InferenceRequest("", 0, [tensor], ["OUT"], "b")
    calling.module.here(request.exec)
    return bytes(calling.server.submitted[-1].inputs[tensor.name()].data)


def test_writes_to_floats_made_of_brain_floats_reach_no_call(harness: Harness, calling: Calling) -> None:
    core = CoreTensor("H", "BF16", (1, 2), b"\xc0\x3f\0\xc0")
    floats = received_tensor(harness, core, Batch([], 1))
    floats.as_numpy()[0, 0] *= 3
    assert in_call(calling, floats) == b"\xc0\x3f\0\xc0"


@pytest.mark.parametrize(
    ("datatype", "data", "written", "wanted"),
    [("UINT8", b"\1\2", 3, b"\3\2"), ("BYTES", b"\1\0\0\0x\0\0\0\0", b"yz", b"\2\0\0\0yz\0\0\0\0")],
)
def test_writes_to_an_input_in_a_worker_reach_a_call(
    harness: Harness, calling: Calling, datatype: str, data: bytes, written: Any, wanted: bytes
) -> None:
    core = ReceivedTensor("A", datatype, (2,), memoryview(bytearray(data)))
    tensor = received_tensor(harness, core, Batch([], 1))
    tensor.as_numpy()[0] = written
    assert in_call(calling, tensor) == wanted
