"""`auto_complete_config` in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from conch.core.errors import ConchError, InternalError, UnavailableError
from conch.workers.completion import complete_in_worker
from conch.workers.environments import server_environment
from conch.workers.monitor import Monitor

MODEL = """
import os, sys, time
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        {body}
    def execute(self, requests):
        pass
"""


def _complete(tmp_path: Path, body: str, timeout_s: float | None = None) -> dict[str, Any]:
    (tmp_path / "model.py").write_text(MODEL.format(body=body))
    config = {"name": "m", "max_batch_size": 0}
    return complete_in_worker(Monitor(), server_environment(), config, tmp_path, "model.py", timeout_s)


def test_completes(tmp_path: Path) -> None:
    config = _complete(tmp_path, "config.set_max_batch_size(os.getpid()); return config")
    assert config["max_batch_size"] not in (0, os.getpid())


def test_large_configs(tmp_path: Path) -> None:
    """More than a socket holds, both ways."""
    (tmp_path / "model.py").write_text(MODEL.format(body="return config"))
    config = {"name": "m", "input": [{"name": "x" * 3_000_000}]}
    completed = complete_in_worker(Monitor(), server_environment(), config, tmp_path, "model.py", None)
    assert completed["input"] == config["input"]


def test_its_error(tmp_path: Path) -> None:
    with pytest.raises(InternalError) as caught:
        _complete(tmp_path, "raise ValueError('no such thing')")
    path = tmp_path / "model.py"
    assert caught.value.message == f"ValueError: no such thing\n\nAt:\n  {path}(6): auto_complete_config\n"


@pytest.mark.parametrize("raises", ["raise SystemExit(4)", "sys.exit(4)"])
def test_exits_are_errors(tmp_path: Path, raises: str) -> None:
    with pytest.raises(InternalError, match="SystemExit: 4"):
        _complete(tmp_path, raises)


def test_crash(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as caught:
        _complete(tmp_path, "print('so long', file=sys.stderr); sys.stderr.flush(); os._exit(4)")
    assert caught.value.message == (
        "Stub process 'm' is not healthy. Its process exited with status 4. The last it wrote to standard "
        "error:\nso long"
    )


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="Python model file not found in"):
        complete_in_worker(Monitor(), server_environment(), {"name": "m"}, tmp_path, "none.py", None)


def test_time_limit(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match=r"longer than 0\.5 s, which is what 'CONCH_START_TIMEOUT_SECONDS'"):
        _complete(tmp_path, "time.sleep(1000)", 0.5)
