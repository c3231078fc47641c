"""Diagnostics: hints for failed loads, addresses that are taken, progress of slow loads.

Threads: `conch-slow-loads` reports loads that take long.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from conch.core.clock import wall_seconds
from conch.core.errors import UnavailableError
from conch.frontends.connections.listener import tcp_sockets
from conch_control.agent_api import ModelStatus, VersionStatus
from conch_control.lifecycle.version_states import UNFINISHED
from conch_control.version_phase import Phase

log = logging.getLogger(__name__)

_HINTS = (
    (
        re.compile(r"No module named '([^'.]+)"),
        "name the package of '{0}' in a requirements.txt beside the model's config.pbtxt, and conch installs "
        "it for this model (docs/python-models.md, Environments); or install it where conch runs",
    ),
)
_LISTENS = "0A"  # TCP_LISTEN in /proc/net/tcp
_SHOWN = 120
_INTERVAL_S = 2.0
_ACTIVITIES = {
    Phase.STAGING: "its files are fetched",
    Phase.LOADING: "its environment, backend and instances are made",
    Phase.WARMING: "its warm-up samples run",
}


def hint_for(reason: str) -> str:
    """The remedy for the reason of a failed load; empty if unknown."""
    for pattern, hint in _HINTS:
        found = pattern.search(reason)
        if found:
            return hint.format(*filter(None, found.groups()))
    return ""


def cause_line(name: str, reason: str) -> str:
    """The cause of a failed load on one line, with its hint."""
    text = reason.removeprefix(f"load failed for model '{name}': ").replace(" is at UNAVAILABLE state", "")
    text = " ".join(text.partition("\n\nAt:\n")[0].split()).rstrip(";")  # the log has the traceback
    hint = hint_for(reason)
    return f"failed to load '{name}': {text}" + (f" (hint: {hint})" if hint else "")


def repository_hint(location: str) -> str:
    """A hint if a directory given as a repository is a model or a model version; else empty."""
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
    """The process that listens on a TCP port, such as ``pid 12 (nginx)``; empty if unknown."""
    try:
        sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
        for process in Path("/proc").iterdir():
            if process.name.isdecimal() and sockets and _holds(process, sockets):
                command = (
                    (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
                )
                return f"pid {process.name} ({command[:_SHOWN]})"
    except OSError:  # the process has ended
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
    except OSError:  # another user's, or ended
        return False


class SlowLoads:
    """Logs the steps of loads that take more than an interval, then twice as long, and so on.

    Args:
        loads: Gives the models being loaded.
        interval_s: Seconds between looks at them.
    """

    def __init__(self, loads: Callable[[], Iterable[ModelStatus]], interval_s: float = _INTERVAL_S) -> None:
        self._loads = loads
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conch-slow-loads", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it; also before it has begun, and again."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        looks: dict[tuple[str, int], int] = {}
        while not self._ended.wait(self._interval_s):
            before, looks = looks, {}
            for model in self._loads():
                for version in model.versions:
                    if version.phase not in UNFINISHED:
                        continue
                    key = model.name, version.version
                    looks[key] = count = before.get(key, 0) + 1
                    # The first look may be at a load that has just begun.
                    if count > 1 and not count & (count - 1):
                        log.info("still loading '%s' version %d: %s", *key, _activity(version))


def _activity(version: VersionStatus) -> str:
    part = ""
    if version.phase is Phase.STAGING and version.total_bytes > 0:
        part = f", {100 * version.done_bytes // version.total_bytes} % of {version.total_bytes:,} bytes"
    return (
        f"{_ACTIVITIES[version.phase]}{part}, for {max(wall_seconds() - version.seconds, 0.0):.0f} s so far"
    )


class Address(Protocol):
    """Options with host and port, or a Unix socket."""

    @property
    def target(self) -> str:
        """Host and port, or ``unix:PATH``."""

    @property
    def address(self) -> str:
        """The host."""

    @property
    def port(self) -> int:
        """The port, or 0."""


def check_free(options: Address) -> None:
    """Checks that an address is free before models are loaded, which may take minutes.

    Raises:
        UnavailableError: The address is not free or unknown; the text is Triton's.
    """
    if options.address.startswith("unix:") or options.port == 0 or getattr(options, "reuse_port", False):
        return
    try:
        for each in tcp_sockets(options.address, options.port, False):
            each.close()
    except socket.gaierror as error:
        raise UnavailableError(f"address '{options.address}' is not known: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            taken = UnavailableError(f"Socket '{options.target}' already in use ")
            owner = listener_of(options.port)
            taken.add_note(f"{owner or 'another process'} listens there; end it, or choose another port")
            raise taken from None
        raise UnavailableError(f"address {options.target} can't be listened on: {error.strerror}") from None
