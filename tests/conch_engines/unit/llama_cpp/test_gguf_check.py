"""Findings of `conch check` about GGUF files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from tests.support.llama_models import write_kind, write_reranker

from conch_check import check_command
from conch_engines.language.gguf_file import write_gguf
from conch_engines.language.gguf_tensors import KINDS, read_tensors
from conch_engines.language.random_model import random_parts


def checked(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and the output for a file."""
    return check_command.run([str(path)]), capsys.readouterr().out


def test_kinds_are_those_of_the_format() -> None:
    assert {each.value: (each.name, *GGML_QUANT_SIZES[each]) for each in GGMLQuantizationType} == KINDS


def test_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "My.Model-Q8_0.gguf"
    write_kind(path, "Q8_0")
    code, said = checked(path, capsys)
    assert code == 0
    assert f"{path}: note: architecture llama, 116,288 parameters in 21 tensors: 16 Q8_0, 5 F32" in said
    assert "its chat template has no known form of tool calls" in said
    # 4 slots of 2048 tokens, 2 layers, 4 heads of 16, keys and values of 2 bytes
    assert "a request may have 2048 tokens" in said and "0.1 MB of weights, and 4.2 MB of cache" in said


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }}<tool_call>", "tool calls of the form hermes"),
        ("{{ tools }}<tool_call><function=a>", "tool calls of the form qwen3_coder"),
        ("<tool_call>", "no known form of tool calls"),
    ],
)
def test_the_form_of_calls_is_the_one_that_they_are_read_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str, form: str
) -> None:
    metadata, tensors = random_parts()
    write_gguf(tmp_path / "m.gguf", {**metadata, "tokenizer.chat_template": template}, tensors)
    assert f"its chat template has {form}" in checked(tmp_path / "m.gguf", capsys)[1]


def test_a_model_for_scores_has_no_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_reranker(tmp_path / "m.gguf")
    code, said = checked(tmp_path / "m.gguf", capsys)
    assert code == 0 and "architecture bert" in said
    assert "cache" not in said and "template" not in said


def test_what_does_not_load_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    write_kind(path, "F16")
    whole = path.read_bytes()
    names = [each.name for each in read_tensors(path)[1]]

    path.write_bytes(whole[:-1000])
    code, said = checked(path, capsys)
    assert code == 1
    assert f"tensor '{names[-1]}' can't be loaded: its data ends 1000 bytes behind the end" in said

    path.write_bytes(whole[:200_000])
    code, said = checked(path, capsys)
    assert code == 1 and said.count("can't be loaded") == 1 and "tensors more are cut" in said

    name = b"blk.0.attn_q.weight"
    place = whole.index(name) + len(name) + 4 + 2 * 8
    path.write_bytes(whole[:place] + struct.pack("<I", 99) + whole[place + 4 :])
    code, said = checked(path, capsys)
    assert code == 1 and "tensor 'blk.0.attn_q.weight' can't be loaded: its kind 99 is unknown" in said
