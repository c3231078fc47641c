"""`conch run` with a random model: one answer without a terminal, and a chat in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from tests.support.model_site import ModelSite, Page, gguf_bytes, model_site
from tests.support.servers import CONCH, WAIT_S, eventually
from tests.support.terminals import Terminal, terminal
from tests.support.token_stream_site import held_chat

from conch_engines.language.random_model import write_random_model

pytestmark = pytest.mark.process

CTRL_C, CTRL_D = "\x03", "\x04"
GREEDY = ["--temperature", "0", "--max-tokens", "8"]
_CHAT = """
import sys
from conch_hub.chat.chat_terminal import ChatTerminal
from conch_hub.chat.conversation import Conversation

ChatTerminal(Conversation("127.0.0.1", int(sys.argv[1]), "held", {})).run()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("downloads") / "Tiny Model.gguf"
    write_random_model(path)
    return path


@pytest.fixture
def site() -> Iterator[ModelSite]:
    with model_site() as made:
        yield made


def run(
    *arguments: str, given: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command without a terminal."""
    return subprocess.run(
        [str(CONCH), "run", *arguments],
        input=given,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def prompts(shown: Terminal, count: int) -> None:
    """Waits until so many prompts have been shown."""
    shown.wait_for(lambda _: shown.output.count(">>> ") >= count, f"prompt {count}")


def test_one_answer_without_a_terminal(model: Path, tmp_path: Path) -> None:
    """The same by argument and standard input, of a file, its folder and a repository; nothing stays."""
    temporary = {"TMPDIR": str(tmp_path)}
    first = run(str(model), "hello", *GREEDY, environment=temporary)
    assert (first.returncode, first.stderr) == (0, "")
    assert len(first.stdout) > 1 and first.stdout.endswith("\n") and "\x1b" not in first.stdout
    served = tmp_path / "models" / "m"
    (served / "2").mkdir(parents=True)
    (served / "2" / "model.gguf").symlink_to(model)
    for folder in (model.parent, served):
        again = run(str(folder), *GREEDY, given="hello", environment=temporary)
        assert again.stdout == first.stdout, again.stderr
    assert not list(tmp_path.glob("conch-run-*"))


def test_texts_and_readers_of_other_kinds(model: Path, tmp_path: Path) -> None:
    """A prompt after flags, bytes that are no UTF-8, an encoding that has not the answer, a closed pipe."""
    last = run(str(model), *GREEDY, "hello", environment={"PYTHONIOENCODING": "ascii"})
    assert (last.returncode, last.stderr) == (0, "")
    assert "?" in last.stdout and last.stdout.isascii()

    both = run(str(model), *GREEDY, "what?", given="a text\n")
    assert both.stdout == run(str(model), *GREEDY, given="what?\n\na text\n").stdout != last.stdout
    alone = run(str(model), *GREEDY, "what?")
    assert alone.stdout == run(str(model), *GREEDY, given="what?").stdout != both.stdout

    broken = tmp_path / "prompt"
    broken.write_bytes(b"a\xffb")
    command = [str(CONCH), "run", str(model), *GREEDY]
    with broken.open("rb") as given:
        done = subprocess.run(
            command, stdin=given, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
    assert (done.returncode, done.stderr) == (2, "conch run: the prompt is no text in UTF-8\n")

    ours, theirs = os.pipe()
    os.close(ours)
    try:
        closed = subprocess.run(
            [*command, "hello"], stdout=theirs, stderr=subprocess.PIPE, timeout=WAIT_S, check=False
        )
    finally:
        os.close(theirs)
    assert (closed.returncode, closed.stderr) == (1, b"")


def test_one_answer_in_a_terminal_does_not_control_it(model: Path) -> None:
    """The random model writes control characters."""
    piped = run(str(model), "hello", "--temperature", "0", "--max-tokens", "64").stdout
    assert any(each < " " for each in piped.replace("\n", "")), "seed 7 has some"
    command = [str(CONCH), "run", str(model), "hello", "--temperature", "0", "--max-tokens", "64"]
    with terminal(*command) as shown:
        assert shown.wait() == 0
        answer = shown.output.rpartition("\x1b[K")[2].replace("\r\n", "\n")
    assert not {each for each in answer if each < " "} - {"\n", "\t"}


def test_a_model_is_fetched_once(site: ModelSite, tmp_path: Path) -> None:
    site.pages["/m.gguf"] = Page(gguf_bytes(tmp_path))
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    answers = [run(f"{site.url}/m.gguf", "hello", *GREEDY, environment=cache) for _ in range(2)]
    assert [each.returncode for each in answers] == [0, 0], answers[0].stderr
    assert answers[0].stdout == answers[1].stdout
    assert len(site.asked) == 2, "a look and a fetch"
    (kept,) = (tmp_path / "cache" / "conch" / "pulled").glob("m-*/1/model.gguf")
    assert kept.read_bytes() == site.pages["/m.gguf"].content


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["none.gguf", "x"], 1, "there is no file 'none.gguf'"),
        (["{folder}", "x"], 1, "there is no GGUF file, no folder of OpenVINO GenAI"),
        (["{model}"], 2, "there is no prompt: give it as an argument or on standard input"),
        (["{model}", "x", "--web"], 2, "--web opens a page, which takes no PROMPT"),
        (["{model}", "--web", "--seed", "0"], 2, "have no effect on the page of --web"),
        (["{model}", "x", "--revision", "y"], 2, "have no effect on a file of this machine"),
        (["{model}", "x" * 5000], 1, "maximum context length is 2048 tokens"),
    ],
)
def test_what_it_refuses(arguments: list[str], code: int, message: str, model: Path, tmp_path: Path) -> None:
    """By name, also a prompt that is longer than the model's context."""
    done = run(*(each.format(folder=tmp_path, model=model) for each in arguments))
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_chat_in_a_terminal(model: Path, tmp_path: Path) -> None:
    state, saved = tmp_path / "state", tmp_path / "chat.json"
    command = [str(CONCH), "run", str(model), *GREEDY, "--system", "be brief"]
    with terminal(*command, environment={"XDG_STATE_HOME": str(state)}) as shown:
        prompts(shown, 1)
        (address,) = {word for word in shown.output.split() if word.endswith("/v1")}
        (served,) = httpx.get(f"{address}/models").json()["data"]
        assert served["id"] == "Tiny-Model"
        shown.press("hello\n")
        prompts(shown, 2)
        assert "(8 tokens, the first after" in shown.output
        shown.press(f"/save {saved}\n")
        prompts(shown, 3)
        shown.press("/clear\n")
        prompts(shown, 4)
        shown.press(f"/save {saved}\n")
        prompts(shown, 5)
        assert f"'{saved}' can't be written: File exists" in shown.output
        shown.press("/nothing\n")
        prompts(shown, 6)
        assert "there is no /nothing" in shown.output
        shown.press(CTRL_D)
        assert shown.wait() == 0
    roles = [each["role"] for each in json.loads(saved.read_text())]
    assert roles == ["system", "user", "assistant"]
    history = state / "conch" / "chat_history"
    assert history.read_text().splitlines()[0] == "hello"
    assert history.stat().st_mode & 0o077 == 0


def test_a_chat_survives_odd_input(tmp_path: Path) -> None:
    with held_chat(["text"]) as site:
        command = [sys.executable, "-c", _CHAT, str(site.port)]
        with terminal(*command, environment={"XDG_STATE_HOME": str(tmp_path)}) as shown:
            prompts(shown, 1)
            shown.press_bytes(b"a\xffb\n")
            prompts(shown, 2)
            assert "the prompt is no text in UTF-8" in shown.output
            shown.press("/save ~unknown-user/chat.md\n")
            prompts(shown, 3)
            assert "can't be written: No such file or directory" in shown.output
            shown.press(CTRL_D)
            assert shown.wait() == 0


def test_ctrl_c_cancels_an_answer_and_then_ends(tmp_path: Path) -> None:
    """Against a server whose answer goes on until its client has gone."""
    with held_chat(["# Title\n\n", "<think>*some*</think> text \x1b[2J"]) as site:
        command = [sys.executable, "-c", _CHAT, str(site.port)]
        with terminal(*command, environment={"XDG_STATE_HOME": str(tmp_path)}) as shown:
            prompts(shown, 1)
            shown.press("hello\n")
            shown.wait_for(lambda _: "text ?[2J" in shown.output, "the answer has begun")
            assert "<think>" in shown.output, "HTML is shown as it is"
            assert "\x1b[2J" not in shown.output
            shown.press(CTRL_C)
            eventually(lambda: site.gone, "the server sees the client go")
            prompts(shown, 2)
            assert "(cancelled)" in shown.output
            shown.press(CTRL_C)
            assert shown.wait() == 0


def test_the_web_page(model: Path) -> None:
    """It may ask the model; the browser is a program that does nothing here."""
    with terminal(str(CONCH), "run", str(model), "--web", environment={"BROWSER": "true"}) as shown:
        shown.wait_for(lambda _: "/#/chat" in shown.output, "the address is shown")
        (url,) = {word for word in shown.output.split() if word.endswith("/#/chat")}
        found = httpx.get(f"{url.removesuffix('/#/chat')}/api/chat")
        assert "Tiny-Model" in found.text
        shown.press(CTRL_C)
        assert shown.wait() == 130
