"""One server with language models for the tests that only ask it things."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import openai
import pytest
from tests.support.llm_models import write_native, write_sees, write_told, write_vectors, write_words
from tests.support.servers import WAIT_S, LocalServer, client_of, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server with `words`, which has aliases, `told`, `sees`, `calls`, `native` and `vectors`."""
    models = tmp_path_factory.mktemp("models")
    write_words(
        models,
        served_model_name="org/words, gpt, smollm",
        CONCH_LLM_ADAPTERS="pirate",
        CONCH_TOOL_PARSER="hermes",
    )
    write_words(models, "thinks", CONCH_REASONING_PARSER="think")
    calls = write_words(models, "calls")
    (calls / "1" / "chat_template.jinja").write_text(
        "{% if tools and not messages %}<tool_call>{% endif %}{{ messages[-1].content }}"
    )
    write_sees(models)
    write_told(models)
    write_native(models)
    write_vectors(models)
    write_plain(models)
    with serving(models, flags=["--model-control-mode=explicit", "--load-model=*"]) as running:
        with client_of(running) as client:  # gRPC keeps some threads from its first call on
            assert client.is_server_ready()
        yield running


def write_plain(models: Path) -> None:
    """Writes a model without text."""
    config = """
        backend: "identity"
        max_batch_size: 8
        input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
        output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
    """
    (models / "plain" / "1").mkdir(parents=True)
    (models / "plain" / "config.pbtxt").write_text(config)


@pytest.fixture
def http(server: LocalServer) -> Iterator[httpx.Client]:
    """A plain client."""
    with httpx.Client(base_url=f"http://{server.http_address}", timeout=WAIT_S) as client:
        yield client


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client, which tries nothing again."""
    url = f"http://{server.http_address}/v1"
    with closing(openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=WAIT_S)) as made:
        yield made
