"""`auto_complete_config` in a process of its own."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from conch.core.errors import ConchError, InternalError, UnavailableError
from conch.workers.completion import complete_in_worker
from conch.workers.environments import server_environment
from conch.workers.monitor import Monitor

MODEL = """
import logging, os, sys, time
import triton_python_backend_utils as pb_utils
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
    assert caught.value.message == f"ValueError: no such thing\n\nAt:\n  {path}(7): auto_complete_config\n"


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


def test_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _complete(tmp_path, 'pb_utils.Logger.log_info("two\\nlines"); return config')
        with pytest.raises(UnavailableError):
            _complete(tmp_path, 'logging.error("the last"); os._exit(4)')
    found = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    assert found == [
        ("conch.python_model.m", "INFO", "two\nlines"),
        ("conch.python_model.m", "ERROR", "the last"),
    ]


def test_a_model_that_can_not_be_imported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model.py").write_text("import no_such_module")
    with pytest.raises(InternalError, match="ModuleNotFoundError"):
        complete_in_worker(Monitor(), server_environment(), {"name": "m"}, tmp_path, "model.py", None)
    (record,) = caplog.records
    assert record.name.startswith("conch.backends.python")
    assert record.getMessage().startswith("model 'm' can't be imported\nTraceback")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="Python model file not found in"):
        complete_in_worker(Monitor(), server_environment(), {"name": "m"}, tmp_path, "none.py", None)


def test_time_limit(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match=r"longer than 0\.5 s, which is what 'CONCH_START_TIMEOUT_SECONDS'"):
        _complete(tmp_path, "time.sleep(1000)", 0.5)
