"""The template process of an environment: imports what workers need, and forks one worker for each request.

The template stays single-threaded and never runs code of models. A request is one packet with JSON and three
descriptors: the worker's socket, its standard output and its standard error. Replies: ``{"pid": N}`` with a
pidfd, or ``{"errno": N}``; later ``{"ended": N, "status": N}``, once the worker is reaped.

If the server is killed, the kernel sends `TEMPLATE_END`: the template kills the groups of its workers, whose
children would stay otherwise, and ends.

Owns: the socket to the server, pidfds of the workers. Threads: the main thread.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Workers find these loaded.
import triton_python_backend_utils  # noqa: F401

from conch.workers.host.completion_role import complete
from conch.workers.host.worker_loop import serve

_ROLES: dict[str, Callable[[int], None]] = {"serve": serve, "complete": complete}
_REQUEST_BYTES = 65_536
_PASSED = 3
_PR_SET_PDEATHSIG = 1
TEMPLATE_END = signal.SIGTERM
_OOM_SCORE = 300
"""Added to a worker's `oom_score_adj`, so that the kernel kills a worker first."""
_MOST_OOM_SCORE = 1000
_ARGUMENTS_START = 48
"""Field of ``/proc/self/stat``; the next one is their end."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a worker, which runs `role` on the socket `descriptor`; `name` is its instance's."""

    role: str
    name: str
    descriptor: int

    def run(self) -> None:
        """Runs the role."""
        _ROLES[self.role](self.descriptor)


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Makes the kernel send this process a signal when the thread that started it ends.

    Without `parent`, an end before the call must be noticed otherwise, as by the end of a socket.

    Raises:
        OSError: The kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number) != 0:
        refusal = ctypes.get_errno()
        raise OSError(refusal, os.strerror(refusal))
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class Template:
    """Forks workers on request and reports their ends.

    Args:
        descriptor: The socket to the server.
    """

    def __init__(self, descriptor: int) -> None:
        self._server = socket.socket(fileno=descriptor)
        self._server.set_inheritable(False)
        self._workers: dict[int, int] = {}  # pids by pidfd
        self._poll = select.poll()
        self._poll.register(self._server, select.POLLIN)

    def run(self) -> Request | None:
        """Forks until the server closes the socket; in a worker, returns its request at once."""
        # Output left in buffers would be written by every worker.
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(TEMPLATE_END, self._end)
        gc.collect()
        gc.freeze()  # collections in workers leave these pages shared
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._workers:
                    self._reap(fd)
                    continue
                data, passed, _, _ = socket.recv_fds(
                    self._server, _REQUEST_BYTES, _PASSED, socket.MSG_CMSG_CLOEXEC
                )
                if not data:
                    return None
                request = self._fork(data, passed)
                if request is not None:
                    return request

    def _fork(self, data: bytes, passed: list[int]) -> Request | None:
        """Forks a worker and replies; in the worker, returns its request."""
        parent = os.getpid()
        try:
            if len(passed) < _PASSED:  # this process has no descriptors left
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            pid = os.fork()
            if pid:
                self._forked(pid)
        except OSError as error:
            pid = -1
            self._reply({"errno": error.errno or errno.EAGAIN})
        if not pid:
            return self._begin(parent, data, passed)
        for each in passed:
            os.close(each)
        return None

    def _forked(self, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._workers[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)
        socket.send_fds(self._server, [json.dumps({"pid": pid}).encode()], [pidfd])

    def _reap(self, pidfd: int) -> None:
        """Ends the process group of a worker that has ended, then reaps and reports it."""
        pid = self._workers[pidfd]
        _kill_group(pid)
        del self._workers[pidfd]  # before it is reaped: `_end` kills those that are there
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._reply({"ended": pid, "status": os.waitstatus_to_exitcode(status)})

    def _end(self, number: int, frame: object) -> None:
        """Ends by the signal, after the workers with their groups."""
        for pid in self._workers.values():
            _kill_group(pid)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _reply(self, fields: dict[str, int]) -> None:
        self._server.send(json.dumps(fields).encode())

    def _begin(self, parent: int, data: bytes, passed: list[int]) -> Request:
        """Makes a forked process a worker: its own session, output and random numbers, nothing inherited."""
        descriptor, output, errors = passed
        os.dup2(output, 1)
        os.dup2(errors, 2)
        signal.signal(TEMPLATE_END, signal.SIG_DFL)
        end_with_parent(signal.SIGKILL, parent)
        os.setsid()
        _rank_before_server()
        os.close(output)
        os.close(errors)
        self._server.close()
        for each in self._workers:
            os.close(each)
        # `random` does so itself; older versions of numpy load their generator at once.
        numbers = sys.modules.get("numpy.random")
        if numbers is not None:
            numbers.seed()
        fields = json.loads(data)
        _set_title(f"conch worker {fields['name']}")
        return Request(fields["role"], fields["name"], descriptor)


def _kill_group(pid: int) -> None:
    """Kills a worker, which must not be reaped, and all processes of its group."""
    with suppress(ProcessLookupError, PermissionError):  # ended, or owned by another user
        os.killpg(pid, signal.SIGKILL)


def _rank_before_server() -> None:
    """Has the kernel end this process, not the server, where memory runs out; see proc(5)."""
    with suppress(OSError, ValueError):
        file = Path("/proc/self/oom_score_adj")
        file.write_text(str(min(int(file.read_text()) + _OOM_SCORE, _MOST_OOM_SCORE)))


def _set_title(title: str) -> None:
    """Writes what `ps` shows as the command line, cut to the room that the template's arguments take."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = (int(each) for each in fields[_ARGUMENTS_START - 3 :][:2])
        room = end - start
        if start and room > 0:
            ctypes.memmove(start, title.encode()[: room - 1].ljust(room, b"\0"), room)
