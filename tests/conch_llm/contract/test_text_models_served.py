"""Python models with `chat` and `complete` behind a server: tensors and bodies over gRPC streams and HTTP."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support import contract_server, warm_grpc
from tests.support.server_fixtures import server_fixture
from tests.support.servers import WAIT_S, AnyServer, RawClient, client_of, eventually, serving
from tests.support.text_models import CHAT, conversation, text_model
from tritonclient.grpc import service_pb2

from conch_llm.deltas import Delta, decode_deltas


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("texts")
    text_model(
        root,
        """
        async def chat(self, request):
            for word in request.messages[-1]["content"].split():
                if word == "refuse":
                    raise conch.NotFoundError("no such answer")
                if word == "fail":
                    raise ValueError("broken")
                yield Delta(word, tokens=1)
        """,
        "words",
        None,
    )
    for name, kind, wait in (
        ("waits", "async def", "await asyncio.Event().wait()"),
        ("floods", "def", "pass"),
    ):
        text_model(
            root,
            f"""
            {kind} chat(self, request):
                try:
                    while True:
                        yield "again"
                        {wait}
                finally:
                    logging.info("closed")
            """,
            name,
            None,
        )
    return root


grpc_is_warm = warm_grpc.grpc_is_warm
placement = contract_server.placement
server = server_fixture(placed=True)


def message(name: str, body: dict[str, Any]) -> Any:
    """A request of OpenAI's route as a message."""
    content = json.dumps(body).encode()
    raw = len(content).to_bytes(4, "little") + content
    request = service_pb2.ModelInferRequest(model_name=name, raw_input_contents=[raw])
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.parameters["openai_route"].string_param = CHAT
    return request


def answered(server: AnyServer, name: str, body: dict[str, Any]) -> tuple[list[Delta], str]:
    """The deltas of an answer, and its error or an empty text."""
    found: list[Delta] = []
    with closing(RawClient(server.address)) as raw:
        for response in raw.stream([message(name, body)]):
            if response.error_message:
                return found, response.error_message
            for output in response.infer_response.raw_output_contents:
                found += decode_deltas(bytes(output[4:]))
    return found, ""


def test_the_config_says_what_the_model_can_do(server: AnyServer) -> None:
    with client_of(server) as client:
        config: Any = client.get_model_config("words").config
    assert config.parameters["CONCH_LLM"].string_value == "chat"
    assert config.model_transaction_policy.decoupled and config.max_batch_size == 0


def test_deltas_over_grpc(server: AnyServer) -> None:
    found, error = answered(server, "words", conversation("a b", stream=True))
    assert (found, error) == (
        [Delta("a", tokens=1), Delta("b", tokens=1), Delta("", finish_reason="stop")],
        "",
    )


@pytest.mark.parametrize(
    ("text", "words", "problem"),
    [("refuse", 0, "no such answer"), ("a refuse", 1, "no such answer"), ("a fail", 1, "ValueError: broken")],
)
def test_errors(server: AnyServer, text: str, words: int, problem: str) -> None:
    found, error = answered(server, "words", conversation(text, stream=True))
    assert len(found) == words and problem in error and "conch_llm/models" not in error


def test_text_over_http(server: AnyServer) -> None:
    url = f"http://{server.http_address}/v2/models/words"
    whole = httpx.post(f"{url}/generate", json={"text_input": "a b"}, timeout=WAIT_S)
    assert whole.json()["text_output"] == "ab" and whole.json()["num_output_tokens"] == 2
    body = {"text_input": "a b", "stream": True, "sampling_parameters": '{"max_tokens": 1}'}
    with httpx.stream("POST", f"{url}/generate_stream", json=body, timeout=WAIT_S) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    assert [(event["text_output"], event["finish_reason"]) for event in events] == [("a", "length")]
    refused = httpx.post(f"{url}/generate", json={"text_input": "refuse"}, timeout=WAIT_S)
    assert (refused.status_code, refused.json()["error"]) == (404, "no such answer")


@pytest.mark.parametrize("name", ["waits", "floods"])
def test_a_client_that_goes_closes_the_generator(
    server: AnyServer, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.INFO)
    with closing(RawClient(server.address)) as raw:
        call = raw.stream([message(name, conversation(stream=True))])
        assert not next(call).error_message
        call.cancel()
    eventually(lambda: "closed" in caplog.messages, "the generator is closed")


def test_a_slow_client_of_a_thread_does_not_hold_others(server: AnyServer) -> None:
    """The first stream is not read on: its thread waits, and the next requests do not."""
    with closing(RawClient(server.address)) as raw:
        call = raw.stream([message("floods", conversation(stream=True))])
        assert not next(call).error_message
        other = raw.stream([message("floods", conversation(stream=True, max_tokens=1))])
        assert not next(other).error_message
        other.cancel()
        call.cancel()


def test_a_cold_model_is_loaded_for_a_chat(repository: Path) -> None:
    with serving(repository, flags=["--model-control-mode=on-demand"]) as server:
        url = f"http://{server.http_address}{CHAT}"
        body = conversation("to be loaded", model="words")
        answer = httpx.post(url, json=body, timeout=WAIT_S)
        assert answer.json()["choices"][0]["message"]["content"] == "tobeloaded"
        assert httpx.post(url, json=body | {"model": "nowhere"}, timeout=WAIT_S).status_code == 404
