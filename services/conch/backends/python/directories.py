"""The directories of loaded models, as the import system knows them; callers take turns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

from conch.backends.python.plain import StandIn

_users: dict[str, int] = {}
_added: set[str] = set()


def use(directories: Sequence[str], for_all: bool) -> None:
    """Notes that a model is loaded from there.

    Args:
        directories: The directories.
        for_all: Whether they are to be on `sys.path`.
    """
    for directory in directories:
        _users[directory] = _users.get(directory, 0) + 1
        if for_all and directory not in sys.path:
            sys.path.append(directory)
            _added.add(directory)


def leave(directories: Sequence[str]) -> None:
    """Forgets them where no other load uses them."""
    for directory in directories:
        _users[directory] -= 1
        if not _users[directory]:
            del _users[directory]
            _forget(directory)


def installed(top: str) -> bool:
    """Whether a name is importable without the directories of any model, and not just a folder's name."""
    # The working directory is left out: it is where the server was started, not what it was installed with.
    places = [entry for entry in sys.path if entry not in _users and entry not in ("", ".")]
    spec = PathFinder.find_spec(top, places)
    return spec is not None and spec.origin is not None


def _forget(directory: str) -> None:
    """Takes a directory out of the import system, and modules that came from it by other means."""
    if directory in _added:
        _added.remove(directory)
        if directory in sys.path:
            sys.path.remove(directory)
    sys.path_importer_cache.pop(directory, None)
    start = directory.rstrip("/") + "/"
    for name, module in list(sys.modules.items()):
        if not isinstance(module, StandIn) and (getattr(module, "__file__", None) or "").startswith(start):
            del sys.modules[name]
