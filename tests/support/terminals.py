"""A command in a terminal of its own, a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.support.servers import WAIT_S

_ESCAPE = re.compile(r"\x1b\[[?\d;]*[a-zA-Z]")
_HOME = "\x1b[H"


class Terminal:
    """A terminal with a process that leads its session.

    Attributes:
        process: The process.
        output: All that it has written.
    """

    def __init__(
        self, command: Sequence[str], columns: int, lines: int, environment: Mapping[str, str]
    ) -> None:
        self._ours, self._theirs = os.openpty()
        self.output = ""
        self.resize(columns, lines)
        self.modes = self._modes()
        # The terminal that the leader of a session opens first is the session's, which gets its signals.
        opens = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(self._theirs)]
        self.process = subprocess.Popen(
            [*opens, *command],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TERM": "xterm", **environment},
            start_new_session=True,
        )

    def resize(self, columns: int, lines: int) -> None:
        """Gives the terminal another size, and signals its process."""
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Types keys."""
        self.press_bytes(keys.encode())

    def press_bytes(self, keys: bytes) -> None:
        """Types keys of any encoding."""
        os.write(self._ours, keys)

    def signal(self, number: int) -> None:
        """Sends the process a signal."""
        self.process.send_signal(number)

    def frame(self) -> list[str]:
        """The lines that were drawn last, from the top left corner on."""
        self._read(0.0)
        drawn = self.output.rpartition(_HOME)[2]
        return [_ESCAPE.sub("", line).rstrip() for line in drawn.split("\r\n")]

    def wait_for(self, condition: Callable[[list[str]], Any], what: str) -> list[str]:
        """The first frame for which a condition holds."""
        deadline = time.monotonic() + WAIT_S
        while not condition(frame := self.frame()):
            assert time.monotonic() < deadline, f"{what}: not within {WAIT_S} s; {self.output[-2000:]!r}"
            self._read(0.05)
        return frame

    def wait_until_stopped(self) -> None:
        """Waits until the process has been stopped."""
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status
        self._read(0.0)

    def wait(self) -> int:
        """The exit code, once it has ended."""
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end; {self.output[-2000:]!r}"
            self._read(0.05)
        self._read(0.0)
        return self.process.returncode

    def is_restored(self) -> bool:
        """True if the modes are those of the start, and the last screen is the usual one, with a cursor."""
        screen = self.output.rfind("\x1b[?1049l") > self.output.rfind("\x1b[?1049h")
        cursor = self.output.rfind("\x1b[?25h") > self.output.rfind("\x1b[?25l")
        return screen and cursor and self._modes() == self.modes

    def close(self) -> None:
        """Ends the process in any case."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(WAIT_S)
        os.close(self._ours)
        os.close(self._theirs)

    def _modes(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    def _read(self, timeout_s: float) -> None:
        while select.select([self._ours], [], [], timeout_s)[0]:
            self.output += os.read(self._ours, 1 << 16).decode(errors="replace")
            timeout_s = 0.0


@contextmanager
def terminal(
    *command: str, columns: int = 120, lines: int = 30, environment: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """A terminal with a command, until the end of the block."""
    made = Terminal(command, columns, lines, environment or {})
    try:
        yield made
    finally:
        made.close()
