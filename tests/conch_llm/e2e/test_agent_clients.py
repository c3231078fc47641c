"""Clients with pins of their own, and conversations that go on, against a server with front processes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.llm_models import write_words
from tests.support.servers import ROOT, WAIT_S, ServerProcess, serving_process

pytestmark = [pytest.mark.process, pytest.mark.slow]

ENVIRONMENT = Path(os.environ.get("CONCH_LLM_CLIENTS", Path.home() / ".cache/conch-tests/llm-clients"))
ECHO = "{% if tools and not messages %}<tool_call>{% endif %}{{ messages[-1].content }}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose model answers with the last message, and calls tools as hermes does."""
    models = tmp_path_factory.mktemp("models")
    (write_words(models) / "1" / "chat_template.jinja").write_text(ECHO)
    with serving_process(models, flags=["--front-ends=2", "--openai-store-bytes=65536"]) as running:
        yield running


def told_by(program: str, server: ServerProcess) -> Any:
    """Runs a client's program; returns the answers that it prints."""
    if not (ENVIRONMENT / ".ready").exists():
        pytest.skip(f"the clients are not installed in {ENVIRONMENT}; run tests/setup_llm_clients.sh")
    # Modules beside the program have names of packages.
    command = [ENVIRONMENT / "bin/python", "-P", ROOT / "tests/support" / program]
    done = subprocess.run(
        [*map(str, command), f"http://{server.http_address}", "words"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_agent_of_openai_agents_uses_its_tool(server: ServerProcess) -> None:
    told = told_by("openai_agents_program.py", server)
    assert (told["whole"].strip(), told["streamed"].strip()) == ("3", "3")
    assert {"response.function_call_arguments.delta", "response.completed"} <= set(told["events"])


def test_litellm_speaks_both_apis(server: ServerProcess) -> None:
    call = ["add", '{"a": 1}', "tool_calls"]
    assert told_by("litellm_program.py", server) == {
        "responses": "hello you ",
        "streamed": "hello you ",
        "bridge": ["hello you ", 4],
        "bridge tools": call,
        "anthropic": ["hello you ", 4],
        "anthropic tools": call,
    }


def test_conversations_go_on_whatever_front_has_the_connection(server: ServerProcess) -> None:
    url = f"http://{server.http_address}/v1/responses"
    last = None
    for number in range(6):  # each on a connection of its own
        asked = {"model": "words", "input": f"turn {number}", "previous_response_id": last}
        found = httpx.post(url, json=asked, timeout=WAIT_S).json()
        assert found["output"][0]["content"][0]["text"] == f"turn {number} "
        last = found["id"]
    assert (
        httpx.get(f"{url}/{last}", timeout=WAIT_S).json()["previous_response_id"]
        == found["previous_response_id"]
    )
