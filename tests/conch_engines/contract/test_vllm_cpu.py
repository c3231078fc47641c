"""The real vLLM on the CPU, in an environment that the server builds.

The environment, of 2 GB, and the model stay in the tests' cache. uv builds it and finds torch for CPUs where
``UV_FIND_LINKS`` or ``PIP_FIND_LINKS`` says.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from tests.support.metrics import of_model, scrape
from tests.support.servers import ServerProcess, client_of, eventually, started, write_model
from tests.support.text_requests import RESPONSE_S, Said, ask, asking

from conch_llm.contract import CONTENT_TYPE, ROUTE, STATUS

pytestmark = [pytest.mark.slow, pytest.mark.process]

CACHE = Path(os.environ.get("CONCH_VLLM", Path.home() / ".cache/conch-tests/vllm"))
ROOT = Path(__file__).parents[3]
WRITER = Path(__file__).parents[2] / "support" / "tiny_llama.py"
LINKS = os.environ.get("UV_FIND_LINKS", os.environ.get("PIP_FIND_LINKS", ""))
LONGEST = 131_072
"""Tokens that a request can have: enough for minutes, also where the engine's answers are late."""
START_S = 900.0
"""For an environment, and for the imports of three processes on a busy machine."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": ARGUMENTS}}
PLACE = """
backend: "vllm"
parameters { key: "CONCH_ENV_VLLM_CPU_KVCACHE_SPACE" value { string_value: "1" } }
parameters { key: "CONCH_ENV_HF_HUB_OFFLINE" value { string_value: "1" } }
"""
TWO_CORES = """
parameters { key: "CONCH_ENV_VLLM_CPU_OMP_THREADS_BIND" value { string_value: "0|1" } }
"""


def project() -> str:
    """The file that the page on vLLM shows."""
    page = (ROOT / "docs" / "backends" / "vllm.md").read_text()
    (found,) = re.findall(r"```toml\n(\[project\].*?)```", page, re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("uv") is None:
        pytest.skip("uv, which builds vLLM's environment, is not on the PATH")
    if not LINKS:
        pytest.skip("neither UV_FIND_LINKS nor PIP_FIND_LINKS names the folder with torch for CPUs")
    repository = tmp_path_factory.mktemp("repository")
    engine = {
        "model": "weights",
        "enforce_eager": True,
        "max_model_len": LONGEST,
        "hf_overrides": {"max_position_embeddings": LONGEST},
        "dtype": "float32",
    }
    openai = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "served_model_name": "org/tiny"}
    adapted = {"model.json": json.dumps({**engine, "enable_lora": True}), "openai.json": json.dumps(openai)}
    adapted["multi_lora.json"] = json.dumps({"pirate": "weights/adapter"})
    split = {"model.json": json.dumps({**engine, "tensor_parallel_size": 2})}
    for name, config, files in (("tiny", PLACE, adapted), ("split", PLACE + TWO_CORES, split)):
        directory = write_model(repository, name, config, files)
        (directory / "pyproject.toml").write_text(project())
    return repository


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    flags = [
        f"--model-repository={repository}",
        "--grpc-port=0",
        "--http-port=0",
        "--model-control-mode=explicit",
        f"--backend-config=vllm,environment-cache={CACHE}/environments",
        "--backend-config=vllm,environment-cache-mb=20000",
    ]
    with started(*flags, environment={"UV_FIND_LINKS": LINKS}) as server:
        server.wait_ready()
        if not (CACHE / "tiny" / "adapter" / "adapter_config.json").is_file():
            # The first load makes the environment, and fails for lack of weights.
            with client_of(server) as client, pytest.raises(Exception, match="vLLM can't start the engine"):
                client.load_model("tiny", client_timeout=START_S)
            (python,) = (CACHE / "environments").glob("built-*/env/bin/python")
            subprocess.run([python, WRITER, CACHE / "tiny"], check=True, capture_output=True)
        for model in ("tiny", "split"):
            (repository / model / "1" / "weights").symlink_to(CACHE / "tiny")
        with client_of(server) as client:
            client.load_model("tiny", client_timeout=START_S)
        yield server
        if server.process.poll() is None:  # the last test kills it
            assert server.stop() == 0, server.errors


def native(server: ServerProcess, route: str, **body: Any) -> list[Said]:
    return ask(server, "tiny", {ROUTE: route}, text_input=json.dumps({"model": "tiny", **body}))


def sampled(**more: Any) -> str:
    return json.dumps({"temperature": 0, "max_tokens": 6, "ignore_eos": True, **more})


def test_texts(server: ServerProcess) -> None:
    """A stream's deltas are the text of one response; further outputs count its tokens."""
    (whole,) = ask(server, "tiny", text_input="import os", sampling_parameters=sampled())
    wanted: dict[str, Any] = {
        f"return_{name}": True for name in ("finish_reason", "logprobs", "num_output_tokens")
    }
    deltas = ask(
        server, "tiny", text_input="import os", stream=True, sampling_parameters=sampled(logprobs=1), **wanted
    )
    assert len(deltas) > 1
    assert "import os" + "".join(said.text for said in deltas) == whole.text
    assert sum(said.outputs["num_output_tokens"][0] for said in deltas) == 6
    assert deltas[-1].outputs["finish_reason"] == [b"length"]
    tokens = [token for said in deltas for token in json.loads(said.outputs["logprobs"][0])]
    assert len(tokens) == 6 and all("decoded_token" in next(iter(token.values())) for token in tokens)
    several = sampled(n=3, temperature=0.9, seed=3)
    (said,) = ask(server, "tiny", text_input="a", exclude_input_in_output=True, sampling_parameters=several)
    assert len(set(said.outputs["text_output"])) == 3


