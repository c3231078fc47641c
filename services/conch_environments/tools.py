"""Runs the tools that make environments; their output goes to the log and, on failure, into the error.

Threads and locks: runs on the caller's thread; a tool is one process group, killed as a whole.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import InternalError, UnavailableError
from conch.core.model_control import LoadCancelled, never

log = logging.getLogger(__name__)

_LOG_EVERY_NS = 1_000_000_000
_TAIL_LINES = 20
_POLL_S = 0.2
_LONGEST_LINE = 1000
_READ_BYTES = 65_536
_MOST_AT_END_BYTES = 1 << 20
"""Most bytes read after a tool has ended: its children may still print."""

# A tool must end if the server is killed. PR_SET_PDEATHSIG does that, but setting it between fork and exec
# is safe only in a process without threads: hence this small process. It also restores the signals that
# Python ignores, which the tool would inherit.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, 9)
for number in signal.SIGPIPE, signal.SIGXFSZ:
    signal.signal(number, signal.SIG_DFL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Output:
    """Output of a tool: all at DEBUG, a line per second at INFO; keeps the last lines for an error."""

    def __init__(self, label: str, clock: Clock = monotonic_ns) -> None:
        self._label = label
        self._clock = clock
        self._next_ns = 0
        self._rest = b""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

    def add(self, data: bytes) -> None:
        """Adds a chunk."""
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._line(line)

    def end(self) -> None:
        """Adds the last, unterminated line."""
        self._line(self._rest)
        self._rest = b""

    @property
    def tail(self) -> str:
        """Last lines."""
        return "\n".join(self._tail)

    def _line(self, line: bytes) -> None:
        text = line[:_LONGEST_LINE].decode(errors="backslashreplace").rstrip()
        if not text:
            return
        self._tail.append(text)
        now = self._clock()
        level = logging.DEBUG
        if now >= self._next_ns:
            self._next_ns = now + _LOG_EVERY_NS
            level = logging.INFO
        log.log(level, "%s: %s", self._label, text)


def run_tool(
    command: Sequence[str],
    label: str,
    folder: Path,
    variables: Mapping[str, str],
    lock: int | None = None,
    stopped: LoadCancelled = never,
) -> None:
    """Runs a tool to its end, in working directory `folder` with exactly these variables.

    The tool and its children inherit descriptor `lock`, and are killed once `stopped` returns True.

    Raises:
        InternalError: The tool failed; the text has its last lines.
        UnavailableError: The load was stopped.
    """
    log.debug("%s: runs %s", label, command)
    output = Output(label)
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _LAUNCHER, str(os.getpid()), *command],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=() if lock is None else (lock,),
    )
    with process:
        with ExitStack() as undo:
            undo.callback(kill_group, process.pid)
            _drain(process, output, label, stopped)
            undo.pop_all()
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT).si_status:  # type: ignore[union-attr]
            kill_group(process.pid)  # nothing may write into a folder that will be cleared
        code = process.wait()
    output.end()
    if code:
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise InternalError(f"{label}: {' '.join(command)} {ended}:\n{output.tail}")


def _drain(process: subprocess.Popen[bytes], output: Output, label: str, stopped: LoadCancelled) -> None:
    """Reads output until the tool ends; it is not reaped, so its process group stays valid."""
    assert process.stdout is not None, "it is a pipe"
    stream = process.stdout.fileno()
    end = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        for each in (stream, end):
            poll.register(each, select.POLLIN)
        left = _MOST_AT_END_BYTES
        while left > 0:
            if stopped():
                raise UnavailableError(f"{label}: the load was stopped while its environment was made")
            ready = {each for each, _ in poll.poll(_POLL_S * 1000)}
            if stream in ready:
                data = os.read(stream, _READ_BYTES)
                if not data:
                    poll.unregister(stream)  # only the exit is awaited now
                output.add(data)
                left -= len(data) if end in ready else 0
            elif end in ready:
                break
    finally:
        os.close(end)


def ends_within(pid: int, seconds: float) -> bool:
    """True if a child ends in time; does not reap it."""
    end = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(end, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(end)


def kill_group(pid: int) -> None:
    """Kills the process group of a child that is not reaped."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # ended, or owned by another user
