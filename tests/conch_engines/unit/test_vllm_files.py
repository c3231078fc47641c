"""Configs and files of vLLM models, which the server reads without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.backend_harness import Harness

from conch.core.errors import ConchError, InvalidArgumentError
from conch_engines.vllm.vllm_backend import VllmBackend
from conch_engines.vllm.worker.native_routes import ROUTES
from conch_engines.vllm.worker.vllm_files import ModelFiles
from conch_llm.contract import DECLARATION, ROUTES_BY_DECLARATION


def files(tmp_path: Path, **contents: Any) -> Path:
    """A version directory with JSON files."""
    written = {f"1/{name}.json": json.dumps(content).encode() for name, content in contents.items()}
    return Harness(tmp_path).directory("m", written) / "1"


def completed(version: Path, **config: Any) -> dict[str, Any]:
    return VllmBackend().complete_config({"name": "m", **config}, version, {})


def test_completion(tmp_path: Path) -> None:
    engine = {"model": "x", "served_model_name": "org/m", "enable_lora": True, "max_model_len": 64}
    version = files(tmp_path, model=engine)
    (version / "multi_lora.json").write_text('{"alice": "a", "bob": "b"}')
    own = {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}
    config = completed(version, input=[own])
    inputs = {each["name"]: each for each in config["input"]}
    assert list(inputs) == [
        *("text_input", "image", "stream", "sampling_parameters", "exclude_input_in_output"),
        *("return_finish_reason", "return_cumulative_logprob", "return_logprobs"),
        *("return_num_input_tokens", "return_num_output_tokens", "embedding_request"),
    ]
    assert [name for name, each in inputs.items() if not each.get("optional")] == ["text_input"]
    assert {each["name"]: (each["data_type"], each["dims"]) for each in config["output"]} == {
        "text_output": ("TYPE_STRING", [-1]),
        "finish_reason": ("TYPE_STRING", [-1]),
        "cumulative_logprob": ("TYPE_FP32", [-1]),
        "logprobs": ("TYPE_STRING", [-1]),
        "num_input_tokens": ("TYPE_UINT32", [1]),
        "num_output_tokens": ("TYPE_UINT32", [-1]),
    }
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["instance_group"] == [{"count": 1, "kind": "KIND_MODEL"}]
    parameters = {key: each["string_value"] for key, each in config["parameters"].items()}
    assert parameters == {
        DECLARATION: "native",
        "served_model_name": "org/m",
        "CONCH_LLM_ADAPTERS": "alice,bob",
        "max_model_len": "64",
    }
    off = completed(version, parameters={"CONCH_VLLM_NATIVE": {"string_value": "false"}})
    assert DECLARATION not in off["parameters"]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"max_batch_size": 4}, "specified max_batch_size 4"),
        ({"model_transaction_policy": {"decoupled": False}}, "trying to change decoupled property"),
    ],
)
def test_configs_that_contradict(tmp_path: Path, config: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        completed(files(tmp_path, model={}), **config)


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        ({}, "'model.json' containing vllm engine args must be provided in"),
        ({"model": []}, "model.json' must have a JSON object"),
        (
            {"model": {}, "openai": {"tool_parser": "x"}},
            "unknown keys: tool_parser; known are: allowed_media_",
        ),
        (
            {"model": {"reasoning_parser": "a"}, "openai": {"reasoning_parser": "b"}},
            "'reasoning_parser' is both",
        ),
        ({"model": {"enable_lora": True}}, "Triton backend cannot find .*/1/multi_lora.json"),
        ({"model": {"enable_lora": "yes"}}, "'enable_lora' in .* must be true or false, not \"yes\""),
        ({"model": {"enable_lora": "true"}, "multi_lora": {"a": 1}}, "must have the path of an adapter"),
        (
            {"model": {"served_model_name": [1]}},
            "'served_model_name' in .* must be a name or a list of names",
        ),
    ],
)
def test_files_that_are_refused(tmp_path: Path, contents: dict[str, Any], text: str) -> None:
    with pytest.raises(ConchError, match=text):
        completed(files(tmp_path, **contents))


def test_paths_within_the_version_come_first(tmp_path: Path) -> None:
    version = files(
        tmp_path,
        model={"model": "weights", "tokenizer": "org/other", "enable_lora": "TRUE"},
        openai={"chat_template": "chat.jinja", "served_model_name": ["a", "b"]},
        multi_lora={"french": "french", "far": "/far"},
    )
    for name in ("weights", "french"):
        (version / name).mkdir()
    (version / "chat.jinja").write_text("{{ messages }}")
    found = ModelFiles.read(version)
    assert found.engine == {"model": f"{version}/weights", "tokenizer": "org/other", "enable_lora": True}
    assert found.openai == {"chat_template": f"{version}/chat.jinja"}
    assert found.adapters == {"french": f"{version}/french", "far": "/far"}
    assert found.served_names == ("a", "b")


def test_the_worker_has_the_routes_of_the_contract() -> None:
    """The worker can't import the contract."""
    assert set(ROUTES) == set(ROUTES_BY_DECLARATION["native"])
