"""Configs of the backend llama_cpp, and its files, without the engine."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.llama_models import llama_model, write_adapter

from conch.core.errors import ConchError, InvalidArgumentError
from conch_engines.genai.model_on_disk import find_model as find_genai_model
from conch_engines.language.gguf_file import write_gguf
from conch_engines.language.random_model import CONTEXT, random_parts, write_random_model
from conch_engines.llama_cpp.llama_backend import LlamaCppBackend
from conch_engines.llama_cpp.llama_file import LlamaFile, find_model
from conch_engines.llama_cpp.llama_sampling import REFUSED, read_sampling
from conch_engines.llama_cpp.llama_settings import DEFAULT_LONGEST, LlamaSettings
from conch_llm.models.model_requests import CompletionRequest

NESTED_ARRAYS = b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"a", 9) + struct.pack("<IQ", 9, 1) * 3000


def completed(directory: Path, **parameters: str) -> dict[str, str]:
    """The parameters of a completed config."""
    config = {"name": "m", "parameters": {key: {"string_value": each} for key, each in parameters.items()}}
    found = LlamaCppBackend().complete_config(config, directory, {})
    return {name: each["string_value"] for name, each in found["parameters"].items()}


def test_the_config_is_completed(tmp_path: Path) -> None:
    directory = llama_model(tmp_path) / "1"
    write_adapter(directory / "small.gguf", 1)
    found = completed(directory, lora_files="small=small.gguf")
    assert found["CONCH_LLM"] == "chat,complete,tokenize"
    assert (found["max_model_len"], found["CONCH_LLM_ADAPTERS"]) == (str(CONTEXT), "small")
    assert completed(directory / "none") == {"CONCH_LLM": "chat,complete,tokenize"}


def test_the_context_of_a_request() -> None:
    settings = LlamaSettings.of({})
    assert [settings.context_length(trained) for trained in (None, 64, 10**6)] == [
        DEFAULT_LONGEST,
        64,
        DEFAULT_LONGEST,
    ]
    asked = LlamaSettings.of({"max_model_len": "100"})
    assert asked.context_length(None) == asked.context_length(100) == 100
    with pytest.raises(InvalidArgumentError, match="'max_model_len' must be at most 99"):
        asked.context_length(99)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"max_num_seqs": "0"}, "max_num_seqs"),
        ({"max_num_seqs": "8", "max_num_batched_tokens": "7"}, "'max_num_batched_tokens' must be at least"),
        ({"enable_prefix_caching": "maybe"}, "enable_prefix_caching"),
        ({"n_gpu_layers": "-2"}, "n_gpu_layers"),
        ({"lora_files": "small.gguf"}, "lora_files"),
        ({"lora_files": "a=x.gguf,a=y.gguf"}, "lora_files"),
    ],
)
def test_a_parameter_is_refused(parameters: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        LlamaSettings.of(parameters)


@pytest.mark.parametrize("file", ["absent.gguf", "../other.gguf"])
def test_an_adapter_must_be_a_file_of_the_version(tmp_path: Path, file: str) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(InvalidArgumentError, match="'lora_files': there is no file"):
        LlamaSettings.of({"lora_files": f"a={file}"}).lora_paths(tmp_path / "1")


def test_parts_are_one_model(tmp_path: Path) -> None:
    for number in (1, 2):
        write_random_model(tmp_path / f"m-0000{number}-of-00003.gguf")
    with pytest.raises(InvalidArgumentError, match=r"lacks m-00003-of-00003\.gguf"):
        find_model(tmp_path, "m")
    write_random_model(tmp_path / "m-00003-of-00003.gguf")
    assert find_model(tmp_path, "m").path.name == "m-00001-of-00003.gguf"
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2}')
    named = find_model(tmp_path, "m", "m-00001-of-00003.gguf")
    assert named.sampling == {"temperature": 0.2} and named.context_length == CONTEXT


@pytest.mark.parametrize("find", [find_model, find_genai_model], ids=["llama_cpp", "openvino_genai"])
def test_a_file_has_sampling_parameters_of_its_own(tmp_path: Path, find: Callable[..., Any]) -> None:
    metadata, tensors = random_parts()
    own = {"temp": 0.25, "top_k": 7, "penalty_repeat": 1.5, "sequence": "kfypmxt"}
    metadata |= {f"general.sampling.{name}": value for name, value in own.items()}
    write_gguf(tmp_path / "model.gguf", metadata, tensors)
    assert find(tmp_path, "m").sampling == {"temperature": 0.25, "top_k": 7, "repetition_penalty": 1.5}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    assert find(tmp_path, "m").sampling == {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5}


def test_a_text_of_more_bytes_than_tokens_can_have_is_refused(tmp_path: Path) -> None:
    write_random_model(tmp_path / "model.gguf")
    longest = max(len(each.encode()) for each in random_parts()[0]["tokenizer.ggml.tokens"])
    model = find_model(tmp_path, "m")
    text = "é" * (5 * longest)
    model.check_size("prompt", text, 10)
    with pytest.raises(InvalidArgumentError, match="your prompt contains at least 11 tokens"):
        model.check_size("prompt", text + "a", 10)
    dropping = {**model.metadata, "tokenizer.ggml.model": "bert"}  # blanks are no tokens
    LlamaFile(model.path, dropping, {}).check_size("prompt", " " * 1000, 10)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "model.gguf"),
        ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, "a.gguf, b.gguf"),
        ({"a.gguf": b"text"}, "is no GGUF file"),
        ({"a.gguf": b"GGUF\x03"}, "it is cut"),
        ({"a.gguf": NESTED_ARRAYS}, "an array of arrays"),
    ],
)
def test_a_directory_without_a_model_is_refused(tmp_path: Path, files: dict[str, bytes], named: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConchError, match=named):
        find_model(tmp_path, "m")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "mmproj.gguf", {"general.type": "mmproj"}, {})
    with pytest.raises(InvalidArgumentError, match=r"its general\.type is 'mmproj'"):
        find_model(tmp_path, "m")


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_cannot_do_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name}: the engine llama_cpp does not support it"):
        read_sampling(CompletionRequest(prompt="a", params={name: 1}), {}, 10, 100)
    read_sampling(CompletionRequest(prompt="a", params={name: None}), {}, 10, 100)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"10": 1}}, "logit_bias: '10' is no token"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias: '٣' is no token"),
        ({"logit_bias": {"1": 101}}, r"logit_bias\[1\]"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
    ],
)
def test_a_value_is_refused(params: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        read_sampling(CompletionRequest(prompt="a", params=params), {}, 10, 100)


def test_the_models_own_sampling_holds_where_the_request_has_none() -> None:
    own = {"temperature": 0.2, "top_p": 0.5, "max_length": 20}
    found = read_sampling(
        CompletionRequest(prompt="a", seed=-1, params={"top_p": 0.9, "top_k": -1}), own, 10, 100
    )
    assert found.values == {
        "temperature": 0.2,
        "top_p": 0.9,
        "top_k": 0,
        "seed": (1 << 32) - 2,
        "ignore_eos": False,
    }
