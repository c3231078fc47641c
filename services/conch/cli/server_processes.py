"""Finds the servers of this user and their workers, by the file that each has open for its stacks."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

from conch.core.process_setup import STACKS_FILE

_PROC = Path("/proc")
_LINK = f"/memfd:{STACKS_FILE} (deleted)"


class ServerProcesses:
    """The processes of all servers, when it was created.

    Attributes:
        servers: Process ids of the servers, in order.
    """

    def __init__(self) -> None:
        pids = {each for each in map(int, filter(str.isdecimal, os.listdir(_PROC))) if stacks_file(each)}
        self._parents = {each: _parent(each, pids) for each in pids}
        self.servers = sorted(each for each, parent in self._parents.items() if parent not in pids)

    def __contains__(self, pid: int) -> bool:
        """True if a process is a server or a worker."""
        return pid in self._parents

    def below(self, pid: int) -> list[int]:
        """The workers of a process."""
        return sorted(each for each in self._parents if pid in self._ancestors(each))

    def _ancestors(self, pid: int) -> list[int]:
        found = []
        while pid in self._parents:
            pid = self._parents[pid]
            found.append(pid)
        return found


def stacks_file(pid: int) -> Path | None:
    """The file for a process's stacks; None if it has none or belongs to another user."""
    try:
        for link in (_PROC / str(pid) / "fd").iterdir():
            if os.readlink(link) == _LINK:
                return link
    except OSError:
        pass
    return None


def command(pid: int) -> list[str]:
    """The command line of a process; empty once it has ended."""
    return _strings(pid, "cmdline")


def environment(pid: int) -> dict[str, str]:
    """The environment with which a process was started; empty once it has ended."""
    return {name: value for name, _, value in (each.partition("=") for each in _strings(pid, "environ"))}


def _strings(pid: int, name: str) -> list[str]:
    try:
        return (_PROC / str(pid) / name).read_text(errors="surrogateescape").split("\0")[:-1]
    except OSError:
        return []


def _parent(pid: int, among: Container[int]) -> int:
    """The nearest ancestor of a process among some, as a worker's template is not; 0 without one."""
    try:
        while pid:
            pid = int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
            if pid in among:
                return pid
    except OSError:
        pass
    return 0
