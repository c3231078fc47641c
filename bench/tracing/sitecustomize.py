"""Counts bytecodes in every Python process that starts with this folder on its path; see `bench.bytecodes`.

SIGUSR2 begins to count, anew if need be, and writes `PID.begun` into the folder that CONCH_BYTECODES names;
what runs already then is not counted, what it calls is. SIGUSR1 writes `PID.counts`: a line for each function
with its bytecodes, its calls, the deepest stack of conch's functions at them and its name. A last line "."
says that a file is complete.

Counting slows functions down a hundredfold, a busy machine slows them further. So it lifts the limits of time
at which another thread takes over, or is waited for in another way: what is counted is what runs in time.
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
_LIFTED: dict[str, dict[str, float]] = {
    "conch.ipc.loop": {"_BUDGET_NS": 1 << 60, "_MOST_PAUSE_NS": 1 << 60, "_TICK_S": 3600.0},
    "conch.core.execution.runner": {"FAST_NS": 1 << 60},
    "conch.backends.python.calls.bls_call": {"FIRST_POLL_S": 3600.0},
    "conch.workers.host.host_reader": {"_TICK_S": 3600.0},
}
"""Limits of time, by module."""
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
    for name, limits in _LIFTED.items():
        module = sys.modules.get(name)
        for limit, value in limits.items() if module is not None else ():
            assert hasattr(module, limit), f"{name} has no {limit}"
            setattr(module, limit, value)
    _bytecodes.clear()
    _calls.clear()
    _depths.clear()
    _counting.set()
    _write("begun", [])


def _end(*_: object) -> None:
    bytecodes, calls = _bytecodes.copy(), _calls.copy()
    _write(
        "counts",
        [
            f"{count}\t{calls[code]}\t{_depths.get(code, 0)}\t{code.co_filename}:{code.co_qualname}"
            for code, count in bytecodes.items()
        ],
    )


def _write(kind: str, lines: list[str]) -> None:
    with open(os.path.join(os.environ["CONCH_BYTECODES"], f"{os.getpid()}.{kind}"), "w") as file:
        file.write("\n".join([*lines, ".\n"]))


if "CONCH_BYTECODES" in os.environ:
    signal.signal(signal.SIGUSR1, _end)
    signal.signal(signal.SIGUSR2, _begin)
    threading.settrace(_enter)
    sys.settrace(_enter)
