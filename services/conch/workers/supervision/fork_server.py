"""Has a template process fork workers: one template for each environment, while workers of it run.

A template starts with the first worker of its environment and ends shortly after the last one. It reaps the
workers and reports their ends; if it dies, the kernel kills them, and the next start begins a new template.
One request is with the template at a time; others wait here.

Owns: the template process, its socket and pidfd. Threads and locks: all on the monitor's thread.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import subprocess
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from conch.backends.python.runtime.model_adapters import installed_adapters
from conch.core.errors import UnavailableError
from conch.workers.environment import Environment
from conch.workers.supervision.crash_report import crashed, sentence
from conch.workers.supervision.output_pipes import OutputPipes
from conch.workers.supervision.process_monitor import ProcessMonitor, Timer

log = logging.getLogger(__name__)

Role = Literal["serve", "complete"]
"""Role of a worker: serve batches, or complete a config."""

_PACKAGE = Path(__file__).parents[2]
_UTILS = _PACKAGE.parent / "triton_python_backend_utils.py"
_MAIN = Path(__file__).parents[1] / "host" / "main.py"

_LINGER_NS = 300_000_000
"""Time that a template without workers waits for the next one, as between a completed config and its load."""

_END_NS = 2_000_000_000
"""Time after the end of its socket at which a template is killed."""

_REPLY_BYTES = 4_096


class Forked(Protocol):
    """Receives the result of a request, on the monitor's thread; must not block."""

    name: str

    def forked(self, pid: int, pidfd: int) -> None:
        """The process runs; the pidfd is the receiver's."""

    def failed(self, error: OSError | UnavailableError) -> None:
        """There is no process."""

    def ended(self, how: str) -> None:
        """The process has ended and been reaped, and its process group has been killed."""

    def orphaned(self, how: str) -> None:
        """The template has died, and so the process ends."""


@dataclass(frozen=True, slots=True)
class Request:
    """A worker to fork; the descriptors are its socket, standard output and standard error."""

    child: Forked
    role: Role
    descriptors: tuple[int, int, int]


def fork_server_of(monitor: ProcessMonitor, environment: Environment) -> ForkServer:
    """The fork server of an environment; starts it if there is none.

    Raises:
        OSError: The start failed.
    """
    key = environment.python, environment.paths, frozenset(environment.variables.items())
    found: ForkServer | None = monitor.fork_servers.get(key)
    if found is None:
        found = monitor.fork_servers[key] = ForkServer(monitor, environment, key)
    return found


