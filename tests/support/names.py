"""Whose the names in /dev/shm are: all processes of a machine share that directory, also other test runs."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

DIRECTORY = Path("/dev/shm")

_RUN = "CONCH_TEST_RUN"
_numbers = itertools.count()
_MARKED = re.compile(r"test-(\d+)-(\d+)-")


def new_name() -> str:
    """A name that says which run, and which process of it, has made it."""
    # In the environment, so that what children make is known as this run's after they have ended.
    run = os.environ.setdefault(_RUN, str(os.getpid()))
    return f"test-{run}-{os.getpid()}-{next(_numbers)}"


def made_here(names: Iterable[str], pid: int | None = None) -> set[str]:
    """Those of some names that a process or a child of it has made, as far as can be told.

    These are names that it has open or mapped, and those with its run's mark. Other programs of the machine
    make and drop names too, so a name that no process has open and that has no mark is not counted.

    Args:
        names: The names.
        pid: The process; this one, unless given.
    """
    doubtful = set(names)
    if not doubtful:
        return set()
    family = _family(os.getpid() if pid is None else pid)
    used = {name for each in family for name in _used(each)}
    return {name for name in doubtful if name in used or _is_marked(name, family)}


def _is_marked(name: str, family: set[int]) -> bool:
    """True for a mark of this run and of a process of the family, or of one that has ended."""
    found = _MARKED.match(name)
    if found is None or found[1] != os.environ.get(_RUN, found[1]):
        return False
    pid = int(found[2])
    return pid in family or not Path(f"/proc/{pid}").exists()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _family(pid: int) -> set[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for each in _pids():
        try:
            stat = Path(f"/proc/{each}/stat").read_text()
        except OSError:
            continue  # it has just ended
        # Behind the command's name, which may have any character in it.
        children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(each)
    family: set[int] = set()
    left = [pid]
    while left:
        family.add(each := left.pop())
        left += children.get(each, ())
    return family


def _used(pid: int) -> set[str]:
    """The names in the directory that a process has open or mapped; none where it may not be looked at."""
    start = f"{DIRECTORY}/"
    return {path.removeprefix(start).partition("/")[0] for path in _files(pid) if path.startswith(start)}


def _files(pid: int) -> Iterator[str]:
    with suppress(OSError):  # it has ended, or is another user's
        maps = os.fsdecode(Path(f"/proc/{pid}/maps").read_bytes())
        yield from (fields[5] for line in maps.splitlines() if len(fields := line.split(None, 5)) == 6)
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # it has just been closed
                yield os.readlink(f"/proc/{pid}/fd/{name}")
