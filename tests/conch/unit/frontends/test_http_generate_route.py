"""Generate and generate_stream over a core whose model does what the test says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import Any

import httpx
import numpy as np
import pytest
from tests.support.core import make_spec
from tests.support.raw_http import request as http_request
from tests.support.rest import Agent, Rest, Wire, door_to, make_core, pools
from tests.support.waiting import PATIENCE_S

from conch.core.errors import ConchError, NotFoundError, ResourceExhaustedError
from conch.core.model_statistics import ModelStatistics
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.server_state import ServerState
from conch.core.spec import TensorSpec
from conch.core.tensor import Tensor
from conch.frontends.http.generate.generate_route import generate_routes
from conch.frontends.http.http_pools import Pools
from conch.frontends.http.http_routing import RouteTable
from conch.frontends.http.mailbox import Mailbox, ResponseQueue
from conch.frontends.unread_bytes import UnreadBytes

PATH = "/v2/models/m/generate"
STREAM = PATH + "_stream"
NOT_ONE = {
    "error": "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
}
Script = Callable[[InferenceRequest], None]


class Scripted:
    """A model that runs a script for each request, on a thread of its own."""

    def __init__(self) -> None:
        self.spec = make_spec(inputs=(TensorSpec("IN", "INT32", (-1,)),), decoupled=True)
        self.statistics = ModelStatistics()
        self.version_text = "1"
        self.readiness: list[Any] = []
        self.workers: list[Any] = []
        self.script: Script = lambda request: request.respond(None)
        self.refusal: ConchError | None = None
        self.requests: list[InferenceRequest] = []
        self.cancelled = threading.Event()
        self._threads: list[threading.Thread] = []

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> None:
        if self.refusal is not None:
            raise self.refusal
        request.model = self
        self.requests.append(request)
        thread = threading.Thread(target=self.script, args=(request,))
        self._threads.append(thread)
        thread.start()

    def cancel(self, request: InferenceRequest) -> bool:
        request.cancelled = True
        self.cancelled.set()
        return False

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture
def model() -> Iterator[Scripted]:
    model = Scripted()
    yield model
    model.join()


@pytest.fixture
def made() -> Iterator[Pools]:
    with pools() as made:
        yield made


@pytest.fixture
def core(model: Scripted) -> ServerState:
    return make_core(Agent(), model)


@pytest.fixture
def rest(core: ServerState, made: Pools) -> Iterator[Rest]:
    with door_to(core) as door:
        yield Rest(RouteTable(generate_routes(door, made, 1 << 20)))


def says(*values: int | ConchError | None) -> Script:
    """A script that responds with these, the last one finally."""

    def script(request: InferenceRequest) -> None:
        for place, value in enumerate(values):
            request.respond(response(value), place == len(values) - 1)

    return script


def response(value: int | ConchError | None) -> InferenceResponse | None:
    if value is None:
        return None
    if isinstance(value, ConchError):
        return InferenceResponse([], value)
    return InferenceResponse([Tensor.from_array("OUT", np.array([value], np.int32))])


def ask(rest: Rest, path: str, body: Any) -> httpx.Response:
    return asyncio.run(rest.send("POST", path, body))


def answer(value: int, **more: Any) -> dict[str, Any]:
    return {"OUT": value, "model_name": "m", "model_version": "1", **more}


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in response.headers
    *parts, end = response.content.split(b"\n\n")
    assert end == b""
    assert all(part.startswith(b"data: ") for part in parts)
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


def test_a_request_reaches_the_model(rest: Rest, model: Scripted) -> None:
    model.script = says(5)
    assert rest("POST", PATH, {"IN": [1, 2], "id": "q", "x": True}) == (200, answer(5, id="q"))
    (request,) = model.requests
    assert request.inputs["IN"].numpy().tolist() == [1, 2]
    assert (request.id, request.parameters) == ("q", {"id": "q", "x": True})


@pytest.mark.parametrize("said", [(5,), (5, None), (None, 5)])
def test_exactly_one_response_is_an_answer(rest: Rest, model: Scripted, said: tuple[Any, ...]) -> None:
    model.script = says(*said)
    assert rest("POST", PATH, {"IN": 1}) == (200, answer(5))


@pytest.mark.parametrize("said", [(None,), (1, 2), (1, 2, None), (1, NotFoundError("x"), 2)])
def test_none_or_several_are_an_error(rest: Rest, model: Scripted, said: tuple[Any, ...]) -> None:
    model.script = says(*said)
    assert rest("POST", PATH, {"IN": 1}) == (400, NOT_ONE)


def test_a_model_that_would_go_on_is_told_that_nobody_waits(rest: Rest, model: Scripted) -> None:
    def script(request: InferenceRequest) -> None:
        request.respond(response(1), False)
        request.respond(response(2), False)
        assert model.cancelled.wait(PATIENCE_S)
        request.respond(None)

    model.script = script
    assert rest("POST", PATH, {"IN": 1}) == (400, NOT_ONE)
    model.join()
    assert model.requests[0].cancelled


def test_an_error_has_its_status(rest: Rest, model: Scripted) -> None:
    model.script = says(NotFoundError("told to"))
    response = ask(rest, PATH, {"IN": 1})
    assert (response.status_code, response.json()) == (404, {"error": "told to"})
    assert response.headers["content-type"] == "application/json"
    streamed = ask(rest, STREAM, {"IN": 1})
    assert (streamed.status_code, events(streamed)) == (404, [{"error": "told to"}])


@pytest.mark.parametrize("path", [PATH, STREAM])
def test_what_is_refused_before_it_runs_is_plain_json(rest: Rest, model: Scripted, path: str) -> None:
    model.refusal = ResourceExhaustedError("too many")
    model.refusal.retry_after_ms = 10
    response = ask(rest, path, {"IN": 1})
    assert (response.status_code, response.json()) == (429, {"error": "too many"})
    assert (response.headers["content-type"], response.headers["retry-after"]) == ("application/json", "1")
    assert rest("POST", path, b"x")[0] == 500
    assert rest("POST", path.replace("/m/", "/none/"), b"x")[0] == 404
    assert rest("POST", path.replace("/m/", "/m/versions/9/"), b"x")[0] == 404
    assert rest("GET", path)[0] == 405
    assert rest("POST", path, {"IN": 1}, {"content-encoding": "gzip"}) == (
        501,
        {"error": "Unsupported content-encoding, only 'identity' is supported."},
    )
    assert model.requests == []


def test_a_server_that_stops_takes_nothing(rest: Rest, core: ServerState) -> None:
    core.stopping()
    assert rest("POST", PATH, {"IN": 1}) == (503, {"error": "Server exiting"})


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((1, 2, 3), [answer(1), answer(2), answer(3)]),
        ((1, 2, None), [answer(1), answer(2)]),
        ((None,), []),
        ((1, NotFoundError("x"), 2), [answer(1), {"error": "x"}, answer(2)]),
    ],
)
def test_a_stream_has_an_event_for_each_response(
    rest: Rest, model: Scripted, said: tuple[Any, ...], expected: list[Any]
) -> None:
    model.script = says(*said)
    response = ask(rest, STREAM, {"IN": 1})
    assert (response.status_code, events(response)) == (200, expected)


def test_a_long_response_is_encoded_elsewhere_and_keeps_its_place(rest: Rest, model: Scripted) -> None:
    numbers = np.arange(50_000, dtype=np.int32)
    texts = [b"ab", "ü".encode(), b'"'] * 20_000
    encoders: list[str] = []

    class Seen(Tensor):
        def detached(self, name: str) -> Tensor:
            return Seen.from_array(name, self.numpy().copy())

        def numpy(self) -> Any:
            encoders.append(threading.current_thread().name)
            return super().numpy()

    long = Seen.from_array("OUT", numbers)
    said = [long, Tensor.from_array("OUT", np.array(texts, np.object_))]
    said.append(Tensor.from_array("OUT", np.zeros(100_000, np.float16)))

    def script(request: InferenceRequest) -> None:
        for each in said:
            request.respond(InferenceResponse([each]), False)
            request.respond(response(1), False)
        numbers[:] = 0  # the array is the model's again
        request.respond(None)

    model.script = script
    first, short, second, _, third, _ = events(ask(rest, STREAM, {"IN": 1}))
    assert short == answer(1)
    assert first["OUT"] == list(range(50_000))
    assert second["OUT"] == [each.decode() for each in texts]
    assert third["error"].startswith("sending FP16 data via JSON is not supported.")
    assert encoders[-1].startswith("conch-http-parse")


def test_a_large_body_is_taken_apart_elsewhere(rest: Rest, model: Scripted) -> None:
    model.script = says(1)
    numbers = list(range(50_000))
    assert rest("POST", PATH, {"IN": numbers})[0] == 200
    assert model.requests[0].inputs["IN"].numpy().tolist() == numbers


def test_a_body_that_is_too_large_is_refused(rest: Rest) -> None:
    status, body = rest("POST", PATH, b" " * ((1 << 20) + 1))
    assert (status, body["error"][:30]) == (400, "request JSON size of 1048577 b")


@pytest.mark.parametrize("path", [PATH, STREAM])
def test_a_request_is_cancelled_when_its_client_goes_away(rest: Rest, model: Scripted, path: str) -> None:
    began = threading.Event()

    def script(request: InferenceRequest) -> None:
        began.set()
        assert model.cancelled.wait(PATIENCE_S)
        request.respond(None)

    model.script = script

    async def leave() -> list[bytes]:
        wire = Wire(rest.handler)
        wire.send(http_request("POST", path, b'{"IN": 1}'))
        await asyncio.to_thread(began.wait, PATIENCE_S)
        wire.hang_up()
        await asyncio.wait_for(wire.ended(), PATIENCE_S)
        return wire.written

    assert asyncio.run(leave()) == []
    model.join()
    assert model.requests[0].cancelled


def test_a_model_waits_for_a_client_that_reads_slowly(rest: Rest, model: Scripted) -> None:
    sent: list[int] = []
    large = InferenceResponse(
        [Tensor("OUT", "BYTES", (1,), (4 << 20).to_bytes(4, "little") + b"x" * (4 << 20))]
    )

    def script(request: InferenceRequest) -> None:
        while not request.cancelled:
            request.respond(large, False)
            sent.append(len(sent))
            request.wait_until_writable()
        request.respond(None)

    model.script = script

    async def crawl() -> tuple[int, int]:
        wire = Wire(rest.handler, reads=1)  # the headers
        wire.send(http_request("POST", STREAM, b'{"IN": 1}'))
        while len(sent) < 4:
            await asyncio.sleep(0.001)
        held = len(sent)
        for _ in range(3):
            wire.read()
        while len(sent) < held + 2:
            await asyncio.sleep(0.001)
        ahead = len(sent) - len(wire.written)
        wire.hang_up()
        assert await asyncio.to_thread(model.cancelled.wait, PATIENCE_S)
        await asyncio.wait_for(wire.ended(), PATIENCE_S)
        return held, ahead

    held, ahead = asyncio.run(crawl())
    assert held <= 6  # of 4 MB: 16 MB that wait, the one that is being sent, and the one that made it wait
    assert ahead <= 6


def test_the_stream_of_a_client_that_goes_away_while_it_is_sent_to_ends(rest: Rest, model: Scripted) -> None:
    def script(request: InferenceRequest) -> None:
        while not model.cancelled.is_set():
            request.respond(response(1), False)
            request.wait_until_writable()
        request.respond(None)

    model.script = script

    async def leave() -> None:
        wire = Wire(rest.handler, reads=5)
        wire.send(http_request("POST", STREAM, b'{"IN": 1}'))
        while len(wire.written) < 5:
            await asyncio.sleep(0.001)
        wire.hang_up()
        await asyncio.wait_for(wire.ended(), PATIENCE_S)

    asyncio.run(leave())
    assert model.cancelled.wait(PATIENCE_S)


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often other threads wake it."""

    wakes = 0

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        self.wakes += 1
        return super().call_soon_threadsafe(callback, *args, context=context)


