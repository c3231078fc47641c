"""What helps when a start fails: a hint for a cause, as far as it is known."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_HINTS = (
    (
        re.compile(r"No module named '([^'.]+)"),
        "name the package of '{0}' in a requirements.txt beside the model's config.pbtxt, and conch installs "
        "it for this model (docs/python-models.md, Environments); or install it where conch runs",
    ),
)
_LISTENS = "0A"  # TCP_LISTEN in /proc/net/tcp
_SHOWN = 120


def hint_for(reason: str) -> str:
    """What to do about the reason of a failed load; empty if that is not known."""
    for pattern, hint in _HINTS:
        found = pattern.search(reason)
        if found:
            return hint.format(*filter(None, found.groups()))
    return ""


def cause_line(name: str, reason: str) -> str:
    """The cause of a failed load on one line, with the hint that helps."""
    text = reason.removeprefix(f"load failed for model '{name}': ").replace(" is at UNAVAILABLE state", "")
    text = " ".join(text.partition("\n\nAt:\n")[0].split()).rstrip(";")  # the log has the traceback
    hint = hint_for(reason)
    return f"failed to load '{name}': {text}" + (f" (hint: {hint})" if hint else "")


def repository_hint(location: str) -> str:
    """Says so if a directory that is given as a repository is a model, or a version of one; else empty."""
    path = Path(location).absolute()
    try:
        if _is_version(path):
            model = path.parent
        elif (path / "config.pbtxt").is_file() or any(map(_is_version, path.iterdir())):
            model = path
        else:
            return ""
    except OSError:
        return ""
    return f"'{location}' is a model, not a repository: name its parent, --model-repository={model.parent}"


def _is_version(path: Path) -> bool:
    return path.name.isdecimal() and path.is_dir() and any(path.glob("model.*"))


def listener_of(port: int) -> str:
    """The process that listens on a TCP port, such as ``pid 12 (nginx)``; empty if it can't be told."""
    try:
        sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
        for process in Path("/proc").iterdir():
            if process.name.isdecimal() and sockets and _holds(process, sockets):
                command = (
                    (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
                )
                return f"pid {process.name} ({command[:_SHOWN]})"
    except OSError:  # the process has ended meanwhile
        pass
    return ""


def _listening_inodes(port: int) -> Iterable[str]:
    for name in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", name).read_text().splitlines()[1:]
        except OSError:  # without IPv6
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _holds(process: Path, sockets: set[str]) -> bool:
    try:
        return any(os.readlink(each) in sockets for each in (process / "fd").iterdir())
    except OSError:  # it belongs to another user, or has ended
        return False
