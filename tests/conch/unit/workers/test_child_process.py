"""Worker processes: their output, their ends, and what they leave behind."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from tests.support.servers import WAIT_S, eventually
from tests.support.workers import completing

from conch.core.errors import UnavailableError
from conch.workers.environment import Environment
from conch.workers.supervision.child_process import ChildProcess, start_worker
from conch.workers.supervision.crash_report import split_errors
from conch.workers.supervision.fork_server import describe_end
from conch.workers.supervision.process_monitor import ProcessMonitor

pytestmark = pytest.mark.process

Run = Callable[..., ChildProcess]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs code in a worker that completes a config: the code is that of the model's file."""
    monitor = ProcessMonitor()
    with ExitStack() as sockets:

        def start(code: str, on_end: Callable[[], None] = lambda: None) -> ChildProcess:
            return completing(sockets, monitor, tmp_path, code, on_end)

        yield start


def test_exit_status(run: Run) -> None:
    process = run("import os; os._exit(3)")
    assert process.wait(WAIT_S)
    assert process.how == "exited with status 3"


def test_death_is_told_once_it_is_known_how(run: Run) -> None:
    told: list[str] = []
    started: list[ChildProcess] = []
    process = run("import time; time.sleep(1000)", lambda: told.append(started[0].how))
    started.append(process)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(WAIT_S)
    assert told == ["killed by signal 9 (SIGKILL)"]


def test_kill_takes_children_along(run: Run, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    process = run(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{child.pid}}.')\n"
        "time.sleep(1000)"
    )
    eventually(lambda: pids.exists() and pids.read_text().endswith("."), "the child runs")
    process.kill()
    assert process.wait(WAIT_S)
    child = int(pids.read_text()[:-1])
    eventually(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie", "it ended")


def test_children_do_not_outlive_a_worker_that_exits(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """The child holds the worker's pipes, which therefore do not end by themselves."""
    caplog.set_level(logging.INFO)
    process = run(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "print(child.pid)"
    )
    assert process.wait(WAIT_S)
    assert process.how == "exited with status 0"
    child = int(caplog.messages[0].removeprefix("model_0_0: "))
    eventually(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie", "it ended")


def test_killing_what_has_ended_does_nothing(run: Run) -> None:
    process = run("pass")
    assert process.wait(WAIT_S)
    process.kill()
    process.abort()
    assert process.how == "exited with status 0"


def test_abort_leaves_the_stacks(run: Run, tmp_path: Path) -> None:
    up = tmp_path / "up"
    process = run(
        "import sys, time\n"
        "def hangs():\n"
        f"    open({str(up)!r}, 'w')\n"
        "    time.sleep(1000)\n"
        "print('before', file=sys.stderr)\n"
        "hangs()"
    )
    eventually(up.exists, "it hangs")
    process.abort()
    assert process.wait(WAIT_S)
    assert process.how == "killed by signal 6 (SIGABRT)"
    stack, before = split_errors(process.errors)
    assert before == "before\n"
    assert "in hangs" in stack


def test_output_is_logged_with_the_name(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    process = run("import sys; print('one'); print('two', file=sys.stderr)")
    assert process.wait(WAIT_S)
    assert set(caplog.record_tuples) == {
        ("conch.workers.output", logging.INFO, "model_0_0: one"),
        ("conch.workers.output", logging.WARNING, "model_0_0: two"),
    }


def test_megabytes_of_output_are_cut(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    process = run("import sys; sys.stderr.write('x' * 5_000_000 + '\\n'); print('y\\n' * 1_000_000, end='')")
    assert process.wait(WAIT_S)
    assert sum(map(len, caplog.messages)) < 100_000
    assert any("(4995904 more bytes)" in message for message in caplog.messages)
    assert any("more lines are left out" in message for message in caplog.messages)
    assert len(process.errors) < 100_000


def test_what_can_not_be_started() -> None:
    with pytest.raises(UnavailableError, match="'/nowhere/python' can't be started: No such file"):
        start_worker(ProcessMonitor(), "model_0_0", Environment(Path("/nowhere/python"), {}), "serve")


def test_thread_lives_for_as_long_as_any_process(run: Run) -> None:
    def runs() -> bool:
        return any(thread.name == "conch-workers" for thread in threading.enumerate())

    first, second = (run("import time; time.sleep(1000)") for _ in range(2))
    first.kill()
    assert first.wait(WAIT_S)
    assert runs()
    second.kill()
    assert second.wait(WAIT_S)
    eventually(lambda: not runs(), "the thread ends")


def test_texts() -> None:
    assert describe_end(0) == "exited with status 0"
    assert describe_end(-11) == "killed by signal 11 (SIGSEGV)"
    assert describe_end(-64) == "killed by signal 64 (SIGRTMAX)"
    assert describe_end(-40) == "killed by signal 40 (unknown)"
    assert split_errors("nothing\n") == ("", "nothing\n")
    assert split_errors("a\nFatal Python error: x\nb\n") == ("Fatal Python error: x\nb", "a\n")
    assert split_errors("Fatal Python error: x") == ("Fatal Python error: x", "")
