"""The turns of a chat, its paragraphs, and which files of a source are a model."""

from __future__ import annotations

import io
import re
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.live import Live
from tests.support.model_site import model_site
from tests.support.token_stream_site import held_chat

from conch_hub.chat.conversation import ChatError, Conversation, Piece
from conch_hub.chat.markdown_view import AnswerMarkdown, MarkdownView, finished
from conch_hub.file_choice import choose_files
from conch_hub.safe_text import safe
from conch_hub.source import PullError, RemoteFile


def test_a_cancelled_answer_is_a_turn() -> None:
    with held_chat(["one ", "two"]) as site:
        chat = Conversation("127.0.0.1", site.port, "m", {"seed": 1})
        chat.begin("brief")
        with closing(chat.ask("count")) as pieces:
            assert [next(pieces), next(pieces)] == [Piece("one "), Piece("two")]
    system, user = {"role": "system", "content": "brief"}, {"role": "user", "content": "count"}
    assert site.gone
    assert site.asked[0]["messages"] == [system, user]
    assert chat.messages == [system, user, {"role": "assistant", "content": "one two"}]
    chat.begin(chat.system)
    assert chat.messages == [system]


def test_a_refused_prompt_is_no_turn() -> None:
    with model_site() as site:
        chat = Conversation("127.0.0.1", site.port, "m", {})
        with pytest.raises(ChatError, match="HTTP status 501"):
            next(chat.ask("hello"))
    assert chat.messages == []
    with pytest.raises(ChatError, match="the server does not answer"):
        next(chat.ask("hello"))


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("one\n\ntwo", 5),
        ("one\n\n", 0),
        ("- one\n\n  more\n\ntwo", 15),
        ("```\none\n\ntwo\n", 0),
        ("```\none\n\ntwo\n```\n\nthree", 18),
        ("~~~\n```\n\n~~~\n\none", 14),
    ],
)
def test_paragraphs_that_more_text_does_not_change(text: str, end: int) -> None:
    assert finished(text) == end


@given(st.lists(st.sampled_from(["a", "- b", "  c", "", "```", "> d", "| e |"])))
def test_a_finished_part_stays_finished(lines: list[str]) -> None:
    """However the text comes: the parts of all prefixes are prefixes of each other."""
    text = "\n".join(lines)
    ends = [finished(text[:size]) for size in range(len(text) + 1)]
    assert ends == sorted(ends)


def test_html_is_text() -> None:
    kinds = {token.type for token in AnswerMarkdown("<think>\na\n</think>\n\nb <i>c</i>").parsed}
    assert not any(re.match("html", kind) for kind in kinds)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\u3000b\xa0c\u202fd", "a\u3000b\xa0c\u202fd"),
        ("\U0001f469\u200d\U0001f680", "\U0001f469\u200d\U0001f680"),
        ("\x1b]0;x\x07\x9b2J\u202ex\u2028\r\ud800", "?]0;x??2J?x???"),
    ],
)
def test_texts_of_others(text: str, shown: str) -> None:
    """Blanks and joiners of languages stay, and what controls a terminal does not."""
    assert safe(text) == shown


def test_a_long_paragraph_shows_its_end() -> None:
    """On a narrow terminal, where it wraps."""
    console = Console(width=20, height=6, file=io.StringIO(), force_terminal=True)
    with Live(console=console, auto_refresh=False) as live:
        MarkdownView(live).add(" ".join(f"word{number}" for number in range(40)))
        with console.capture() as capture:
            console.print(live.renderable)
        lines = [line.rstrip() for line in capture.get().splitlines()]
    assert len(lines) == 4
    assert lines[-1].endswith("word39")


def files(*names: str) -> list[RemoteFile]:
    return [RemoteFile(name, 7) for name in names]


@pytest.mark.parametrize(
    ("names", "pattern", "engine", "found"),
    [
        (["x.gguf", "mmproj-x.gguf", "README.md"], "", "llama_cpp", ["model.gguf"]),
        (["q4/x.gguf", "q8/x.gguf"], "q8/*", "llama_cpp", ["model.gguf"]),
        (["../../x.gguf", "../generation_config.json"], "", "llama_cpp", ["model.gguf"]),
        (
            ["x-00002-of-00002.gguf", "x-00001-of-00002.gguf", "y.gguf"],
            "x-00001-of-00002.gguf",
            "llama_cpp",
            ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"],
        ),
        (
            ["openvino_model.xml", "openvino_model.bin", "config.json", "modeling.py", "a/config.json"],
            "",
            "openvino_genai",
            ["config.json", "openvino_model.bin", "openvino_model.xml"],
        ),
        (
            ["config.json", "model.safetensors", "modeling.py", "pytorch_model.bin"],
            "",
            "vllm",
            ["weights/config.json", "weights/model.safetensors"],
        ),
    ],
)
def test_files_of_a_model(names: list[str], pattern: str, engine: str, found: list[str]) -> None:
    choice = choose_files(files(*names), pattern)
    assert (choice.engine, sorted(choice.files)) == (engine, found)


@pytest.mark.parametrize(
    ("names", "pattern", "message"),
    [
        (["a.gguf", "b.gguf"], "", "choose one with --file: a.gguf (7 B), b.gguf (7 B)"),
        (["a-00001-of-00003.gguf", "a-00003-of-00003.gguf"], "", "has 3 parts, and not all are there"),
        (["a.gguf"], "*.xml", "--file: no file is '*.xml'; there are a.gguf"),
        (["pytorch_model.bin"], "", "there are pytorch_model.bin"),
    ],
)
def test_no_model_or_several(names: list[str], pattern: str, message: str) -> None:
    with pytest.raises(PullError, match=re.escape(message)):
        choose_files(files(*names), pattern)
