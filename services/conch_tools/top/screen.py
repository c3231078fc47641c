"""The terminal while `conch top` has it: another screen, no cursor, keys without echo."""

from __future__ import annotations

import os
import select
import signal
import socket
import termios
import tty
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Ended(Exception):
    """A signal asks the process to end, or the terminal was closed.

    Attributes:
        code: The exit code.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


class Screen:
    """The terminal, given back as it was when the block ends, also by a signal; of the main thread.

    Ctrl-Z stops the process with the terminal as it was, too.
    """

    def __init__(self, keys: int, out: int) -> None:
        self._keys = keys
        self._out = out
        self._modes: list[Any] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._woken, self._wakes = socket.socketpair()
        self._wakeup_fd = -1

    def __enter__(self) -> Screen:
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self._modes = termios.tcgetattr(self._keys)
        handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
            signal.SIGWINCH: lambda number, frame: None,
            signal.SIGTSTP: lambda number, frame: self._stop(),
            **dict.fromkeys(_ENDING, _end),
        }
        self._wakeup_fd = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.getsignal(number) for number in (*handlers, signal.SIGINT)}
        try:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._take()
        except BaseException:
            self._give_back()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()

    def show(self, lines: Sequence[str], marked: int) -> None:
        """Draws lines from the top, the one of this number in reverse."""
        drawn = [f"\x1b[7m{line}\x1b[0m" if at == marked else line for at, line in enumerate(lines)]
        self._write("\x1b[H" + "\x1b[K\n".join(drawn) + "\x1b[K\x1b[J")

    def size(self) -> os.terminal_size:
        """Columns and lines of the terminal."""
        try:
            found = os.get_terminal_size(self._out)
        except OSError:
            raise Ended(0) from None
        return found if found.columns and found.lines else os.terminal_size((80, 24))

    def wait(self, other: socket.socket) -> str:
        """Waits for keys, for a signal or for `other` to be readable; returns the keys."""
        watched: list[int | socket.socket] = [self._keys, self._woken, other]
        ready, _, _ = select.select(watched, [], [])
        for each in ready:
            if isinstance(each, socket.socket):
                with suppress(BlockingIOError):
                    if not each.recv(4096):
                        raise Ended(1)  # the thread behind `other` has failed
        if self._keys not in ready:
            return ""
        try:
            keys = os.read(self._keys, 64)
        except OSError:
            keys = b""
        if not keys:
            raise Ended(0)  # the terminal is closed
        return keys.decode("ascii", "replace")

    def _stop(self) -> None:
        self._restore_modes()
        signal.raise_signal(signal.SIGSTOP)
        self._take()

    def _take(self) -> None:
        tty.setcbreak(self._keys)
        self._write(_ENTER)

    def _give_back(self) -> None:
        # A signal that comes now must not keep the terminal from being restored.
        for number in (*_ENDING, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        self._restore_modes()
        signal.set_wakeup_fd(self._wakeup_fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._woken.close()
        self._wakes.close()

    def _restore_modes(self) -> None:
        with suppress(OSError, Ended):
            self._write(_LEAVE)
        with suppress(termios.error):
            termios.tcsetattr(self._keys, termios.TCSAFLUSH, self._modes)

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except OSError:
            raise Ended(0) from None


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended(128 + number)