def test_structured_outputs(server: ServerProcess) -> None:
    wanted = sampled(structured_outputs=json.dumps({"regex": "[0-9]{4}"}), ignore_eos=False)
    (said,) = ask(server, "tiny", text_input="a", exclude_input_in_output=True, sampling_parameters=wanted)
    assert re.fullmatch("[0-9]{4}", said.text)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"text_input": "import os " * LONGEST}, f"This model's maximum context length is {LONGEST} tokens"),
        ({"sampling_parameters": '{"temprature": 1}'}, "'temprature' is no sampling parameter"),
        ({"sampling_parameters": '{"temperature": -1}'}, "temperature must be non-negative"),
    ],
)
def test_requests_that_are_refused(server: ServerProcess, inputs: dict[str, Any], text: str) -> None:
    (said,) = ask(server, "tiny", **{"text_input": "a", **inputs})
    assert text in said.error


def test_openai_routes(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (whole,) = native(server, CHAT, messages=messages, temperature=0, max_tokens=4)
    assert (whole.parameters[STATUS], whole.parameters[CONTENT_TYPE]) == (200, "application/json")
    content = json.loads(whole.text)["choices"][0]["message"]["content"]
    pieces = native(
        server, CHAT, model="org/tiny", messages=messages, temperature=0, max_tokens=4, stream=True
    )
    assert str(pieces[0].parameters[CONTENT_TYPE]).startswith("text/event-stream")
    events = "".join(piece.text for piece in pieces).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-2]]
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    (refused,) = native(server, COMPLETIONS, model="other", prompt="a")
    assert refused.parameters[STATUS] == 404 and "`other` does not exist" in refused.text
    (counted,) = native(server, "/tokenize", prompt="import os")
    assert json.loads(counted.text)["count"] == 2
    (answered,) = native(server, "/v1/responses", input="a", max_output_tokens=3)
    assert json.loads(answered.text)["object"] == "response"
    turns = [{"role": "user", "content": "a"}]
    (answered,) = native(server, "/v1/messages", messages=turns, max_tokens=3)
    assert json.loads(answered.text)["type"] == "message"
    (counted,) = native(server, "/v1/messages/count_tokens", messages=turns)
    assert json.loads(counted.text)["input_tokens"] > 0
    (said,) = native(server, "/v1/embeddings", input="a")
    assert said.error == "model 'tiny' has no route '/v1/embeddings'"


def test_openai_client(server: ServerProcess) -> None:
    """Over HTTP, by the name of the model and by that of `served_model_name`."""
    url = f"http://{server.http_address}/v1"
    with closing(openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=RESPONSE_S)) as client:
        listed = {entry.id: entry for entry in client.models.list()}
        assert {"tiny", "org/tiny"} <= set(listed)
        assert listed["tiny"].model_dump()["max_model_len"] == LONGEST
        asked: dict[str, Any] = {
            "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0,
            "max_tokens": 4,
        }
        whole = client.chat.completions.create(model="tiny", logprobs=True, top_logprobs=2, **asked)
        (choice,) = whole.choices
        assert choice.logprobs is not None and len(choice.logprobs.content or ()) == 4
        assert whole.usage is not None and whole.usage.completion_tokens == 4
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(model="org/tiny", **asked, **options))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == choice.message.content
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 4
        several = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=2, seed=1)
        assert [each.index for each in several.choices] == [0, 1, 2, 3]
        adapted = client.completions.create(model="pirate", prompt="import os", max_tokens=4, temperature=0)
        plain = client.completions.create(model="tiny", prompt="import os", max_tokens=4, temperature=0)
        assert adapted.choices[0].text != plain.choices[0].text
        assert listed["pirate"].model_dump()["parent"] == "tiny"
        answered = client.responses.create(model="tiny", input="a", max_output_tokens=16, temperature=0)
        with client.responses.stream(
            model="tiny", input="a", max_output_tokens=16, temperature=0
        ) as answering:
            assert answering.get_final_response().output_text == answered.output_text
        assert answered.output_text
        with pytest.raises(openai.BadRequestError, match=r"(?i)temperature"):
            client.chat.completions.create(model="tiny", **{**asked, "temperature": -1})
        with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
            client.chat.completions.create(model="other", **asked)
        endless: Any = {"max_tokens": LONGEST - 100, "stream": True, "extra_body": {"ignore_eos": True}}
        before = generated(server)
        with client.completions.create(model="tiny", prompt="a", **endless) as stream:
            assert next(iter(stream)).choices
        eventually(lambda: generated(server) > before, "metrics are forwarded")
        eventually(lambda: running(server) == 0, "the engine has aborted the answer to a client that left")


