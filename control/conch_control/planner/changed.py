"""What has changed between two states of a model's files."""

from __future__ import annotations

import re
from collections.abc import Sequence

from conch_control.repository.layout import Fingerprint

_MOST_SHOWN = 3

# Vim asks with 4913 whether it may write to a directory; emacs locks files with links named .#*.
_EDITORS = re.compile(r"(?:^|/)(?:\.[^/]*\.sw[a-z]|4913|[^/]*~|\.?#[^/]*#?|[^/]*\.(?:tmp|bak|orig))$")


def differing(before: Fingerprint, after: Fingerprint) -> tuple[str, ...]:
    """The paths of files that are not the same in both states, sorted."""
    return tuple(sorted({path for path, *_ in set(before) ^ set(after)}))


def some(paths: Sequence[str]) -> str:
    """Paths for a log line, not too many of them."""
    more = len(paths) - _MOST_SHOWN
    shown = ", ".join(paths[:_MOST_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def without_editors(state: Fingerprint) -> Fingerprint:
    """A state without what editors keep beside the files that they have open."""
    return tuple(entry for entry in state if not _EDITORS.search(entry[0]))