def run_counted(use: Callable[[CountingLoop], Any]) -> None:
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, CountingLoop)
        runner.run(use(loop))


def test_a_queue_gives_in_order_what_is_put_and_nothing_once_closed() -> None:
    async def use(loop: CountingLoop) -> None:
        responses: ResponseQueue[int] = ResponseQueue(Mailbox(loop, UnreadBytes()), 10)

        def fill() -> None:
            for number in range(100):
                responses.put(number, 5)
                responses.wait_until_writable()

        thread = threading.Thread(target=fill)
        thread.start()
        taken: list[int] = []
        while len(taken) < 100:
            items = await responses.take_all()
            assert items is not None and len(items) <= 3, "the thread waits for 10 bytes to be read"
            taken += items
        responses.close()
        thread.join(PATIENCE_S)
        assert taken == list(range(100))
        responses.put(100, 5)
        assert await responses.take_all() is None

    run_counted(use)


def test_what_comes_together_for_many_queues_wakes_the_loop_once() -> None:
    async def use(loop: CountingLoop) -> None:
        mailbox = Mailbox(loop, UnreadBytes())
        queues: list[ResponseQueue[int]] = [ResponseQueue(mailbox) for _ in range(32)]
        takers = [asyncio.ensure_future(queue.take_all()) for queue in queues]
        await asyncio.sleep(0)

        def frame() -> None:
            for number in range(64):
                queues[number % 32].put(number, 0)

        thread = threading.Thread(target=frame)
        before = loop.wakes
        thread.start()
        thread.join(PATIENCE_S)  # the loop can't run meanwhile
        assert loop.wakes == before + 1
        for number, items in enumerate(await asyncio.gather(*takers)):
            assert items == [number, number + 32]

    run_counted(use)


class Told:
    """A request log that keeps its records."""

    on = True
    adds_metadata = False

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.refused: list[tuple[str, str]] = []

    def begin(self, request: InferenceRequest, model: Any, protocol: str, caller: Any, bytes_in: int) -> None:
        self.begun.append((protocol, bytes_in))

    def refuse(self, request: InferenceRequest | None, error: ConchError, *rest: Any) -> None:
        assert request is not None, "the path says for which model it was"
        self.refused.append((request.model_name, error.message))


def test_requests_are_told_to_the_log(core: ServerState, made: Pools, model: Scripted) -> None:
    told = Told()
    core.request_log = told
    with door_to(core) as door:
        rest = Rest(RouteTable(generate_routes(door, made, 1 << 20)))
        model.script = says(1)
        rest("POST", PATH, b'{"IN": 1}')
        assert told.begun == [("http", 9)]
        rest("POST", PATH, b"[]")
        model.refusal = NotFoundError("no")
        rest("POST", PATH, b"{}")
        assert told.refused == [("m", "attempt to get members for non-object"), ("m", "no")]
