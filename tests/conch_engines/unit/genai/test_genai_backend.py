"""Configs and requests of the backend openvino_genai, with a random model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.genai_models import genai_library, random_model
from tests.support.text_models import CHAT, COMPLETIONS, asked, choices, conversation, deltas

import conch.testing
from conch.core.errors import ConchError, InvalidArgumentError
from conch_engines.genai.engine_settings import EngineSettings
from conch_engines.genai.model_on_disk import find_model
from conch_engines.language.random_model import CONTEXT

genai_library()
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
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[conch.testing.LoadedModel]:
    with conch.testing.load(
        random_model(tmp_path_factory.mktemp("genai"), CONCH_PLACEMENT="in_process")
    ) as loaded:
        deltas(loaded, CHAT, conversation("hello", max_tokens=1))  # the event loop starts
        yield loaded


def test_the_config_is_completed(model: conch.testing.LoadedModel) -> None:
    config: Any = model.config
    parameters = {name: each["string_value"] for name, each in config["parameters"].items()}
    assert parameters["CONCH_LLM"] == "chat,complete,tokenize"
    assert parameters["max_model_len"] == str(CONTEXT)
    assert model.decoupled


def test_both_routes(model: conch.testing.LoadedModel) -> None:
    chat = deltas(model, CHAT, conversation("hello", temperature=0, max_tokens=5))
    assert sum(delta.tokens for delta in chat) == 5
    completion = deltas(model, COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 3})
    assert set(choices(completion)) <= {0, 1, 2, 3}
    assert {delta.index for delta in completion if delta.finish_reason} == {0, 1, 2, 3}
    default = deltas(model, COMPLETIONS, {"prompt": "a", "ignore_eos": True})
    assert sum(delta.tokens for delta in default) == 16


@pytest.mark.parametrize("wrong", [266, 99999, -1])
def test_a_token_that_the_model_has_not_is_refused(model: conch.testing.LoadedModel, wrong: int) -> None:
    with pytest.raises(conch.testing.ModelError, match=rf"prompt\[1\]: {wrong} is no token of the model"):
        deltas(model, COMPLETIONS, {"prompt": [5, wrong]})
    assert deltas(model, COMPLETIONS, {"prompt": [5, 265], "max_tokens": 1})


def test_the_text_contract(model: conch.testing.LoadedModel) -> None:
    sampling = json.dumps({"max_tokens": 4, "temperature": 0, "ignore_eos": True})
    (found,) = model.run({"text_input": ["hello"], "sampling_parameters": [sampling]})
    assert found["num_input_tokens"] == [5] and found["num_output_tokens"] == [4]
    assert found["finish_reason"] == [b"length"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "switch"}}])
def test_a_forced_tool_is_called(model: conch.testing.LoadedModel, choice: Any) -> None:
    # So hot that all tokens which the schema allows are as likely: white space must end.
    sampling = {"temperature": 50, "max_tokens": 1500}
    found = deltas(model, CHAT, conversation("hello", tools=[TOOL], tool_choice=choice, **sampling))
    assert choices(found) == {0: ""}
    calls = [call["function"] for delta in found for call in delta.tool_calls]
    assert calls[0]["name"] == "switch"
    assert isinstance(json.loads("".join(call["arguments"] for call in calls))["on"], bool)
    assert found[-1].finish_reason == ("tool_calls" if choice == "required" else "stop")


def test_a_forced_tool_may_refer_to_itself(model: conch.testing.LoadedModel) -> None:
    """The arguments may hold arguments, not calls."""
    properties = {"v": {"enum": [7]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": ["v", "next"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in "fg"]
    depths = set()
    for seed in range(8):
        sampling = {"temperature": 50, "max_tokens": 1500, "seed": seed}
        body = conversation("hello", tools=tools, tool_choice="required", **sampling)
        calls = [call["function"] for delta in deltas(model, CHAT, body) for call in delta.tool_calls]
        node, depth = json.loads("".join(call["arguments"] for call in calls)), 0
        while node is not None:
            assert node.keys() == {"v", "next"} and node["v"] == 7
            node, depth = node["next"], depth + 1
        depths.add(depth)
    assert max(depths) > 1


def test_prompts_are_those_of_conchs_chat_templates(tmp_path: Path) -> None:
    """The engine's own file, and one beside it, are rendered by conch."""
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "switch"}}]},
    ]

    def prompt(model: conch.testing.LoadedModel) -> Any:
        found: Any = {}
        for route, body in (("/tokenize", {"messages": turns}), ("/detokenize", found)):
            (response,) = model.run(**asked(route, body))
            found.update(json.loads(response["text_output"][0]))
        return found["prompt"]

    directory = random_model(tmp_path, CONCH_PLACEMENT="in_process")
    with conch.testing.load(directory) as model:
        begin, end = "<|im_start|>", "<|im_end|>\n"
        assert prompt(model) == f"{begin}user\na\nb{end}{begin}assistant\n{end}{begin}assistant\n"
    written = "{{ bos_token }}{% for m in messages %}{{ m.content.lower() }}{{ m.role[0] }}{% endfor %}"
    (directory / "1" / "chat_template.jinja").write_text(written)
    with conch.testing.load(directory) as model:
        assert prompt(model) == "<|im_start|>a\nbua"


