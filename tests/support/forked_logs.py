"""A process that forks while another thread is inside a log handler; its child logs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PROGRAM = """
import logging
import os
import signal
import sys
import threading

{setup}
inside, leave = threading.Event(), threading.Event()

assert handler.lock  # logging enters it from Python 3.13 on without asking for its presence

def hold():
    with handler.lock:
        inside.set()
        leave.wait()

thread = threading.Thread(target=hold)
thread.start()
inside.wait()
child = os.fork()
if not child:
    code = 1
    try:
        signal.alarm(100)  # ends a child that waits for the lock
        logging.getLogger("conch.forked").warning("from the child")
        code = 0 if {logged} else 2
    finally:
        os._exit(code)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
leave.set()
thread.join()
{teardown}
sys.exit(status)
"""


def log_in_a_fork(setup: str, logged: str, teardown: str = "", argument: str = "") -> int:
    """Exit status of the child: 0 if `logged` is true there once it has logged.

    `setup` makes the `handler` and adds it to loggers; it has `argument` in ``sys.argv``.
    """
    program = _PROGRAM.format(setup=setup, logged=logged, teardown=teardown)
    done = subprocess.run([sys.executable, "-c", program, argument], check=False, timeout=300, cwd=_ROOT)
    return done.returncode