def test_a_named_tool(server: ServerProcess) -> None:
    url = f"http://{server.http_address}/v1"
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 1.5,  # the most likely of the allowed tokens is white space, for ever
        "seed": 1,
        "max_tokens": 3000,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }
    with closing(openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=RESPONSE_S)) as client:
        (choice,) = client.chat.completions.create(model="tiny", **asked).choices
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "f"
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def running(server: ServerProcess) -> float | None:
    return of_model(scrape(server.metrics_url), "tiny", "vllm:num_requests_running", engine="0")


@pytest.mark.parametrize("way", ["text", "native"])
def test_a_client_that_leaves(server: ServerProcess, way: str) -> None:
    if way == "text":
        parameters: dict[str, Any] = {}
        inputs: dict[str, Any] = {"text_input": "a", "stream": True}
        inputs["sampling_parameters"] = sampled(max_tokens=LONGEST - 100)
    else:
        parameters = {ROUTE: COMPLETIONS}
        body = {
            "model": "tiny",
            "prompt": "a",
            "max_tokens": LONGEST - 100,
            "ignore_eos": True,
            "stream": True,
        }
        inputs = {"text_input": json.dumps(body)}
    before = generated(server)
    with asking(server, "tiny", parameters, **inputs) as asked:
        for _ in range(5):
            asked.next()
        asked.cancel()
    eventually(lambda: generated(server) > before, "metrics are forwarded")
    eventually(lambda: running(server) == 0, "the engine has aborted it")
    assert generated(server) < before + LONGEST - 100


def generated(server: ServerProcess) -> float:
    found = of_model(scrape(server.metrics_url), "tiny", "vllm:generation_tokens_total", engine="0")
    return found or 0.0


def test_names_of_triton_in_the_metrics(server: ServerProcess) -> None:
    names = {name for name, _ in scrape(server.metrics_url)}
    histograms = (
        *("time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds"),
        *("request_prompt_tokens", "request_generation_tokens", "request_params_n"),
    )
    wanted = {"vllm:prompt_tokens_total", "vllm:generation_tokens_total"}
    assert wanted | {f"vllm:{name}_count" for name in histograms} <= names


def test_the_death_of_the_engine(server: ServerProcess) -> None:
    """Last of all: a stream fails, all processes end, and another worker serves."""
    engine = engine_process(server)
    with client_of(server) as client:
        with asking(
            server, "tiny", text_input="a", stream=True, sampling_parameters=sampled(max_tokens=LONGEST - 100)
        ) as asked:
            asked.next()
            os.kill(engine, signal.SIGKILL)
            assert "Its process exited with status 70" in list(asked.rest())[-1].error
        assert not client.is_model_ready("tiny")
        eventually(lambda: client.is_model_ready("tiny"), "another worker serves", START_S)
        assert engine_process(server) != engine
        assert ask(server, "tiny", text_input="a", sampling_parameters=sampled())[0].text
        # Here, as processes that began in this test have to end in it.
        client.unload_model("tiny")
        eventually(lambda: not engines_of(server), "the engine has ended")


def test_the_death_of_the_server(server: ServerProcess) -> None:
    """Two workers share a model, and all processes end with a server that is killed."""
    with client_of(server) as client:
        client.load_model("split", client_timeout=START_S)
    assert ask(server, "split", text_input="a", sampling_parameters=sampled())[0].text
    left = psutil.Process(server.process.pid).children(recursive=True)
    assert sum(process.name().startswith("VLLM::Worker") for process in left) == 2
    server.kill()
    eventually(lambda: not any(process.is_running() for process in left), "they have ended")


def engine_process(server: ServerProcess) -> int:
    """The only process of vLLM's engine below the server."""
    (engine,) = engines_of(server)
    return engine


def engines_of(server: ServerProcess) -> list[int]:
    """The processes of vLLM's engines."""
    below = psutil.Process(server.process.pid).children(recursive=True)
    return [process.pid for process in below if process.name().startswith("VLLM::EngineCor")]
