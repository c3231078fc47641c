"""Which file systems tell of changes: those that others change too, elsewhere, do not tell of those."""

from __future__ import annotations

import re
from pathlib import Path

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
    """Whether changes in a file system of a type may happen without an event: nfs, fuse.sshfs, overlay."""
    return kind in _SILENT or kind == "fuse" or kind.startswith("fuse.")


def file_system(path: str, mounts: str | None = None) -> str:
    """The type of the file system that a directory is on, empty if nobody knows.

    Args:
        path: Its absolute path, without links.
        mounts: What is mounted, as the kernel lists it.
    """
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
        if inside and len(point) >= longest:  # the last one mounted there hides the others
            kind, longest = fields[2], len(point)
    return kind
