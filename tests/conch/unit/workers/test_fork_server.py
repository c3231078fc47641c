"""Workers forked from a template: what they share, and what happens if a fork or the template fails."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from tests.support.servers import WAIT_S, eventually
from tests.support.workers import completing

from conch.core.errors import UnavailableError
from conch.workers.environment import Environment, server_environment
from conch.workers.supervision.child_process import ChildProcess
from conch.workers.supervision.process_monitor import ProcessMonitor

pytestmark = pytest.mark.process

Run = Callable[..., ChildProcess]
SLEEPS = "import time; time.sleep(1000)"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs code in a worker; all of a test share a monitor."""
    monitor, numbers = ProcessMonitor(), itertools.count()
    with ExitStack() as stack:

        def start(code: str, environment: Environment | None = None) -> ChildProcess:
            directory = tmp_path / f"model_{next(numbers)}"
            directory.mkdir()
            process = completing(stack, monitor, directory, code, environment=environment)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield start


def _template(process: ChildProcess) -> psutil.Process:
    return psutil.Process(psutil.Process(process.pid).ppid())


def _customized(folder: Path, code: str) -> Environment:
    """The server's environment with a `sitecustomize`, which every interpreter runs first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return server_environment({"PYTHONPATH": str(folder)})


def _printed(process: ChildProcess, caplog: pytest.LogCaptureFixture) -> str:
    assert process.wait(WAIT_S)
    assert process.how == "exited with status 0", process.errors
    text = "\n".join(message.removeprefix("model_0_0: ") for message in caplog.messages)
    caplog.clear()
    return text


def test_a_killed_template_takes_its_workers_along(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    first, second = run(SLEEPS), run(SLEEPS)
    template = _template(first)
    assert _template(second) == template
    template.kill()
    for process in (first, second):
        assert process.wait(WAIT_S)
        assert process.how == "killed with its template, which was killed by signal 9 (SIGKILL)"
        assert not psutil.pid_exists(process.pid) or psutil.Process(process.pid).status() == "zombie"
    assert f"the template (pid {template.pid}) of 2 workers in the server's environment ended" in caplog.text
    assert _template(run(SLEEPS)) != template


def test_a_template_ends_after_its_last_worker(run: Run) -> None:
    process = run(SLEEPS)
    template = _template(process)
    process.kill()
    assert process.wait(WAIT_S)
    eventually(lambda: not template.is_running(), "it has ended")


def test_a_fork_that_fails(run: Run, tmp_path: Path) -> None:
    up = tmp_path / "up"
    environment = _customized(
        tmp_path / "site",
        "import errno, os\n"
        "fork = os.fork\n"
        "def fails():\n"
        f"    if os.path.exists({str(up)!r}):\n"
        "        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
        "    return fork()\n"
        "os.fork = fails",
    )
    process = run(SLEEPS, environment)
    up.touch()
    with pytest.raises(UnavailableError, match=r"python.*' can't be started: Resource temporarily unav"):
        run(SLEEPS, environment)
    up.unlink()
    assert _template(run(SLEEPS, environment)) == _template(process)


def test_a_template_without_free_descriptors(run: Run) -> None:
    process = run(SLEEPS)
    template = _template(process)
    eventually(lambda: template.num_fds() == 5, "it has the standard three, its socket and a pidfd")
    before = resource.prlimit(template.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(template.pid, resource.RLIMIT_NOFILE, (template.num_fds() + 1, before[1]))
    with pytest.raises(UnavailableError, match="can't be started: Too many open files"):
        run(SLEEPS)
    resource.prlimit(template.pid, resource.RLIMIT_NOFILE, before)
    assert _template(run(SLEEPS)) == template


def test_a_template_that_can_not_start(run: Run, tmp_path: Path) -> None:
    environment = _customized(
        tmp_path / "site", "import os, sys; sys.stderr.write('no\\n'); sys.stderr.flush(); os._exit(7)"
    )
    with pytest.raises(UnavailableError) as caught:
        run(SLEEPS, environment)
    assert caught.value.message == (
        "Stub process 'model_0_0' is not healthy. Its process exited with status 7. The last it wrote to "
        "standard error:\nno"
    )


def test_many_starts_at_once(run: Run) -> None:
    with ThreadPoolExecutor(32) as pool:
        processes = [*pool.map(lambda _: run(SLEEPS), range(32))]
    assert len({process.pid for process in processes}) == 32
    assert len({_template(process) for process in processes}) == 1


def test_a_worker_has_only_its_own_descriptors(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    others = [run(SLEEPS) for _ in range(3)]
    code = (
        "import os\n"
        "for name in os.listdir('/proc/self/fd'):\n"
        "    try: print(name, os.readlink('/proc/self/fd/' + name))\n"
        "    except FileNotFoundError: pass"
    )
    found = _printed(run(code), caplog).splitlines()
    kinds = sorted(re.sub(r":\[?\d+\]?|^\d+ ", "", line) for line in found)
    assert kinds == ["/dev/null", "/memfd:conch-stacks (deleted)", "pipe", "pipe", "socket"]
    assert not any(process.how for process in others)


def test_many_cycles_leave_nothing_in_the_template(run: Run) -> None:
    template = _template(run(SLEEPS))
    eventually(lambda: template.num_fds() == 5, "it has the standard three, its socket and a pidfd")
    for _ in range(200):
        process = run(SLEEPS)
        process.kill()
        assert process.wait(WAIT_S)
        assert process.how == "killed by signal 9 (SIGKILL)"
    assert template.num_fds() == 5
    assert template.num_threads() == 1
    assert len(template.children()) == 1


def test_random_numbers_differ(run: Run, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Also if the template has used the generators."""
    caplog.set_level(logging.INFO)
    used = "import random; random.seed(1); import numpy.random; numpy.random.seed(1)"
    environment = _customized(tmp_path / "site", used)
    code = "import random, uuid, numpy; print(random.random(), uuid.uuid4(), numpy.random.rand())"
    first, second = (_printed(run(code, environment), caplog).split() for _ in range(2))
    assert not set(first) & set(second)


def test_a_worker_multiplies_matrices_on_all_cores(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Threads of the template's libraries do not survive the fork; they start again."""
    caplog.set_level(logging.INFO)
    code = (
        "import os, numpy\n"
        "a = numpy.ones((800, 800))\n"
        "assert ((a @ a) == 800).all()\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    assert int(_printed(run(code), caplog)) >= min(len(os.sched_getaffinity(0)), 2)


def test_each_environment_has_a_template(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    holds = run(SLEEPS)
    other = dataclasses.replace(server_environment(), variables={**os.environ, "CONCH_TEST": "other"})
    code = "import os; print(os.getppid(), os.environ.get('CONCH_TEST'))"
    template = _template(holds).pid
    assert _printed(run(code), caplog).split() == [str(template), "None"]
    parent, value = _printed(run(code, other), caplog).split()
    assert int(parent) != template
    assert value == "other"


def test_the_command_line_names_the_instance(run: Run) -> None:
    process = run(SLEEPS)
    eventually(
        lambda: " ".join(psutil.Process(process.pid).cmdline()).strip() == "conch worker model_0_0",
        "it is named",
    )
    assert os.getpgid(process.pid) == os.getsid(process.pid) == process.pid
    os.kill(process.pid, signal.SIGSEGV)
    assert process.wait(WAIT_S)
    assert process.how == "killed by signal 11 (SIGSEGV)"
    assert "Fatal Python error: Segmentation fault" in process.errors
