"""`auto_complete_config` in a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.servers import WAIT_S, eventually

from conch.backends.python.python_settings import Settings
from conch.core.errors import ConchError, InternalError, InvalidArgumentError, UnavailableError
from conch.core.model_control import cancellable_load
from conch.workers.environment import server_environment
from conch.workers.supervision.config_completion import complete_in_worker
from conch.workers.supervision.process_monitor import ProcessMonitor

pytestmark = pytest.mark.process

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


def _complete(
    tmp_path: Path, body: str, timeout_s: float | None = None, memory_limit_mb: int | None = None
) -> dict[str, Any]:
    (tmp_path / "model.py").write_text(MODEL.format(body=body))
    config = {"name": "m", "max_batch_size": 0}
    settings = Settings(start_timeout_s=timeout_s, memory_limit_mb=memory_limit_mb)
    return complete_in_worker(ProcessMonitor(), server_environment(), config, tmp_path, "model.py", settings)


def test_completes(tmp_path: Path) -> None:
    config = _complete(tmp_path, "config.set_max_batch_size(os.getpid()); return config")
    assert config["max_batch_size"] not in (0, os.getpid())


def test_large_configs(tmp_path: Path) -> None:
    """More than a socket holds, both ways."""
    (tmp_path / "model.py").write_text(MODEL.format(body="return config"))
    config = {"name": "m", "input": [{"name": "x" * 3_000_000}]}
    completed = complete_in_worker(
        ProcessMonitor(), server_environment(), config, tmp_path, "model.py", Settings()
    )
    assert completed["input"] == config["input"]


def test_a_config_of_any_size_is_refused(tmp_path: Path) -> None:
    body = (
        "config.add_input({'name': 'x' * 17_000_000, 'data_type': 'TYPE_FP32', 'dims': [1]}); return config"
    )
    with pytest.raises(InvalidArgumentError, match="has returned a config of more than 16 MiB"):
        _complete(tmp_path, body)


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
    logging.getLogger("conch.backends.python")  # exists in servers, whose backend has it
    (tmp_path / "model.py").write_text("import no_such_module")
    with pytest.raises(InternalError, match="ModuleNotFoundError"):
        complete_in_worker(
            ProcessMonitor(), server_environment(), {"name": "m"}, tmp_path, "model.py", Settings()
        )
    (record,) = caplog.records
    assert record.name.startswith("conch.backends.python")
    assert record.getMessage() == "model 'm' can't be imported"
    assert str(record.exc_text).startswith("Traceback")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="Python model file not found in"):
        complete_in_worker(
            ProcessMonitor(), server_environment(), {"name": "m"}, tmp_path, "none.py", Settings()
        )


def test_time_limit(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match=r"longer than 0\.5 s, which is what 'CONCH_START_TIMEOUT_SECONDS'"):
        _complete(tmp_path, "time.sleep(1000)", 0.5)


def test_a_load_that_is_stopped_does_not_wait(tmp_path: Path) -> None:
    up = tmp_path / "up"
    with cancellable_load(up.exists), pytest.raises(UnavailableError) as caught:
        _complete(tmp_path, f"open({str(up)!r}, 'w'); time.sleep(1000)")
    assert caught.value.message == (
        "auto_complete_config function of model 'm' was ended, as the load was stopped"
    )


FORKS = (
    "import multiprocessing; "
    "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,)); child.start(); "
)


def test_children_of_the_model_that_hold_its_socket(tmp_path: Path) -> None:
    config = _complete(tmp_path, FORKS + "config.set_max_batch_size(child.pid); return config")
    eventually(lambda: not psutil.pid_exists(config["max_batch_size"]), "it has ended too")


def test_a_crash_that_leaves_a_child_which_holds_the_socket(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    body = (
        "child = os.fork()\n"
        "        if not child:\n"
        "            os.setsid()\n"
        f"            open({str(pid)!r}, 'w').write(str(os.getpid()) + '.')\n"
        "            time.sleep(1000)\n"
        f"        while not os.path.exists({str(pid)!r}): time.sleep(0.01)\n"
        "        os._exit(4)"
    )
    caught: list[ConchError] = []

    def complete() -> None:
        try:
            _complete(tmp_path, body)
        except ConchError as error:
            caught.append(error)

    thread = threading.Thread(target=complete)
    thread.start()
    try:
        eventually(lambda: pid.exists() and pid.read_text().endswith("."), "the child runs")
        thread.join(WAIT_S)
        assert not thread.is_alive()
    finally:
        os.kill(int(pid.read_text()[:-1]), signal.SIGKILL)
        thread.join()
    assert "exited with status 4" in caught[0].message


def test_its_memory_is_limited(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match=r"MemoryError.*'CONCH_MEMORY_LIMIT_MB'"):
        _complete(tmp_path, "bytearray(1 << 30); return config", memory_limit_mb=512)
