"""The models of examples/models/python, in both placements, through their client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.support.servers import PYTHON_EXAMPLES, ROOT, WAIT_S, ServerProcess, serving_process

MODELS = sorted(path.name for path in PYTHON_EXAMPLES.iterdir())
CLIENT = ROOT / "examples" / "clients" / "python_models.py"


@pytest.fixture(scope="module", params=["in_process", "worker"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server of them, placed as the parameter says."""
    with serving_process(
        PYTHON_EXAMPLES, flags=[f"--backend-config=python,placement={request.param}"]
    ) as server:
        yield server


@pytest.mark.parametrize("model", MODELS)
def test_each_model_answers_as_its_client_expects(server: ServerProcess, model: str) -> None:
    done = subprocess.run(
        [sys.executable, CLIENT, "--url", server.address, model],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{model}: ")
