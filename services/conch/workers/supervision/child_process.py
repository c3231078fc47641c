"""Starts a child process, logs its output, reports its end, kills its process group.

Owns: the process, its pipes, its pidfd.
Threads and locks: starting, reading and reaping run on the monitor's thread; a lock orders
signals and reaping.
Used by: `WorkerProcess` and config completion.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Literal

from conch.core.errors import UnavailableError
from conch.workers.environments import Environment
from conch.workers.supervision.output_capture import Lines, Tail
from conch.workers.supervision.process_monitor import ProcessMonitor

log = logging.getLogger(__name__)
_printed = logging.getLogger("conch.workers.output")

Role = Literal["serve", "complete"]
"""Role of a process: serve batches, or complete a config."""

_PACKAGE = Path(__file__).parents[2]
_UTILS = _PACKAGE.parent / "triton_python_backend_utils.py"
_MAIN = Path(__file__).parents[1] / "host" / "main.py"

_READ_BYTES = 65_536
_MOST_AT_END_BYTES = 1 << 20
"""Most bytes read after the process has ended: its children may still print."""


class ChildProcess:
    """A child process with its output pipes and its process group.

    Args:
        monitor: The thread that starts it.
        name: Name of the instance, for the log.
        command: Program and arguments.
        environment: Complete environment.
        descriptors: Descriptors that it inherits, under the same numbers.
        on_end: Called on the monitor's thread once it has ended and been reaped; must not block.

    Raises:
        UnavailableError: The start failed.
    """

    def __init__(
        self,
        monitor: ProcessMonitor,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._monitor = monitor
        self._name = name
        self._on_end = on_end
        self._lock = threading.Lock()  # orders signals and reaping, so that no reused pid gets a signal
        self._over = threading.Event()
        self._how = ""
        self._tail = Tail()
        try:
            monitor.hold()
            try:
                monitor.run(lambda: self._start(command, environment, descriptors))
            except BaseException:
                monitor.release()
                raise
        except OSError as error:
            raise UnavailableError(f"'{command[0]}' can't be started: {error.strerror}") from error

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> None:
        self._popen = popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=descriptors,
            start_new_session=True,
        )
        self.pid = popen.pid
        self._pidfd = -1
        self._streams: dict[int, _Stream] = {}
        try:
            self._pidfd = os.pidfd_open(popen.pid)
            self._watch(popen)
        except BaseException:
            popen.kill()
            for stream in list(self._streams.values()):
                self._forget(stream)
            popen.communicate()
            if self._pidfd >= 0:
                os.close(self._pidfd)
            raise

    def _watch(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None and popen.stderr is not None, "both are pipes"
        lines = Lines(self._monitor.clock), Lines(self._monitor.clock)
        for stream in (
            _Stream(popen.stdout, logging.INFO, None, lines[0]),
            _Stream(popen.stderr, logging.WARNING, self._tail, lines[1]),
        ):
            fd = stream.file.fileno()
            os.set_blocking(fd, False)
            self._monitor.watch(fd, partial(self._read, stream))
            self._streams[fd] = stream
        self._monitor.watch(self._pidfd, self._ended)

    @property
    def how(self) -> str:
        """How it ended, such as ``killed by signal 9 (SIGKILL)``; empty while it runs."""
        return self._how

    @property
    def errors(self) -> str:
        """The last lines of standard error."""
        return self._tail.text()

    def abort(self) -> None:
        """Sends SIGABRT, so that faulthandler writes its stacks to standard error."""
        with self._lock:
            if not self._how:
                os.kill(self.pid, signal.SIGABRT)

    def kill(self) -> None:
        """Kills the process group; `wait` returns when it has ended."""
        with self._lock:
            if not self._how:
                self._kill_group()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended and been reaped; not on the monitor's thread."""
        return self._over.wait(timeout_s)

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # gone, or owned by another user

    def _read(self, stream: _Stream) -> int:
        """Reads what is available; returns its size, 0 at the end of the stream, -1 if nothing is."""
        try:
            data = os.read(stream.file.fileno(), _READ_BYTES)
        except BlockingIOError:
            return -1
        except OSError:
            data = b""
        if stream.tail is not None:
            stream.tail.add(data)
        for line in stream.lines.feed(data) if data else stream.lines.end():
            _printed.log(stream.level, "%s: %s", self._name, line)
        if not data:
            self._forget(stream)
        return len(data)

    def _forget(self, stream: _Stream) -> None:
        self._monitor.unwatch(stream.file.fileno())
        del self._streams[stream.file.fileno()]
        stream.file.close()

    def _ended(self) -> None:
        with self._lock:
            # Not reaped, so its process group id is still valid.
            self._kill_group()
            status = self._popen.wait()
            self._how = describe_end(status)
        for stream in list(self._streams.values()):
            left = _MOST_AT_END_BYTES
            while left > 0 and (read := self._read(stream)) > 0:
                left -= read
        for stream in list(self._streams.values()):
            for line in stream.lines.end():
                _printed.log(stream.level, "%s: %s", self._name, line)
            self._forget(stream)
        self._monitor.unwatch(self._pidfd)
        os.close(self._pidfd)
        try:
            self._on_end()
        finally:
            self._over.set()
            self._monitor.release()


class _Stream:
    """The server's end of an output pipe; `tail` keeps the last bytes, `lines` splits it for the log."""

    __slots__ = ("file", "level", "lines", "tail")

    def __init__(self, file: IO[bytes], level: int, tail: Tail | None, lines: Lines) -> None:
        self.file = file
        self.level = level
        self.tail = tail
        self.lines = lines


def describe_end(status: int) -> str:
    """How a process ended, by its exit status or minus the number of a signal."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"killed by signal {-status} ({name})"


def start_worker(
    monitor: ProcessMonitor,
    name: str,
    environment: Environment,
    role: Role,
    on_end: Callable[[], None] = lambda: None,
) -> tuple[ChildProcess, socket.socket]:
    """Starts ``host/main.py`` in an environment; returns the process and the server's end of its socket.

    Raises:
        UnavailableError: The start failed.
    """
    kind = socket.SOCK_SEQPACKET if role == "serve" else socket.SOCK_STREAM
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with theirs:
        arguments = [role, theirs.fileno(), _PACKAGE, _UTILS, *environment.paths]
        command = [environment.python, "-X", "faulthandler", _MAIN, *arguments]
        try:
            process = ChildProcess(
                monitor, name, [*map(str, command)], environment.variables, [theirs.fileno()], on_end
            )
        except BaseException:
            ours.close()
            raise
    return process, ours
