"""Resources of a process, compared before and after a test."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
from tests.support.names import DIRECTORY, made_here
from tests.support.waiting import PATIENCE_S

from conch.backends.python.runtime.module_loading import owners

# A real Triton beside the tests, whether theirs or a benchmark's, makes and drops names with this prefix.
_PEER_PREFIX = "triton_python_backend_shm_region_"


@dataclass(frozen=True, slots=True)
class Held:
    """Resources of a process.

    Attributes:
        threads: Its threads.
        children: Its child processes.
        descriptors: File descriptors with what they refer to.
        models: Owners of the modules of Python models.
        shared_memory: Names in /dev/shm, those of other programs among them; see `made_here`.
    """

    threads: frozenset[threading.Thread]
    children: frozenset[psutil.Process]
    descriptors: frozenset[tuple[int, str]]
    models: tuple[object, ...]
    shared_memory: frozenset[str]


def held() -> Held:
    """Resources of this process now."""
    # The one helper process that multiprocessing starts once and keeps for the life of the process.
    tracker_pid = getattr(resource_tracker._resource_tracker, "_pid", None)
    tracker_fd = getattr(resource_tracker._resource_tracker, "_fd", None)
    return Held(
        frozenset(threading.enumerate()),
        frozenset(child for child in _children() if child.pid != tracker_pid),
        frozenset(pair for pair in _descriptors() if pair[0] != tracker_fd),
        tuple(owners()),
        frozenset(name for name in _names() if not name.startswith(_PEER_PREFIX)),
    )


def _names() -> list[str]:
    return os.listdir(DIRECTORY) if DIRECTORY.is_dir() else []


def _children() -> Iterator[psutil.Process]:
    # Reading these files is far faster than psutil's walk over all processes.
    pids: list[str] = []
    for task in os.listdir("/proc/self/task"):
        try:
            pids += Path(f"/proc/self/task/{task}/children").read_text().split()
        except FileNotFoundError:
            continue  # that thread has just ended
    for pid in pids:
        try:
            child = psutil.Process(int(pid))
            yield child
            yield from child.children(recursive=True)
        except psutil.NoSuchProcess:
            continue


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield int(name), os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the one the listing itself used


_servers = 0
_had_server = False
_GRPC = frozenset({"anon_inode:[eventpoll]", "anon_inode:[eventfd]"})
"""Descriptors that gRPC opens for server and client in one process, and keeps for that process's life."""


@contextmanager
def local_server() -> Iterator[None]:
    """Lets a server of this process start threads and workers and open files; all must be gone after it."""
    global _servers, _had_server
    _had_server = True
    with no_leaks():
        _servers += 1
        try:
            yield
        finally:
            _servers -= 1


def leaked(before: Held) -> list[str]:
    """Resources that are held now and were not before, a line each."""
    now = held()
    # A server that outlives the test may load models in it: what it starts for them is its own.
    kept = {child.pid for child in before.children & now.children}
    children = [child for child in now.children - before.children if _parent(child) not in kept]
    return [
        *(f"thread {thread.name!r}" for thread in now.threads - before.threads if not _of_server(thread)),
        *(f"child process {child}" for child in children if not _servers),
        *(
            f"file descriptor {number}: {target}"
            for number, target in now.descriptors - before.descriptors
            if not (_servers or _is_of_process(target) or (_had_server and target in _GRPC))
        ),
        *(f"model of {model!r}" for model in now.models if not (_servers or model in before.models)),
        *(f"/dev/shm/{name}" for name in made_here(now.shared_memory - before.shared_memory)),
    ]


def _is_of_process(target: str) -> bool:
    """True for the spare descriptor of libuv and the lock of AOTInductor's folder: kept once opened."""
    return target == os.devnull or "/conch-aoti-" in target


def _of_server(thread: threading.Thread) -> bool:
    return _servers > 0 and thread.name.startswith("conch")


def _parent(child: psutil.Process) -> int:
    try:
        return int(child.ppid())
    except psutil.NoSuchProcess:
        return 0


def still_leaked(before: Held, grace_s: float = PATIENCE_S) -> list[str]:
    """As `leaked`, after garbage collection and up to `grace_s` seconds for things to end by themselves."""
    if not (found := leaked(before)):
        return []
    gc.collect()
    deadline = time.monotonic() + grace_s
    for thread in set(threading.enumerate()) - before.threads:
        if not _of_server(thread):
            thread.join(max(0.0, deadline - time.monotonic()))
    never = threading.Event()
    while (found := leaked(before)) and time.monotonic() < deadline:
        never.wait(0.01)
    return found


@contextmanager
def no_leaks(grace_s: float = PATIENCE_S) -> Iterator[None]:
    """Raises AssertionError if the block leaves anything behind."""
    before = held()
    yield
    found = still_leaked(before, grace_s)
    assert not found, "left behind: " + "; ".join(sorted(found))
