"""Random GGUF models in workers of the backend llama_cpp: OpenAI's routes, texts over HTTP, gauges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.support.llama_models import llama_model, write_adapter, write_reranker
from tests.support.server_fixtures import server_fixture
from tests.support.servers import WAIT_S, AnyServer, eventually

from conch_engines.language.gguf_file import write_gguf
from conch_engines.language.random_model import random_parts, write_random_model

pytestmark = pytest.mark.process
TOOL = {
    "type": "function",
    "function": {
        "name": "switch",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("llama")
    directory = llama_model(
        root, lora_files="pirate=pirate.lora", CONCH_TOOL_PARSER="hermes", max_num_seqs="2"
    )
    write_adapter(directory / "1" / "pirate.lora", 1)
    llama_model(root, "vectors", CONCH_TASK="embed", pooling="mean")
    write_reranker(llama_model(root, "scores") / "1" / "model.gguf")
    (root / "bare" / "1").mkdir(parents=True)
    write_random_model(root / "bare" / "1" / "model.gguf")
    metadata, tensors = random_parts()
    metadata["tokenizer.ggml.tokens"][0] = "[TOOL_CALLS]"  # a control token
    directory = llama_model(root, "marked", CONCH_TOOL_PARSER="mistral_args")
    write_gguf(directory / "1" / "model.gguf", metadata, tensors)
    return root


server = server_fixture()


@pytest.fixture
def client(server: AnyServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://{server.http_address}/v1", api_key="none", timeout=WAIT_S, max_retries=0
    ) as made:
        yield made


def running(server: AnyServer) -> float:
    text = httpx.get(server.metrics_url, timeout=WAIT_S).text
    lines = [line for line in text.splitlines() if line.startswith("llama_cpp:num_requests_running{")]
    return sum(float(line.split()[-1]) for line in lines)


def said(client: openai.OpenAI, model: str = "tiny", **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": "hello"}]
    return client.chat.completions.create(model=model, messages=messages, **more)


def test_a_file_is_served_without_a_config(client: openai.OpenAI) -> None:
    found = said(client, "bare", max_tokens=4, extra_body={"ignore_eos": True})
    assert found.usage.completion_tokens == 4 and found.choices[0].finish_reason == "length"
    assert found.usage.prompt_tokens == 24 and found.usage.total_tokens == 28
    assert {"tiny", "pirate", "bare"} <= {each.id for each in client.models.list()}


def test_markers_of_calls_are_in_the_text_that_is_read_for_calls(client: openai.OpenAI) -> None:
    often: Any = {"max_tokens": 2, "logit_bias": {"0": 100}, "temperature": 0, "tools": [TOOL]}
    assert said(client, "marked", **often).choices[0].message.content == "[TOOL_CALLS]" * 2
    assert said(client, "marked", tool_choice="none", **often).choices[0].message.content == ""


def test_a_stream_has_the_text_of_an_answer_in_one_piece(client: openai.OpenAI) -> None:
    sampling: Any = {"temperature": 1.5, "seed": 4, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    whole = said(client, n=2, **sampling)
    texts, usage = {0: "", 1: ""}, None
    with said(client, n=2, stream=True, stream_options={"include_usage": True}, **sampling) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert texts == {each.index: each.message.content for each in whole.choices}
    assert texts[0] != texts[1]
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens == 60


def test_a_stop_string_ends_the_answer(client: openai.OpenAI) -> None:
    free = (
        said(client, temperature=0, max_tokens=30, extra_body={"ignore_eos": True}).choices[0].message.content
    )
    stop = next(each for each in free[3:] if each.isascii())
    found = said(client, temperature=0, max_tokens=30, stop=[stop], extra_body={"ignore_eos": True})
    assert found.choices[0].message.content == free[: free.index(stop)]
    assert found.choices[0].finish_reason == "stop"


def test_a_forced_tool_is_called(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "switch"}}):
        found = said(client, tools=[TOOL], tool_choice=choice, temperature=2).choices[0]
        (call,) = found.message.tool_calls
        assert call.function.name == "switch"
        assert isinstance(json.loads(call.function.arguments)["on"], bool)


def test_an_adapter_is_a_model_of_its_own(client: openai.OpenAI) -> None:
    prompt: Any = {"prompt": "hello", "max_tokens": 20, "temperature": 0, "extra_body": {"ignore_eos": True}}
    plain = client.completions.create(model="tiny", **prompt).choices[0].text
    assert client.completions.create(model="pirate", **prompt).choices[0].text != plain
    assert client.completions.create(model="tiny", **prompt).choices[0].text == plain


def test_refusals_say_why(client: openai.OpenAI) -> None:
    for more, named in (
        ({"max_tokens": 4, "extra_body": {"stop_token_ids": [5]}}, "stop_token_ids"),
        ({"extra_body": {"echo": True}}, "echo"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"uniqueItems": True}},
                }
            },
            "uniqueItems",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=named):
            said(client, **more)
    for prompt in ([5] * 3000, "a" * 100_000):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as raised:
            client.completions.create(model="tiny", prompt=prompt)
        assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(model="tiny", prompt="a", echo=True, logprobs=1)
    assert client.completions.create(model="tiny", prompt="a", echo=True, max_tokens=0).choices[0].text == "a"


def test_a_client_that_goes_frees_its_slot(server: AnyServer, client: openai.OpenAI) -> None:
    with said(client, stream=True, max_tokens=1900, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        eventually(lambda: running(server) > 0, "the request runs")
    eventually(lambda: running(server) == 0, "the request is freed")


def test_embeddings_and_scores(server: AnyServer, client: openai.OpenAI) -> None:
    found = client.embeddings.create(model="vectors", input=["hello", "a thing"])
    assert sum(each * each for each in found.data[0].embedding) == pytest.approx(1, abs=1e-4)
    assert found.usage.prompt_tokens == 9 and found.data[0].embedding != found.data[1].embedding
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="vectors", input="a", dimensions=8)
    url = f"http://{server.http_address}/v1/rerank"
    body = {"model": "scores", "query": "a b", "documents": ["q", "a b", "z z"]}
    results = httpx.post(url, json=body, timeout=WAIT_S).json()["results"]
    assert sorted(each["index"] for each in results) == [0, 1, 2]
    assert len({each["relevance_score"] for each in results}) == 3


def test_text_over_http(server: AnyServer) -> None:
    url = f"http://{server.http_address}/v2/models/tiny/generate"
    sampling = json.dumps({"max_tokens": 6, "ignore_eos": True})
    found = httpx.post(url, json={"text_input": "hello", "sampling_parameters": sampling}, timeout=WAIT_S)
    assert found.json()["num_output_tokens"] == 6 and found.json()["finish_reason"] == "length"