def test_an_auto_choice_reads_calls_in_the_text(tmp_path: Path) -> None:
    """The random model writes what its grammar has: two calls, of which one counts."""
    call = '<tool_call>{"name": "switch", "arguments": {"on": true}}</tool_call>'
    body = conversation(
        "hello",
        tools=[TOOL],
        parallel_tool_calls=False,
        structured_outputs={"choice": [f"<think>so</think>yes{call}{call}"]},
        max_tokens=300,
    )
    directory = random_model(
        tmp_path,
        CONCH_PLACEMENT="in_process",
        CONCH_TOOL_PARSER="hermes",
        CONCH_REASONING_PARSER="think",
    )
    with conch.testing.load(directory) as model:
        found = deltas(model, CHAT, {**body, "stream": True})
    assert (choices(found), "".join(delta.reasoning for delta in found)) == ({0: "yes"}, "so")
    calls = [call["function"] for delta in found for call in delta.tool_calls]
    assert (calls[0]["name"], "".join(call["arguments"] for call in calls)) == ("switch", '{"on": true}')
    assert found[-1].finish_reason == "tool_calls"


def test_tokens_make_their_text_again(model: conch.testing.LoadedModel) -> None:
    def answer(route: str, body: dict[str, Any]) -> Any:
        (response,) = model.run(**asked(route, body))
        return json.loads(response["text_output"][0])

    found = answer("/tokenize", {"prompt": "the é thing", "return_token_strs": True})
    assert found["max_model_len"] == CONTEXT and found["count"] == len(found["tokens"])
    assert found["token_strs"][0] == "the"
    assert answer("/detokenize", {"tokens": found["tokens"]}) == {"prompt": "the é thing"}
    chat = answer("/tokenize", conversation("thing"))
    prompt = "<|im_start|>user\nthing<|im_end|>\n<|im_start|>assistant\n"
    assert answer("/detokenize", {"tokens": chat["tokens"]}) == {"prompt": prompt}
    counted = deltas(model, CHAT, conversation("thing", max_tokens=1))
    assert chat["count"] == sum(delta.prompt_tokens or 0 for delta in counted)
    with pytest.raises(conch.testing.ModelError, match=r"tokens\[1\]: 99999 is no token"):
        answer("/detokenize", {"tokens": [1, 99999]})


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logprobs": True, "top_logprobs": 2, "temperature": 0}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"tools": [TOOL]}, "CONCH_TOOL_PARSER"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(
    model: conch.testing.LoadedModel, body: dict[str, Any], named: str
) -> None:
    given = asked(CHAT, {**conversation("hello"), **body})
    given["parameters"]["lora_name"] = body.get("lora_name", "")  # as the route has it
    with pytest.raises(conch.testing.ModelError, match=named):
        model.run(**given)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cache_size_gb", "-1"),
        ("max_num_seqs", "many"),
        ("enable_prefix_caching", "maybe"),
    ],
)
def test_a_parameter_is_refused(key: str, value: str) -> None:
    with pytest.raises(InvalidArgumentError, match=key):
        EngineSettings.of({key: value})


def test_adapters_are_refused(tmp_path: Path) -> None:
    directory = random_model(tmp_path, CONCH_LLM_ADAPTERS="pirate")
    with (
        pytest.raises(conch.testing.ModelError, match="'CONCH_LLM_ADAPTERS': OpenVINO GenAI has one adapter"),
        conch.testing.load(directory),
    ):
        pass


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "openvino_model.xml"),
        ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, "a.gguf, b.gguf"),
        ({"a.gguf": b"text"}, "is no GGUF file"),
        ({"a.gguf": b"GGUF\x03"}, "it is cut"),
        ({"openvino_model.xml": b""}, "lacks openvino_model.bin, openvino_tokenizer.xml"),
    ],
)
def test_a_directory_without_a_model_is_refused(tmp_path: Path, files: dict[str, bytes], named: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConchError, match=named):
        find_model(tmp_path, "m")
