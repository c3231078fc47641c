"""Path and file system facts for watching: symbolic links, and file systems without reliable events."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

Identity = tuple[int, int]
"""Device and inode of a directory."""

_MOST_LINKS = 40  # the kernel's limit


class WatchError(Exception):
    """The kernel refuses to watch; the text has the reason."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Target of a path.

    Attributes:
        path: Path without links; for a missing target the path it would have.
        hinges: Directory and name of each link on the way and of the first missing entry: a change of one of
            them may change the target.
    """

    path: str
    hinges: tuple[tuple[str, str], ...]


def resolve(path: str) -> Resolved:
    """Resolves an absolute path."""
    hinges: list[tuple[str, str]] = []
    missing = False
    real = "/"
    left = path.split("/")[::-1]
    while left:
        name = left.pop()
        if name in ("", "."):
            continue
        if name == "..":
            real = os.path.dirname(real)
            continue
        here = os.path.join(real, name)
        try:
            target = os.readlink(here)
        except OSError as error:
            if error.errno != errno.EINVAL and not missing:  # EINVAL: not a link
                missing = True
                hinges.append((real, name))
            real = here
            continue
        hinges.append((real, name))
        if len(hinges) > _MOST_LINKS:
            return Resolved(here, tuple(hinges))
        if target.startswith("/"):
            real = "/"
        left += target.split("/")[::-1]
    return Resolved(real, tuple(hinges))


_SILENT = frozenset(
    {
        "9p", "acfs", "afs", "aufs", "beegfs", "ceph", "cifs", "coda", "davfs", "drvfs", "gfs", "gfs2",
        "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "overlay", "prl_fs", "pvfs2", "smb3",
        "smbfs", "v9fs", "vboxsf", "virtiofs", "vmhgfs", "wekafs",
    }
)  # fmt: skip
_MOUNTS = Path("/proc/self/mounts")
_ESCAPE = re.compile(r"\\([0-7]{3})")


def is_silent(kind: str) -> bool:
    """True for file systems that may change without events, such as nfs, fuse.sshfs, overlay."""
    return kind in _SILENT or kind == "fuse" or kind.startswith("fuse.")


def file_system(path: str, mounts: str | None = None) -> str:
    """File system type of a directory; empty if unknown."""
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text(errors="surrogateescape")
        except OSError:
            return ""
    kind, longest = "", -1
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[1])
        inside = point in ("/", path) or path.startswith(f"{point}/")
        if inside and len(point) >= longest:  # a later mount hides earlier ones
            kind, longest = fields[2], len(point)
    return kind
