"""The examples of the Python API run, and their types are right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.servers import EXAMPLES, ROOT, WAIT_S, free_port

import conch

SCRIPTS = ROOT / "examples" / "python-api"


def run(name: str, *arguments: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPTS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.process
def test_a_script_that_is_a_server() -> None:
    ports = [free_port() for _ in range(3)]
    flags = [f"--{kind}-port={port}" for kind, port in zip(("grpc", "http", "metrics"), ports, strict=True)]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "bind_function.py"), *flags], stdout=subprocess.PIPE
    )
    try:
        with conch.Client(f"127.0.0.1:{ports[0]}", "softmax", wait_s=WAIT_S) as client:
            logits = np.array([1.0, 2.0, 3.0], np.float32)
            told = client.infer_sample(logits)["probabilities"]
            np.testing.assert_allclose(told, np.exp(logits) / np.exp(logits).sum(), rtol=1e-6)
            colder = client.infer_sample(logits=logits, scale=[0.1])["probabilities"]
            assert colder[2] > told[2]
            with pytest.raises(conch.InvalidArgumentError, match=r"scale must be above 0, not 0\.0"):
                client.infer_sample(logits=logits, scale=[0.0])
        process.terminate()
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.process
def test_a_server_in_a_program() -> None:
    assert run("embed_server.py", str(EXAMPLES)) == [
        "simple says [0 2 4 6]",
        "negate says -45",
        "a client is told [0 0 0 0]",
        "ready: ['negate', 'simple']",
    ]


@pytest.mark.process
def test_a_stream_of_words() -> None:
    assert run("stream_words.py") == [
        "in the program: ['A', 'B', 'C']",
        *(f"at a client: {word}" for word in ("ONE", "BY", "ONE")),
    ]


def test_the_programs_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python-api.md").read_text(), re.DOTALL)
    printed = []
    for program in programs:
        exec(program, {"__name__": "program"})
        printed.append(capsys.readouterr().out)
    assert printed == [
        "[[2. 4.]]\n[2. 4.]\n",
        "  OUTPUT_1\n0   leaves\n1    stays\n2    stays\n3   leaves\n[b'stays']\n",
        "good morning ",
        "[[2. 4.]]\n[[2.0, 4.0], [6.0, 8.0]]\n",
    ]


@pytest.mark.slow
@pytest.mark.process
def test_type_checkers_agree() -> None:
    pytest.importorskip("mypy")
    paths = {"MYPYPATH": os.pathsep.join(str(ROOT / part) for part in ("services", "control"))}
    for script in sorted(SCRIPTS.glob("*.py")):
        result = subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", str(Path(script))],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env={**os.environ, **paths},
        )
        assert result.returncode == 0, result.stdout
