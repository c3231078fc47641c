"""Counts bytecodes in every Python process that starts with this folder on its path; see `bench.bytecodes`.

SIGUSR2 begins to count, anew if need be; what runs already then is not counted, what it calls is. SIGUSR1
writes a file into the folder that CONCH_BYTECODES names: a line for each function with its bytecodes, its
calls and its name, and a last line "." when all is written.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from types import CodeType, FrameType
from typing import Any

_bytecodes: Counter[CodeType] = Counter()
_calls: Counter[CodeType] = Counter()
_counting = threading.Event()


def _enter(frame: FrameType, event: str, argument: Any) -> Any:
    if not _counting.is_set():
        return None
    code = frame.f_code
    frame.f_trace_opcodes = True
    frame.f_trace_lines = False
    _calls[code] += 1

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            _bytecodes[code] += 1
        return count

    return count


def _begin(*_: object) -> None:
    _bytecodes.clear()
    _calls.clear()
    _counting.set()


def _write(*_: object) -> None:
    bytecodes, calls = _bytecodes.copy(), _calls.copy()
    with open(os.path.join(os.environ["CONCH_BYTECODES"], str(os.getpid())), "w") as file:
        for code, count in bytecodes.items():
            print(count, calls[code], f"{code.co_filename}:{code.co_qualname}", sep="\t", file=file)
        print(".", file=file)


if "CONCH_BYTECODES" in os.environ:
    signal.signal(signal.SIGUSR1, _write)
    signal.signal(signal.SIGUSR2, _begin)
    threading.settrace(_enter)
    sys.settrace(_enter)
