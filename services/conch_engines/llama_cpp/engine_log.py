"""Keeps what the engine writes to standard error while it loads: its exceptions do not say why.

The engine writes on a thread of its own, which may come to it after the exception.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from conch.core.errors import InvalidArgumentError

_STANDARD_ERROR = 2
_LINES = 8
_CHUNK = 4096
_LATE_S, _BETWEEN_S = 5.0, 0.2
"""Time after a failure for the first line, and for each further one."""
_STAMP = re.compile(r"^[\d.]+ [A-Z] ")


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Loads in the block. Standard error passes through, also if the process aborts.

    Raises:
        InvalidArgumentError: The load failed; the text has the engine's last lines.
    """
    kept: deque[str] = deque(maxlen=_LINES)
    real = os.dup(_STANDARD_ERROR)
    source, sink = os.pipe()
    os.dup2(sink, _STANDARD_ERROR)
    os.close(sink)
    come = threading.Event()
    reader = threading.Thread(target=_pass_on, args=(source, real, kept, come), name="conch-llama-log")
    reader.start()
    try:
        try:
            yield
        except RuntimeError:
            limit_s = _BETWEEN_S if kept else _LATE_S
            while come.wait(limit_s):
                come.clear()
                limit_s = _BETWEEN_S
            raise
        finally:
            os.dup2(real, _STANDARD_ERROR)  # closes the pipe, which ends the reader
            reader.join()
            os.close(source)
            os.close(real)
    except RuntimeError as error:
        said = "; ".join(kept) or str(error)
        raise InvalidArgumentError(f"the engine can't load {what}: {said}") from None


def _pass_on(source: int, real: int, kept: deque[str], come: threading.Event) -> None:
    rest = b""
    while chunk := os.read(source, _CHUNK):
        os.write(real, chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        kept.extend(_STAMP.sub("", line.decode(errors="replace")) for line in lines if line.strip())
        rest = rest[-_CHUNK:]
        come.set()
