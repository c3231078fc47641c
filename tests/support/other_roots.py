"""Links into the root of another process, as of KServe's modelcar: paths that open and do not resolve."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MOUNT = 'mount -t tmpfs none "$2" && cp -R "$1" "$2/models" && echo mounted && read -r _'


@contextmanager
def linked_from_another_root(files: Path, link: Path) -> Iterator[None]:
    """Links to a copy of files that only another process has mounted; skips the test where none may mount."""
    hidden = link.with_name(f"{link.name}-hidden")
    hidden.mkdir()
    own = ["unshare", "--mount", *(() if os.geteuid() == 0 else ("--user", "--map-root-user"))]
    command = [*own, "sh", "-c", _MOUNT, "sh", str(files), str(hidden)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        if not process.stdout.readline():
            pytest.skip("needs the right to mount")
        link.symlink_to(f"/proc/{process.pid}/root{hidden}/models")
        try:
            assert link.is_dir() and not link.resolve().exists()
            yield
        finally:
            process.stdin.close()
