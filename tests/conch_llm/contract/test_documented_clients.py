"""The pages' examples of OpenAI's clients stream an answer as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.servers import ROOT, WAIT_S, LocalServer

_PAGES = ("README.md", "docs/llm.md")
_ADDRESS = "localhost:8000"


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    return done.stdout


@pytest.mark.process
@pytest.mark.parametrize("page", _PAGES)
def test_the_snippet_for_python_streams(server: LocalServer, page: str) -> None:
    snippets = re.findall(r"```python\n(.*?)```", Path(ROOT, page).read_text(), re.DOTALL)
    (code,) = (each for each in snippets if "OpenAI(" in each)
    assert _ADDRESS in code
    assert "stream=True" in code
    assert _run([sys.executable, "-c", code.replace(_ADDRESS, server.http_address)]).strip()


@pytest.mark.process
@pytest.mark.parametrize("page", _PAGES)
def test_the_command_streams(server: LocalServer, page: str) -> None:
    commands = re.findall(r"^\$ (curl -N .*?\}')$", Path(ROOT, page).read_text(), re.DOTALL | re.MULTILINE)
    (command,) = commands
    assert _ADDRESS in command
    said = _run(["bash", "-c", command.replace(_ADDRESS, server.http_address)])
    assert said.count("data: {") > 2
    assert said.endswith("data: [DONE]\n\n")
