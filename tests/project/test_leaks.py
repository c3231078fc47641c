"""The leak fixture fails a test for each kind of thing it can leave behind, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from tests.support.leaks import held, no_leaks, still_leaked
from tests.support.names import DIRECTORY, made_here, new_name
from tests.support.sharing import shared_object

ROOT = Path(__file__).resolve().parents[2]

CONFTEST = """
import pytest
from tests.support.leaks import no_leaks

@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    with no_leaks(grace_s=0.05):
        yield
"""

LEAKY = """
import os, socket, subprocess, sys, threading

kept = []

def test_thread():
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_file():
    kept.append(os.open(__file__, os.O_RDONLY))

def test_socket():
    kept.append(socket.socketpair())

def test_clean():
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
    with open("/dev/null"):
        subprocess.run([sys.executable, "-c", ""], check=True)
"""


@pytest.mark.process
def test_leaking_tests_fail_in_a_run_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        check=False,
    )
    assert "5 passed, 4 errors" in run.stdout, run.stdout
    for test, what in (
        ("test_thread", "thread 'forgotten'"),
        ("test_process", "child process"),
        ("test_file", "/test_leaky.py"),
        ("test_socket", "socket:["),
    ):
        assert f"::{test}" in run.stdout and what in run.stdout, run.stdout
    assert "ERROR test_leaky.py::test_clean" not in run.stdout


def test_a_shared_memory_name_is_reported_until_it_is_unlinked() -> None:
    before = held()
    memory = SharedMemory(create=True, size=16)
    try:
        assert any(memory.name in line for line in still_leaked(before, 0.0))
    finally:
        memory.close()
        memory.unlink()
    assert still_leaked(before) == []


MAKE = """
import mmap, os, sys
kept = []
for argument in sys.argv[1:]:
    how, name = argument.split(":")
    descriptor = os.open(f"/dev/shm/{name}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.ftruncate(descriptor, 4096)
    if how == "mapped":
        kept.append(mmap.mmap(descriptor, 4096))
    if how != "open":
        os.close(descriptor)
print(flush=True)
input()
"""


@contextmanager
def making(**names: str) -> Iterator[int]:
    """A process that has made names, and has them as their keys say; gives its pid."""
    command = [sys.executable, "-c", MAKE, *(f"{how}:{name}" for how, name in names.items())]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()
            yield process.pid
            process.stdin.close()
    finally:
        for name in names.values():
            (DIRECTORY / name).unlink(missing_ok=True)


@pytest.mark.process
def test_names_that_others_have_are_theirs() -> None:
    mine, theirs, gone = (
        {how: f"leaks-{os.getpid()}-{whose}-{how}" for how in ("open", "mapped", "left")}
        for whose in ("mine", "theirs", "gone")
    )
    with making(**theirs), making(**mine) as pid:
        with making(**gone):
            pass
        (DIRECTORY / gone["left"]).touch()
        try:
            names = {*mine.values(), *theirs.values(), gone["left"]}
            assert made_here(names, pid) == {mine["open"], mine["mapped"]}
            both = {each[how] for each in (mine, theirs) for how in ("open", "mapped")}
            assert made_here(names) == both  # they are children of this process
        finally:
            (DIRECTORY / gone["left"]).unlink()
    assert made_here(()) == set()


@pytest.mark.process
def test_names_with_a_mark_are_their_runs() -> None:
    own = new_name()
    run = own.split("-")[1]
    with making() as pid:
        of_a_child = f"test-{run}-{pid}-0"
        names = {own, of_a_child, f"test-0-{pid}-0", f"test-0-{2**31}-0"}
        assert made_here(names) == {own, of_a_child}
        assert made_here(names, pid) == {of_a_child}
    assert made_here({own, of_a_child}) == {own, of_a_child}  # the child has ended, and left it behind


def test_names_of_others_are_no_leak() -> None:
    with shared_object(16) as memory, no_leaks(grace_s=0.0):
        others = DIRECTORY / memory.key.replace("test-", "test-0", 1)
        others.touch()
    others.unlink()


def test_what_ends_by_itself_within_the_grace_is_no_leak() -> None:
    gate = threading.Event()
    with no_leaks():
        threading.Thread(target=gate.wait).start()
        threading.Timer(0.05, gate.set).start()


def test_the_message_says_what_was_left() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="the culprit")
    try:
        with pytest.raises(AssertionError, match="left behind: thread 'the culprit'"), no_leaks(grace_s=0.0):
            thread.start()
    finally:
        gate.set()
        thread.join()
