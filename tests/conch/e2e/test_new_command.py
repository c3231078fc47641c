"""`conch new`: what it writes serves and passes its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.support.servers import CONCH, WAIT_S, client_of, serving_process, tensor


def new(directory: Path, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [CONCH, "new", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_new_model_serves_and_passes_its_test(tmp_path: Path) -> None:
    code, output, errors = new(tmp_path, "model", "first")
    assert (code, errors) == (0, "")
    assert "serve it:  conch serve --model-repository=models" in output
    test = tmp_path / "models" / "first" / "test_first.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", test],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    checked = subprocess.run([CONCH, "check", "--strict", tmp_path / "models"], check=False)
    assert checked.returncode == 0
    with serving_process(tmp_path / "models") as server, client_of(server) as client:
        result = client.infer("first", [tensor("INPUT", np.full((1, 3), 4, np.float32))])
        assert result.as_numpy("OUTPUT").tolist() == [[8, 8, 8]]


@pytest.mark.slow
def test_a_new_model_that_chats_serves_and_passes_its_test(tmp_path: Path) -> None:
    code, _, errors = new(tmp_path, "model", "--chat", "bot")
    assert (code, errors) == (0, "")
    test = tmp_path / "models" / "bot" / "test_bot.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", test],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    checked = subprocess.run([CONCH, "check", "--strict", tmp_path / "models"], check=False)
    assert checked.returncode == 0
    with serving_process(tmp_path / "models") as server:
        url = f"http://{server.http_address}/v2/models/bot/generate"
        answer = httpx.post(url, json={"text_input": "one two"}, timeout=WAIT_S).raise_for_status().json()
    assert answer["text_output"] == "one two "


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "there" / "first").mkdir(parents=True)
    code, _, errors = new(tmp_path, "model", "first", "--repository=there")
    assert (code, errors) == (1, "conch new model: there/first can't be written: File exists\n")
    assert not list((tmp_path / "there" / "first").iterdir())


@pytest.mark.parametrize("name", ["../up", "1st", "", 'a"b', "a b"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    code, _, errors = new(tmp_path, "model", name)
    assert code == 2 and f"'{name}' can't be the name" in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_new_backend_serves_and_passes_its_tests(tmp_path: Path) -> None:
    code, output, errors = new(tmp_path, "backend", "scaled_by")
    assert (code, errors) == (0, "")
    package = tmp_path / "conch-scaled_by"
    assert f"cd {package.name} && pip install -e '.[test]' && pytest" in output
    installed = tmp_path / "installed"
    arguments = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed), str(package)]
    subprocess.run([sys.executable, *arguments], check=True)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", package],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
    version = tmp_path / "models" / "times3" / "1"
    version.mkdir(parents=True)
    (version / "factor.txt").write_text("3")
    (version.parent / "config.pbtxt").write_text('backend: "scaled_by"')
    with (
        serving_process(tmp_path / "models", environment={"PYTHONPATH": str(installed)}) as server,
        client_of(server) as client,
    ):
        result = client.infer("times3", [tensor("INPUT", np.full((1, 3), 4, np.float32))])
        assert result.as_numpy("OUTPUT").tolist() == [[12, 12, 12]]


@pytest.mark.parametrize("name", ["Upper", "a-b", "python"])
def test_names_of_backends_that_are_none(tmp_path: Path, name: str) -> None:
    code, _, errors = new(tmp_path, "backend", name)
    assert code == 2 and f"'{name}'" in errors
    assert not list(tmp_path.iterdir())
