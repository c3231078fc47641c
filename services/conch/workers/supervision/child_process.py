"""Has a worker process forked, logs its output, reports its end, kills its process group.

Owns: the output pipes and the pidfd of the process; its template reaps it.
Threads and locks: starting, reading and ending run on the monitor's thread; a lock orders signals and the
end.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from conch.core.errors import UnavailableError
from conch.workers.environment import Environment
from conch.workers.supervision.fork_server import ForkServer, Request, Role, fork_server_of
from conch.workers.supervision.output_pipes import OutputPipes
from conch.workers.supervision.process_monitor import ProcessMonitor

_START_S = 120.0
"""Timeout of the fork; a template may have to start first."""

_PIDFD_SIGNAL_PROCESS_GROUP = 4
"""Since Linux 6.9."""


class ChildProcess:
    """A worker process with its output pipes and its process group.

    Args:
        monitor: The thread that all workers share.
        name: Name of the instance, for the log.
        environment: Interpreter, variables and packages of its template.
        role: ``serve`` for a model's worker, ``complete`` to complete a config.
        descriptor: Its end of the socket; stays the caller's.
        on_end: Called on the monitor's thread once it has ended and been reaped; must not block.

    Raises:
        UnavailableError: The start failed.
    """

    def __init__(
        self,
        monitor: ProcessMonitor,
        name: str,
        environment: Environment,
        role: Role,
        descriptor: int,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.pid = 0
        self._monitor = monitor
        self._on_end = on_end
        self._lock = threading.Lock()  # orders signals and the end, after which the pidfd is closed
        self._replied = threading.Event()
        self._over = threading.Event()
        self._error: OSError | UnavailableError | None = None
        self._given_up = False
        self._how = ""
        self._pidfd = -1
        self._output = OutputPipes(monitor, name)
        try:
            with ExitStack() as undo:
                monitor.hold()
                undo.callback(monitor.release)
                server = monitor.run(partial(self._start, environment, role, descriptor))
                undo.pop_all()
            self._await_fork(server)
        except OSError as error:
            raise UnavailableError(f"'{environment.python}' can't be started: {error.strerror}") from error

    def _start(self, environment: Environment, role: Role, descriptor: int) -> ForkServer:
        with ExitStack() as unsent:
            theirs = os.dup(descriptor)
            unsent.callback(os.close, theirs)
            output, errors = self._output.open()
            unsent.callback(self._output.finish)
            unsent.callback(os.close, output)
            unsent.callback(os.close, errors)
            server = fork_server_of(self._monitor, environment)
            unsent.pop_all()
        server.fork(Request(self, role, (theirs, output, errors)))
        return server

    def _await_fork(self, server: ForkServer) -> None:
        if not self._replied.wait(_START_S):
            with self._lock:
                self._given_up = not self._replied.is_set()
            if self._given_up:
                self._monitor.call(server.give_up)
                raise OSError(0, f"its template has not forked a worker within {_START_S:g} s")
        if self._error is not None:
            raise self._error

    @property
    def how(self) -> str:
        """Description of its end, such as ``killed by signal 9 (SIGKILL)``; empty while it runs."""
        return self._how

    @property
    def errors(self) -> str:
        """The last lines of standard error."""
        return self._output.errors

    def abort(self) -> None:
        """Sends SIGABRT, so that faulthandler writes its stacks to standard error."""
        self._signal(signal.SIGABRT)

    def kill(self) -> None:
        """Kills it, and its template the rest of its process group; `wait` returns when that is done."""
        self._signal(signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended and been reaped; not on the monitor's thread."""
        return self._over.wait(timeout_s)

    def _signal(self, number: signal.Signals, flags: int = 0) -> None:
        with self._lock:
            if not self._how:
                # It may have ended, or belong to another user.
                with suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(self._pidfd, number, None, flags)

    # --- called by the fork server -------------------------------------------------------------------------

    def forked(self, pid: int, pidfd: int) -> None:
        """See `Forked`."""
        with self._lock:
            self.pid, self._pidfd = pid, pidfd
            self._replied.set()
        if self._given_up:
            self.kill()

    def failed(self, error: OSError | UnavailableError) -> None:
        """See `Forked`."""
        self._error = error
        self._output.finish()
        self._replied.set()
        self._monitor.release()

    def orphaned(self, how: str) -> None:
        """See `Forked`; the kernel kills the process, and its new parent reaps it."""
        self.kill()
        with suppress(OSError):  # older kernels have no such flag: its children live on
            self._signal(signal.SIGKILL, _PIDFD_SIGNAL_PROCESS_GROUP)
        pidfd = self._pidfd

        def gone() -> None:
            self._monitor.unwatch(pidfd)
            self.ended(how)

        try:
            self._monitor.watch(pidfd, gone)
        except OSError:
            self.ended(how)

    def ended(self, how: str) -> None:
        """See `Forked`."""
        with self._lock:
            self._how = how
            os.close(self._pidfd)
        self._output.finish()
        try:
            self._on_end()
        finally:
            self._over.set()
            self._monitor.release()


def start_worker(
    monitor: ProcessMonitor,
    name: str,
    environment: Environment,
    role: Role,
    on_end: Callable[[], None] = lambda: None,
) -> tuple[ChildProcess, socket.socket]:
    """Starts a worker in an environment; returns the process and the server's end of its socket.

    Raises:
        UnavailableError: The start failed.
    """
    kind = socket.SOCK_SEQPACKET if role == "serve" else socket.SOCK_STREAM
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with theirs, ExitStack() as undo:
        undo.callback(ours.close)
        process = ChildProcess(monitor, name, environment, role, theirs.fileno(), on_end)
        undo.pop_all()
    return process, ours
