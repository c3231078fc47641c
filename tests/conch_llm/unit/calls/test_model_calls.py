"""Calls of models that a real scheduler runs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.core import WAIT_S, make_model, make_spec
from tests.support.rest import Agent, door_to, make_core

from conch.core.clock import monotonic_ns
from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.model_version import Model
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.route import Route
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import DynamicBatching, ModelSpec, TensorSpec
from conch.core.tensor import Tensor
from conch_llm.calls.generation import EmbeddingCall, Embeddings, FieldError, Generation, GenerationCall
from conch_llm.calls.model_calls import ModelCalls
from conch_llm.calls.vectors import embedding_request
from conch_llm.contract import CHAT, COMPLETIONS, CONTENT_TYPE, ROUTE, STATUS, TOKENIZE
from conch_llm.deltas import Delta, encode_deltas

TEXT = (TensorSpec("text_input", "BYTES", (1,)),)
OUT = (TensorSpec("text_output", "BYTES", (-1,)),)
Words = Callable[[InferenceRequest], None]


class Caller:
    """A call without a connection."""

    read_ns = 0
    path = "/v1"
    access = None
    client = "test"

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self._headers = headers or {}
        self.caller = self

    def header(self, name: str) -> str:
        return self._headers.get(name, "")

    def add_response_metadata(self, name: str, value: str) -> None:
        pass


def run(model: Model, use: Callable[[ModelCalls], Awaitable[Any]]) -> Any:
    """Runs a coroutine with the calls of a front end, then closes the model."""
    core = make_core(Agent(), model)

    async def used() -> Any:
        with door_to(core) as door:
            calls = ModelCalls(door, door.admission("http"), monotonic_ns)
            return await asyncio.wait_for(use(calls), WAIT_S)

    try:
        return asyncio.run(used())
    finally:
        model.close()


def decoupled(script: Words, spec: ModelSpec | None = None) -> Model:
    """A model whose requests a script responds to, one after the other."""

    def execute(batch: Batch) -> None:
        for request in batch.requests:
            script(request)

    spec = spec or make_spec(inputs=TEXT, outputs=OUT, decoupled=True)
    return make_model(spec, execute, allows_inline=False)


def respond(request: InferenceRequest, content: bytes, **parameters: Any) -> None:
    tensor = Tensor.from_array("text_output", np.array([content], object))
    request.respond(InferenceResponse([tensor], None, parameters or None), False)


def asked(*prompts: str, choices: int = 1, **fields: Any) -> GenerationCall:
    return GenerationCall(COMPLETIONS, fields, b"{}", prompts, choices, None, "id")


async def all_of(generation: Generation) -> list[Delta]:
    found: list[Delta] = []
    while (deltas := await generation.take()) is not None:
        assert deltas
        found += deltas
    return found


def test_choices_of_prompts_are_merged() -> None:
    """The second prompt is answered when the end of a choice of the first one has been taken."""
    ended = threading.Event()

    def script(request: InferenceRequest) -> None:
        prompt = bytes(request.inputs["text_input"].numpy()[0])
        assert prompt == b"a" or ended.wait(WAIT_S)
        for word in (prompt, str((request.parameters or {})["seed"]).encode()):
            respond(request, word)
        request.respond(None)

    async def use(calls: ModelCalls) -> list[Delta]:
        generation = await calls.generate(model, asked("a", "b", choices=2, seed=5), Caller())
        found: list[Delta] = []
        while not any(delta.finish_reason for delta in found):
            found += await generation.take() or ()
        ended.set()
        return found + await all_of(generation)

    model = decoupled(script)
    deltas = run(model, use)
    texts = ["".join(delta.text for delta in deltas if delta.index == index) for index in range(4)]
    assert texts == ["a5", "a6", "b5", "b6"]
    assert [delta.index for delta in deltas if delta.finish_reason == "stop"] == [0, 1, 2, 3]


def test_another_client_waits_for_no_more_than_a_share_of_a_long_request() -> None:
    both = threading.Event()
    order: list[bytes] = []

    def script(request: InferenceRequest) -> None:
        assert both.wait(WAIT_S)
        order.append(bytes(request.inputs["text_input"].numpy()[0]))
        respond(request, b"x")
        request.respond(None)

    async def use(calls: ModelCalls) -> None:
        many = await calls.generate(model, asked(*"m" * 100), Caller())
        other = await calls.generate(model, asked("other"), Caller())
        both.set()
        found, _ = await asyncio.gather(all_of(many), all_of(other))
        assert {delta.index for delta in found} == set(range(100))

    model = decoupled(script)
    run(model, use)
    assert len(order) == 101 and order.index(b"other") <= 32


def test_a_call_of_a_routed_model_goes_where_its_headers_say() -> None:
    """The front end has found the stable version before it makes the requests."""

    def answering(version: int) -> Model:
        def script(request: InferenceRequest) -> None:
            respond(request, str(version).encode())
            request.respond(None)

        return decoupled(script, make_spec(inputs=TEXT, outputs=OUT, decoupled=True, version=version))

    stable, candidate = answering(1), answering(2)
    core = make_core(Agent(), stable, candidate)
    core.registry.set_route("m", Route(1, 2))

    async def use(headers: Mapping[str, str]) -> str:
        with door_to(core) as door:
            calls = ModelCalls(door, door.admission("http"), monotonic_ns)
            deltas = await all_of(await calls.generate(stable, asked("a"), Caller(headers)))
        return "".join(delta.text for delta in deltas)

    try:
        assert asyncio.run(use({"conch-version": "candidate"})) == "2"
        assert asyncio.run(use({})) == "1"
    finally:
        stable.close()
        candidate.close()


def test_deltas_come_as_the_model_tells_them() -> None:
    told = [Delta("a", tokens=1), Delta("b", 1, "length")]
    routes = []

    def script(request: InferenceRequest) -> None:
        routes.append((request.parameters or {})[ROUTE])
        respond(request, encode_deltas(told))
        request.respond(None)

    async def use(calls: ModelCalls) -> list[Delta]:
        call = GenerationCall(CHAT, {}, b"{}", (), 2, None, "id")
        return await all_of(await calls.generate(model, call, Caller()))

    model = decoupled(script)
    assert run(model, use) == told
    assert routes == [CHAT]


def test_an_error_comes_after_what_was_before() -> None:
    def script(request: InferenceRequest) -> None:
        respond(request, b"a")
        request.fail(UnavailableError("gone"))

    async def use(calls: ModelCalls) -> None:
        generation = await calls.generate(model, asked("x"), Caller())
        assert [delta.text for delta in await generation.take() or ()] == ["a"]
        with pytest.raises(UnavailableError, match="gone"):
            await generation.take()
        assert await generation.take() is None

    model = decoupled(script)
    run(model, use)


def test_closing_cancels_a_model_that_waits_for_its_reader() -> None:
    ended = threading.Event()
    cancelled: list[bool] = []

    def script(request: InferenceRequest) -> None:
        for _ in range(300_000):
            if not request.cancelled:
                respond(request, b"x" * 10_000)
        cancelled.append(request.cancelled)
        request.respond(None)
        ended.set()

    async def use(calls: ModelCalls) -> None:
        generation = await calls.generate(model, asked("x"), Caller())
        assert await generation.take()
        generation.close()
        generation.close()
        assert await generation.take() is None
        assert await asyncio.to_thread(ended.wait, WAIT_S)

    model = decoupled(script)
    run(model, use)
    assert cancelled == [True]


def test_native_answers_have_the_status_of_their_first_piece() -> None:
    def script(request: InferenceRequest) -> None:
        assert bytes(request.inputs["text_input"].numpy()[0]) == b'{"a": 1}'
        respond(request, b"one ", **{STATUS: 201, CONTENT_TYPE: "text/plain"})
        respond(request, b"two")
        request.respond(None)

    async def use(calls: ModelCalls) -> None:
        answer = await calls.native(model, CHAT, b'{"a": 1}', "id", Caller(), {"a": 1})
        pieces = []
        while (piece := await answer.take()) is not None:
            pieces.append(piece)
        answer.close()
        assert (answer.status, answer.content_type, b"".join(pieces)) == (201, "text/plain", b"one two")

    model = decoupled(script)
    run(model, use)


def embedded(model: Model, *inputs: str | list[int], dimensions: int | None = None) -> Embeddings:
    async def use(calls: ModelCalls) -> Embeddings:
        return await calls.embed(model, EmbeddingCall({}, b"{}", inputs, dimensions, "id"), Caller())

    found: Embeddings = run(model, use)
    return found


def test_inputs_are_embedded_by_rows_of_batches() -> None:
    def execute(batch: Batch) -> Sequence[InferenceResponse]:
        rows = [np.full((1, 3), request.inputs["ids"].shape[1], np.float32) for request in batch.requests]
        return [InferenceResponse([Tensor.from_array("vector", row)]) for row in rows]

    ids = (TensorSpec("ids", "INT64", (-1,), ragged=True),)
    vector = (TensorSpec("vector", "FP32", (3,)),)
    spec = make_spec(8, ids, vector, batching=DynamicBatching())
    found = embedded(make_model(spec, execute, allows_inline=False), [7, 8], [9])
    assert [list(each) for each in found.vectors] == [[2, 2, 2], [1, 1, 1]]
    for inputs, size, param in ((["text"], None, "input"), ([[1]], 2, "dimensions")):
        with pytest.raises(FieldError) as refused:
            embedded(make_model(spec, execute, allows_inline=False), *inputs, dimensions=size)
        assert refused.value.param == param


@pytest.mark.parametrize(
    ("given", "problem"),
    [("a b c d", "has 4 tokens, and model 'm' takes at most 3"), ([1, 9], "9 is no token of model 'm'")],
)
def test_inputs_that_do_not_fit_the_tokenizer_are_refused(given: str | list[int], problem: str) -> None:
    spec = make_spec(1, (TensorSpec("ids", "INT64", (-1,)),), (TensorSpec("v", "FP32", (3,)),))
    call = EmbeddingCall({}, b"{}", [given], None, "id")
    with pytest.raises(FieldError, match=problem) as refused:
        embedding_request(spec, call, given, Letters())
    assert refused.value.param == "input"
    embedding_request(spec, call, "a b c", Letters())


class Letters:
    """A tokenizer of letters between spaces, for a model that takes 3."""

    longest: int | None = 3
    beyond = 4

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text.split()]

    def count(self, text: str, add_special_tokens: bool = True) -> int:
        return len(self.encode(text))


def test_an_echo_is_counted_by_the_model_that_has_the_tokenizer() -> None:
    def script(request: InferenceRequest) -> None:
        assert (request.parameters or {})[ROUTE] == TOKENIZE
        body = json.loads(request.inputs["text_input"].numpy()[0])
        respond(request, json.dumps({"tokens": body["prompt"].split()}).encode())
        request.respond(None)

    async def use(calls: ModelCalls) -> list[Delta]:
        call = replace(asked(), fields={"prompt": ["a b c", "d e"]}, max_tokens=0)
        return await all_of(await calls.echo(model, call, Caller()))

    spec = make_spec(inputs=TEXT, outputs=OUT, decoupled=True)
    model = decoupled(script, replace(spec, parameters={"CONCH_LLM": "complete,tokenize"}))
    found = run(model, use)
    assert [(delta.text, delta.prompt_tokens) for delta in found] == [("a b c", 5), ("d e", None)]


def test_vectors_of_tokens_are_refused() -> None:
    def execute(batch: Batch) -> Sequence[InferenceResponse]:
        return [InferenceResponse([Tensor.from_array("v", np.ones((1, 2, 3), np.float32))])]

    spec = make_spec(2, TEXT, (TensorSpec("v", "FP32", (-1, 3)),))
    with pytest.raises(InvalidArgumentError, match="Pool the vectors of tokens"):
        embedded(make_model(spec, execute, allows_inline=False), "text")


def test_engines_embed_by_their_own_request() -> None:
    def script(request: InferenceRequest) -> None:
        wanted = json.loads(request.inputs["embedding_request"].numpy()[0])
        respond(request, json.dumps([len(wanted["input"]), *wanted["pooling_params"]["dimensions"]]).encode())
        request.respond(None)

    inputs = (*TEXT, TensorSpec("embedding_request", "BYTES", (1,), optional=True))
    model = decoupled(script, make_spec(inputs=inputs, outputs=OUT, decoupled=True))
    assert embedded(model, "abc", [1, 2], dimensions=4).vectors == [[3, 4], [2, 4]]


def test_a_model_that_scores_gets_query_and_documents() -> None:
    def script(request: InferenceRequest) -> None:
        body = json.loads(request.inputs["text_input"].numpy()[0])
        scores = [float(body["query"] == document) for document in body["documents"]]
        respond(request, json.dumps({"scores": scores, "prompt_tokens": 5}).encode())
        request.respond(None)

    async def use(calls: ModelCalls) -> None:
        found = await calls.score(model, "a", ["b", "a"], Caller())
        assert (found.scores, found.prompt_tokens) == ([0, 1], 5)

    model = decoupled(script)
    run(model, use)
