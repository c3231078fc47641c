"""`conch dump`: writes the stacks of all threads of a running server and of its workers.

Sends each process the signal `STACKS_SIGNAL`; its handler (`process_setup`) writes the stacks to a memfd,
which this command reads through ``/proc``.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence

from conch.cli.server_processes import ServerProcesses, command, stacks_file
from conch.core.process_setup import STACKS_SIGNAL

DONE, FAILED, USAGE = 0, 1, 2
"""Exit codes."""

_INTERVAL_S = 0.05
_QUIET_INTERVALS = 4
_MOST_S = 10.0


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="conch dump",
        description="Writes the stacks of all threads of a running server and of its workers, also of one "
        "that hangs. It goes on undisturbed. The user must be the server's, or root.",
        epilog="exit codes: 0 done, 1 a process did not answer, 2 no such server, or several to choose from",
        allow_abbrev=False,
    )
    parser.add_argument("pid", type=int, nargs="?", help="the server; by default the only one there is")
    pid: int | None = parser.parse_args(arguments).pid
    processes = ServerProcesses()
    servers = processes.servers
    if pid is None and len(servers) != 1:
        which = ", ".join(f"{each} ({' '.join(command(each))})" for each in servers)
        print(f"conch dump: {f'name one of {which}' if which else 'no server found'}", file=sys.stderr)
        return USAGE
    server = servers[0] if pid is None else pid
    if server not in processes:
        print(f"conch dump: {server} is not a conch server of this user", file=sys.stderr)
        return USAGE
    code = DONE
    for each in (server, *processes.below(server)):
        print(f"== pid {each}: {' '.join(command(each)) or 'ended'}")
        stacks = _stacks(each)
        print(stacks or "no answer\n")
        code = code if stacks else FAILED
    return code


def _stacks(pid: int) -> str:
    """Signals a process and reads its stacks; empty if it writes nothing in time."""
    path = stacks_file(pid)
    if path is None:  # the process has ended
        return ""
    try:
        with path.open("r+b") as file:
            file.truncate(0)
            os.kill(pid, STACKS_SIGNAL)
            never = threading.Event()
            size, quiet, end = 0, 0, time.monotonic() + _MOST_S
            # Nothing marks the end of the stacks: they end when the file stops growing.
            while (not size or quiet < _QUIET_INTERVALS) and time.monotonic() < end:
                never.wait(_INTERVAL_S)
                now = os.fstat(file.fileno()).st_size
                size, quiet = now, quiet + 1 if now == size else 0
            return file.read().decode(errors="replace")
    except OSError:
        return ""
