"""On which thread infer requests are read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.core import WAIT_S, make_spec
from tests.support.raw_http import request as http_request
from tests.support.rest import Agent, Wire, door_to, make_core
from tests.support.servers import eventually
from tests.support.sharing import SharedObject, shared_object

from conch.core.errors import InvalidArgumentError
from conch.core.model_statistics import ModelStatistics
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.spec import TensorSpec
from conch.door.operation_handlers import Services
from conch.frontends.fair_pool import FairPool
from conch.frontends.http.http_exchange import ExchangeHooks, HttpExchange, Reply
from conch.frontends.http.infer.infer_route import InferCall, InferRoute
from conch.memory.region_bindings import bind_regions
from conch.memory.regions import Regions
from conch.observability.logging.log_settings import LogControl, LogOptions
from conch.observability.tracing.trace_settings import TraceSettings

SIZE = 3 << 20


class Recording:
    """A model that says which thread a request came on."""

    def __init__(self) -> None:
        self.spec = make_spec(inputs=(TensorSpec("IN", "INT32", (-1,)),))
        self.statistics = ModelStatistics()
        self.version_text = "1"
        self.readiness: list[Any] = []
        self.workers: list[Any] = []
        self.threads: list[str] = []
        self.seen: list[int] = []

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> None:
        request.model = self
        self.threads.append(threading.current_thread().name)
        self.seen.append(int(request.inputs["IN"].numpy().sum()))
        request.respond(InferenceResponse([]))

    def cancel(self, request: InferenceRequest) -> bool:
        request.cancelled = True
        return False


LOOP: Any = SimpleNamespace(call_soon=lambda work: work())  # what is parsed in slices, on a busy machine
THREAD: Any = SimpleNamespace(call_soon=lambda work: work(), queue_inline=lambda claim: claim.release())


class Asked:
    """One request to a route, and what is written to its client.

    Args:
        route: The route.
        body: The request's body.
        model: The model in its path.
    """

    def __init__(self, route: InferRoute, body: bytes, model: str = "m") -> None:
        def handle(exchange: HttpExchange) -> None:
            self.exchange = exchange
            route(exchange, model, "")

        self.wire = Wire(handle, LOOP)
        self.wire.send(http_request("POST", "/", body))

    @property
    def answer(self) -> bytes:
        """Everything that was written."""
        return b"".join(self.wire.written)


@pytest.fixture
def memory() -> Iterator[SharedObject]:
    with shared_object(SIZE) as memory:
        memory.write(np.ones(SIZE // 4, np.int32))
        yield memory


def in_region(name: str, size: int) -> dict[str, Any]:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": size}
    return {"name": name, "datatype": "INT32", "shape": [size // 4], "parameters": parameters}


def services(regions: Regions) -> Services:
    return Services(regions, LogControl(LogOptions(), None), TraceSettings())


@pytest.mark.parametrize(
    ("size", "outputs", "thread"),
    [(4096, [], "loop"), (2 << 20, [], "worker"), (4096, [in_region("OUT", 2 << 20)], "worker")],
)
def test_large_parts_of_regions_are_not_for_the_loop(
    memory: SharedObject, size: int, outputs: list[Any], thread: str
) -> None:
    """The loop serves all clients: copying what lies in a region, or on a GPU, would hold up all of them."""
    model = Recording()
    body = json.dumps({"inputs": [in_region("IN", size)], "outputs": outputs}).encode()
    with closing(Regions()) as regions:
        regions.register_system("r", memory.key, 0, SIZE)
        with FairPool("worker") as workers, ExitStack() as stack:
            door = stack.enter_context(
                door_to(
                    make_core(Agent(), model, bind=partial(bind_regions, regions)),
                    services(regions),
                )
            )
            route = InferRoute(door, THREAD, workers, lambda: 0, SIZE)
            threading.current_thread().name, name = "loop", threading.current_thread().name
            try:
                asked = Asked(route, body, model.spec.name)
            finally:
                threading.current_thread().name = name
        assert [each.split("_")[0] for each in model.threads] == [thread]
        assert model.seen == [size // 4]
        assert asked.answer.startswith(b"HTTP/1.1 200 ")
        assert asked.exchange.on_disconnect is None, "nothing of the request is kept"
        assert [region.users for region in regions.system_regions()] == [0]


@pytest.fixture
def route() -> Iterator[InferRoute]:
    with closing(Regions()) as regions, FairPool("worker") as workers:
        core = make_core(Agent(), Recording(), bind=partial(bind_regions, regions))
        core.registry.add_namespaces("/a")
        core.registry.begin_draining("/a::leaving", Recording())  # type: ignore[arg-type]
        with door_to(core, services(regions)) as door:
            yield InferRoute(door, THREAD, workers, lambda: 0, SIZE)


@pytest.mark.pure("has an exchange of its own, of another class")
@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("unforeseen"), 500), (InvalidArgumentError("wrong"), 400)]
)
def test_what_fails_on_a_worker_is_answered(route: InferRoute, error: Exception, status: int) -> None:
    def fail() -> Reply:
        raise error

    answered = threading.Event()

    class Exchange:
        """An exchange that keeps the status and the body of its response."""

        began = lost = False
        client = ""
        access = None

        def respond(self, status: int, headers: Any, body: bytes, closes: bool) -> None:
            self.response = status, body
            answered.set()

    exchange: Any = Exchange()
    call = InferCall(make_core(Agent()).admission("http"), exchange, "m", "", 0)
    assert route.run_on_pool(call, fail)
    assert answered.wait(WAIT_S)
    assert exchange.response[0] == status
    assert (str(error).encode() in exchange.response[1]) is isinstance(error, InvalidArgumentError)


def test_a_model_with_a_namespace_that_is_leaving_is_known(route: InferRoute) -> None:
    """Requests that go on with one of its sequences are still taken."""
    head = http_request("POST", "/", b"").replace(b"Content-Length: 0", b"Content-Length: 9")
    answers = []
    for model in ("leaving", "nowhere"):
        wire = Wire(lambda exchange, model=model: route(exchange, model, ""), LOOP)  # type: ignore[misc]
        wire.send(head)
        answers.append(b"".join(wire.written)[:13])
    assert answers == [b"", b"HTTP/1.1 404 "]


def test_a_request_whose_client_leaves_while_the_pool_decodes_it_is_cancelled(route: InferRoute) -> None:
    """It has no response that would be sent, so nothing else would end it."""
    wires: list[Wire] = []
    prepared: list[InferenceRequest] = []

    class Leaving(ExchangeHooks):
        def prepare(self, request: InferenceRequest, exchange: HttpExchange) -> None:
            wires[0].hang_up()
            prepared.append(request)

    def handle(exchange: HttpExchange) -> None:
        exchange.hooks = Leaving()
        route(exchange, "m", "")

    wires.append(Wire(handle, LOOP))
    tensor = {"name": "IN", "datatype": "INT32", "shape": [1 << 18], "data": [1] * (1 << 18)}
    wires[0].send(http_request("POST", "/", json.dumps({"inputs": [tensor]}).encode()))
    eventually(lambda: bool(prepared) and prepared[0].completed, "the request has ended")
    assert prepared[0].cancelled
    assert wires[0].written == []
