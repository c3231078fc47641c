"""The example clients against the example models, as the README has it."""

from __future__ import annotations

import ast
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from tests.support.servers import EXAMPLES, PYTHON_EXAMPLES, ROOT, ServerProcess, serving_process

CLIENTS = sorted(
    path.name
    for path in (ROOT / "examples" / "clients").iterdir()
    if path.suffix in {".py", ".sh"} and path.stem != "common"
)
SAYS = {
    "digit_images.py": ("PNG: 3", "JPEG: 3", "held-out images right", "other files are refused: in ensemble"),
    "rest.py": ("größe -> GRÖSSE (5)", "hung up on a longer text after its first word"),
    "rest.sh": ('"upper":"CONCH"', 'data: {"model_name":"word_chain"'),
    "shared_memory.py": ("none of a tensor in the messages",),
    "words.py": ("A model ", "hung up on a longer text after its first word"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server as `make serve` starts it."""
    with serving_process(EXAMPLES, PYTHON_EXAMPLES) as server:
        yield server


@pytest.mark.parametrize("client", CLIENTS)
def test_clients_get_what_they_expect(server: ServerProcess, client: str) -> None:
    # Those that talk REST are called so.
    url = server.http_address if client.startswith("rest.") else server.address
    interpreter = "bash" if client.endswith(".sh") else sys.executable
    done = subprocess.run(
        [interpreter, ROOT / "examples" / "clients" / client, "--url", url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for text in SAYS.get(client, ()):
        assert text in done.stdout


def test_make_serve_installs_what_the_clients_import() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = map(Requirement, (*project["dependencies"], *project["optional-dependencies"]["demo"]))
    installed = {each.name: each.extras for each in found}
    modules: set[str] = set()
    for path in (ROOT / "examples" / "clients").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                modules.add(node.module or "")
            elif isinstance(node, ast.Import):
                modules |= {name.name for name in node.names}
    for module in modules:
        package, part = (*module.split("."), "")[:2]
        if package in sys.stdlib_module_names or package == "common":
            continue
        extras = installed[{"PIL": "pillow"}.get(package, package)]
        assert part in extras or part == "utils" or package != "tritonclient", module


def test_the_python_client_of_the_documentation(server: ServerProcess) -> None:
    text = (ROOT / "docs" / "clients.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = code.replace("localhost:8001", server.address)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split()[1:3] == ["0", "2"], done.stdout + done.stderr


def test_the_walk_through_a_hot_swap() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    walk = ROOT / "examples" / "hot-swap" / "walk.py"
    done = subprocess.run(
        [sys.executable, walk, f"--port={port}"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "version 2 copied into the repository" in done.stdout
    assert "version 3 is broken: Internal: unable to load ONNX model" in done.stdout
    assert done.stdout.endswith("0 requests failed\n")