class ForkServer:
    """The template of one environment; made by `fork_server_of`."""

    def __init__(self, monitor: ProcessMonitor, environment: Environment, key: object) -> None:
        self._monitor = monitor
        self._label = environment.label
        self._key = key
        self._children: dict[int, Forked] = {}
        self._waiting: deque[Request] = deque()
        self._asked: Request | None = None
        self._linger: Timer | None = None
        self._over = False  # the template does not read any more
        self._output = OutputPipes(monitor, f"template of workers in {environment.label}")
        self._pidfd = -1
        with ExitStack() as undo:
            monitor.hold()
            undo.callback(monitor.release)
            self._start(environment)
            undo.pop_all()

    def _start(self, environment: Environment) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as undo:
            undo.callback(self._socket.close)
            self._socket.setblocking(False)
            with theirs:
                self._popen = self._opened(environment, theirs)
            undo.callback(self._output.finish)
            undo.callback(self._popen.wait)
            undo.callback(self._popen.kill)
            self._pidfd = os.pidfd_open(self._popen.pid)
            undo.callback(os.close, self._pidfd)
            self._monitor.watch(self._socket.fileno(), self._read)
            undo.callback(self._monitor.unwatch, self._socket.fileno())
            self._monitor.watch(self._pidfd, self._ended)
            undo.pop_all()

    def _opened(self, environment: Environment, theirs: socket.socket) -> subprocess.Popen[bytes]:
        arguments = [theirs.fileno(), _PACKAGE, _UTILS, json.dumps(installed_adapters()), *environment.paths]
        output, errors = self._output.open()
        with ExitStack() as undo:
            undo.callback(self._output.finish)
            try:
                process = subprocess.Popen(
                    [str(each) for each in (environment.python, "-X", "faulthandler", _MAIN, *arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    env=environment.variables,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            finally:
                os.close(output)
                os.close(errors)
            undo.pop_all()
        return process

    def fork(self, request: Request) -> None:
        """Has a worker forked; its `Forked` is called. The descriptors are closed once they are sent."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        self._waiting.append(request)
        self._send_next()

    def give_up(self) -> None:
        """Kills a template that does not answer, unless it has workers."""
        if not self._children:
            self._popen.kill()

    def _send_next(self) -> None:
        while self._asked is None and self._waiting and not self._over:
            request = self._waiting[0]
            data = json.dumps({"role": request.role, "name": request.child.name}).encode()
            try:
                socket.send_fds(self._socket, [data], request.descriptors)
            except ConnectionError:
                return  # it has died, and its end fails what waits
            except OSError as error:
                request.child.failed(error)
            else:
                self._asked = request
            self._waiting.popleft()
            _close(request)
        if not (self._children or self._asked or self._linger or self._over):
            self._linger = self._monitor.at(self._monitor.clock() + _LINGER_NS, self._expire)

    def _read(self) -> None:
        """Handles the replies that have arrived."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, _REPLY_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._stop_reading()  # the pidfd reports the end, which must come
                self._monitor.at(self._monitor.clock() + _END_NS, self._popen.kill)
                return
            fields: dict[str, int] = json.loads(data)
            if "ended" in fields:
                child = self._children.pop(fields["ended"], None)
                if child is not None:
                    child.ended(describe_end(fields["status"]))
            else:
                self._replied(fields, fds)
            self._send_next()

    def _replied(self, fields: dict[str, int], fds: list[int]) -> None:
        request, self._asked = self._asked, None
        assert request is not None, "the template replies once to each request"
        if fds:
            self._children[fields["pid"]] = request.child
            request.child.forked(fields["pid"], fds[0])
            return
        # Without a pidfd this process has no descriptors left; the worker ends with its socket.
        number = fields.get("errno", errno.EMFILE)
        request.child.failed(OSError(number, os.strerror(number)))

    def _expire(self) -> None:
        """Ends the template, which has had no worker for a while."""
        self._forget()
        self._popen.kill()

    def _stop_reading(self) -> None:
        if not self._over:
            self._over = True
            self._monitor.unwatch(self._socket.fileno())
            self._forget()

    def _forget(self) -> None:
        if self._monitor.fork_servers.get(self._key) is self:
            del self._monitor.fork_servers[self._key]

    def _ended(self) -> None:
        self._forget()
        self._monitor.unwatch(self._pidfd)
        os.close(self._pidfd)
        status = self._popen.wait()
        if not self._over:
            self._read()
        self._stop_reading()
        self._socket.close()
        self._output.finish()
        if self._linger is not None:
            self._linger.cancel()
        how = describe_end(status)
        requests = [*([] if self._asked is None else [self._asked]), *self._waiting]
        if self._children:
            log.error(
                "the template (pid %d) of %d workers in %s ended, and they with it: %s",
                *(self._popen.pid, len(self._children), self._label, sentence(how)),
            )
        for request in requests:
            if request is not self._asked:
                _close(request)
            request.child.failed(crashed(request.child.name, sentence(how), self._output.errors))
        for child in self._children.values():
            was = "was " if how.startswith("killed") else ""
            child.orphaned(f"killed with its template, which {was}{how}")
        self._monitor.release()


def _close(request: Request) -> None:
    for each in request.descriptors:
        os.close(each)


def describe_end(status: int) -> str:
    """Describes the end of a process by its exit status, or minus the number of a signal."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"killed by signal {-status} ({name})"
