"""Tokens of text models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch_llm.language.tokenizer import load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1, "one": 2, "two": 3}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    (tmp_path / "tokens").mkdir()
    tokenizer.save(str(tmp_path / "tokens" / "tokenizer.json"))
    (tmp_path / "1").mkdir()
    return tmp_path


def test_counts_encodes_and_decodes(folder: Path) -> None:
    assert load_tokenizer(folder / "1") is None
    tokenizer = load_tokenizer(folder / "1", tokenizer="tokens")
    assert tokenizer
    ids = tokenizer.encode("one two three")
    assert ids == [0, 2, 3, 1]
    assert tokenizer.tokens(ids) == ["<s>", "one", "two", "<unk>"]
    assert tokenizer.encode("two", add_special_tokens=False) == [3]
    assert (tokenizer.count("one"), tokenizer.count("one", add_special_tokens=False)) == (2, 1)
    assert tokenizer.decode([0, 2, 3]) == "<s> one two"
    assert tokenizer.decode([0, 2, 3], skip_special_tokens=True) == "one two"


def test_all_tokens_count_of_a_file_that_cuts_and_fills(folder: Path) -> None:
    file = folder / "tokens" / "tokenizer.json"
    cutting = Tokenizer.from_file(str(file))
    cutting.enable_truncation(3)
    cutting.enable_padding(length=3)
    cutting.save(str(file))
    tokenizer = load_tokenizer(folder / "tokens")
    assert tokenizer and tokenizer.longest == 3
    assert [tokenizer.count(text) for text in ("one", "one two one two", "one " * 2000)] == [2, 5, 2001]


@pytest.mark.parametrize("wrong", [4, -1, 1 << 32])
def test_an_id_that_is_no_token_is_refused(folder: Path, wrong: int) -> None:
    tokenizer = load_tokenizer(folder / "tokens")
    assert tokenizer
    with pytest.raises(InvalidArgumentError, match=rf"tokens\[1\]: {wrong} is no token"):
        tokenizer.decode([2, wrong])


def test_errors_of_the_operator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match="parameter tokenizer: none does not exist"):
        load_tokenizer(folder / "1", tokenizer="none")
    (folder / "1" / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgumentError, match=r"tokenizer\.json can't be read"):
        load_tokenizer(folder / "1")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnavailableError, match=r"pip install 'conch\[llm\]'"):
        load_tokenizer(folder / "1")
