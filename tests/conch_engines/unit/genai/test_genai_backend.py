"""Configs and requests of the backend openvino_genai, with a random model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.genai_models import random_model
from tests.support.text_models import CHAT, COMPLETIONS, asked, choices, conversation, deltas

import conch.testing
from conch.core.errors import ConchError, InvalidArgumentError
from conch_engines.genai.engine_settings import EngineSettings
from conch_engines.genai.model_on_disk import find_model

pytest.importorskip("openvino_genai")
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
    assert config["parameters"]["CONCH_LLM"]["string_value"] == "chat,complete"
    assert model.decoupled


def test_both_routes(model: conch.testing.LoadedModel) -> None:
    chat = deltas(model, CHAT, conversation("hello", temperature=0, max_tokens=5))
    assert sum(delta.tokens for delta in chat) == 5
    completion = deltas(model, COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 3})
    assert set(choices(completion)) <= {0, 1, 2, 3}
    assert {delta.index for delta in completion if delta.finish_reason} == {0, 1, 2, 3}
    default = deltas(model, COMPLETIONS, {"prompt": "a", "ignore_eos": True})
    assert sum(delta.tokens for delta in default) == 16


def test_the_text_contract(model: conch.testing.LoadedModel) -> None:
    sampling = json.dumps({"max_tokens": 4, "temperature": 0, "ignore_eos": True})
    (found,) = model.run({"text_input": ["hello"], "sampling_parameters": [sampling]})
    assert found["num_input_tokens"] == [5] and found["num_output_tokens"] == [4]
    assert found["finish_reason"] == [b"length"]


def test_a_forced_tool_is_called(model: conch.testing.LoadedModel) -> None:
    choice = {"type": "function", "function": {"name": "switch"}}
    body = conversation("hello", tools=[TOOL], tool_choice=choice, max_tokens=300)
    found = deltas(model, CHAT, body)
    calls = [call for delta in found for call in delta.tool_calls]
    assert calls[0]["function"]["name"] == "switch"
    arguments = "".join(call["function"]["arguments"] for call in calls)
    if found[-1].finish_reason != "length":
        assert isinstance(json.loads(arguments)["on"], bool)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
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
    with pytest.raises(conch.testing.ModelError, match=named):
        model.run(**asked(CHAT, {**conversation("hello"), **body}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cache_size_gb", "-1"),
        ("max_num_seqs", "many"),
        ("enable_prefix_caching", "maybe"),
        ("CONCH_TOOL_PARSER", "x"),
    ],
)
def test_a_parameter_is_refused(key: str, value: str) -> None:
    with pytest.raises(InvalidArgumentError, match=key if key != "CONCH_TOOL_PARSER" else "tool parser"):
        EngineSettings.of({key: value})


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
