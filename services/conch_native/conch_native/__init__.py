"""Paths of the C host and its headers; see docs/backends/native.md."""

from __future__ import annotations

from pathlib import Path

INTERFACE = 2
"""Number of the interface between the library and conch's workers, in conch_host.h."""

_HERE = Path(__file__).parent


def library() -> Path:
    """Path of the C host."""
    return _HERE / "libtritonserver.so"


def include() -> Path:
    """Folder for a compiler's ``-I``, with the headers ``triton/core/*.h``."""
    return _HERE / "include"
