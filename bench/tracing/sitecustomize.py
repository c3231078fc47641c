"""Counts bytecodes in every Python process that starts with this folder on its path; see `bench.bytecodes`.

SIGUSR2 begins to count, anew if need be; what runs already then is not counted, what it calls is. SIGUSR1
writes a file into the folder that CONCH_BYTECODES names: a line for each function with its bytecodes, its
calls, the deepest stack of conch's functions at them and its name, and a last line "." when all is written.
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
_depths: dict[CodeType, int] = {}
_OURS = ("/services/conch/", "/control/conch_control/")
_STACKS = 200
"""Calls of each function at which the stack is counted, which takes longer than the rest."""
_counting = threading.Event()


def _depth(frame: FrameType | None) -> int:
    depth = 0
    while frame is not None:
        depth += any(path in frame.f_code.co_filename for path in _OURS)
        frame = frame.f_back
    return depth


def _enter(frame: FrameType, event: str, argument: Any) -> Any:
    if not _counting.is_set():
        return None
    code = frame.f_code
    frame.f_trace_opcodes = True
    frame.f_trace_lines = False
    _calls[code] += 1
    if _calls[code] <= _STACKS:
        _depths[code] = max(_depths.get(code, 0), _depth(frame))

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            _bytecodes[code] += 1
        return count

    return count


def _begin(*_: object) -> None:
    _bytecodes.clear()
    _calls.clear()
    _depths.clear()
    _counting.set()


def _write(*_: object) -> None:
    bytecodes, calls = _bytecodes.copy(), _calls.copy()
    with open(os.path.join(os.environ["CONCH_BYTECODES"], str(os.getpid())), "w") as file:
        for code, count in bytecodes.items():
            print(
                count,
                calls[code],
                _depths.get(code, 0),
                f"{code.co_filename}:{code.co_qualname}",
                sep="\t",
                file=file,
            )
        print(".", file=file)


if "CONCH_BYTECODES" in os.environ:
    signal.signal(signal.SIGUSR1, _write)
    signal.signal(signal.SIGUSR2, _begin)
    threading.settrace(_enter)
    sys.settrace(_enter)
